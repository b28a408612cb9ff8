"""Requests, executors and the queue of a scheduler, and the moves that concern more than one of them.

Keeps them in step with each other. Decides nothing.
"""

from collections.abc import Iterable

from paceline.plan.values import FinalRelease, FinishReason, Int32Array, RecordId
from paceline_scheduler.core.ended import EndedRequest, ended_request
from paceline_scheduler.core.executor.group import ExecutorGroup
from paceline_scheduler.core.executor.state import ExecutorState, sync_from_row
from paceline_scheduler.core.limits import CoreLimits, LimitValues
from paceline_scheduler.core.live import LiveRequest, Status
from paceline_scheduler.core.outputs import DraftCounts
from paceline_scheduler.core.queue.waiting import WaitingQueue
from paceline_scheduler.core.requests.request_table import RequestTable
from paceline_scheduler.core.tenants import Tenants

_ANY_NUM_TOKENS = 65_536  # until an executor has said what it allows


class CoreState:
    """A request that has not ended waits, or is on a row of an executor."""

    def __init__(self, limits: CoreLimits) -> None:
        self.limits = limits
        self.tenants = Tenants()
        self.is_draining = False
        self.num_plannings = 0  # remembered answers are void after each
        self.begin_anew()

    def begin_anew(self) -> None:
        """Keeps the bounds, and whether requests are taken."""
        self.requests = RequestTable()
        self.executors = ExecutorGroup()
        self.waiting = WaitingQueue(self.executors)
        self.num_arrivals = 0
        self.num_untested = 0  # late requests refused since a step ran
        self.first_attached_s: float | None = None
        self.num_plannings += 1
        self._ended: list[LiveRequest] = []

    @property
    def limits_in_force(self) -> LimitValues:
        """Takes the executors' step bound where this scheduler sets none."""
        allowed = (executor.description.max_num_batched_tokens for executor in self.executors)
        return LimitValues(
            max_num_queued_reqs=self.limits.max_num_queued_reqs,
            max_num_queued_tokens=self.limits.max_num_queued_tokens,
            max_num_batched_tokens=self.limits.max_num_batched_tokens or max(allowed, default=_ANY_NUM_TOKENS),
            tenants=self.limits.tenants,
        )

    def set_limits(self, limits: CoreLimits, now: float) -> None:
        if limits.tenants != self.limits.tenants:
            self.tenants.set(limits.tenants, now)
        self.limits = limits

    def enqueue(self, live: LiveRequest) -> None:
        """Removes a former request of the same key."""
        before = self.requests.by_key(live.request.key)
        if before is not None:
            self.replace_previous(before)
        self.requests.drop_retained(live.request.key)
        self.num_arrivals += 1
        if _is_in_outage(live, self.executors.serving(live.request.model)):
            live.phases.outage_until_s = live.phases.submitted_s + live.request.max_outage_s
        self.requests.add(live)
        self.waiting.add(live)

    def note_outages(self, now: float) -> None:
        """After executors came or went: for what waits an outage begins, ends or goes on."""
        for model in self.waiting.models():
            serving = self.executors.serving(model)
            for live in self.waiting.of_model(model):
                if not _is_in_outage(live, serving):
                    live.phases.outage_until_s = None
                elif live.phases.outage_until_s is None:
                    live.phases.outage_until_s = now + live.request.max_outage_s
                    self.requests.watch(live)

    def end(self, live: LiveRequest, final: FinalRelease, now: float) -> None:
        """The next plan releases its row."""
        live.phases.stop(now)
        self.close(live)
        if live.held is not None:
            self.executors.by_address[live.held.address].end_row(live.held.row, final)
            self.count_output(live, now)
            return
        self.waiting.remove(live)
        live.status, live.final = Status.FINISHED, final
        self.count_output(live, now)
        self.forget(live, now)

    def count_output(self, live: LiveRequest, now: float) -> None:
        assert live.final is not None, "it has ended"
        self.tenants.take(live.request.key.tenant, 0, live.final.num_output_tokens, now)

    def close(self, live: LiveRequest) -> None:
        if self.requests.is_open(live):
            self._ended.append(live)
        self.requests.close(live)

    def take_ended(self) -> tuple[EndedRequest, ...]:
        if not self._ended:
            return ()
        ended, self._ended = self._ended, []
        return tuple(map(ended_request, ended))

    def give_up(self, live: LiveRequest, now: float) -> None:
        self.end(live, FinalRelease(self.num_output(live), FinishReason.ERROR), now)

    def forget(self, live: LiveRequest, now: float) -> None:
        """Keeps the record where it ended."""
        self.requests.remove(live)
        self.requests.retain(live, now)
        kept_at = None if live.record.is_acknowledged else live.record.address
        # Earlier attempts left records without an end, which no executor drops by itself.
        if live.attempt > (0 if kept_at is None else 1):
            self.executors.forget_records(live.request.key, kept_at)

    def wait_again(self, live: LiveRequest, now: float) -> None:
        if live.status is Status.FINISHED:
            self.forget(live, now)
        else:
            live.phases.leave_row(now)
            self.waiting.add(live)

    def unplace(self, live: LiveRequest, now: float) -> None:
        """Does not end it."""
        live.phases.leave_row(now)
        if live.held is not None:
            self.executors.by_address[live.held.address].orphan(live.held.row)
        elif live.status is Status.WAITING:
            self.waiting.remove(live)

    def take_off_rows(self, address: str) -> dict[RecordId, LiveRequest]:
        """Returns them with their known output."""
        executor = self.executors.by_address.get(address)
        if executor is None:
            return {}
        found = {}
        for row, live in enumerate(executor.rows.live):
            if live is None:
                continue
            sync_from_row(executor.rows, row, live)
            if not live.is_orphan:
                found[live.request.key] = live
        return found

    def others_with_news(self, address: str) -> list[str]:
        """An event at one may let these plan."""
        if len(self.executors.by_address) == 1:
            return []
        return [
            other.description.address
            for other in self.executors
            if other.description.address != address
            and (
                other.next_plan.ending_rows or other.next_plan.forgets or self.waiting.of_model(other.description.model)
            )
        ]

    def num_output(self, live: LiveRequest) -> int:
        if live.held is None:
            return live.num_output_tokens
        return self.executors.by_address[live.held.address].rows.num_output(live.held.row)

    def drafts_of(self, live: LiveRequest) -> DraftCounts:
        if live.held is None:
            return live.output.drafts
        return self.executors.by_address[live.held.address].rows.drafts(live.held.row)

    def output_of(self, live: LiveRequest) -> Int32Array:
        output = live.output.token_ids
        if live.held is not None:
            output = self.executors.by_address[live.held.address].rows.output_token_ids(live.held.row)
        return output if live.final is None else output[: live.final.num_output_tokens]

    def replace_previous(self, before: LiveRequest) -> None:
        self.requests.remove(before)
        if before.address is not None:
            self.executors.by_address[before.address].leaving_keys.add(before.request.key)
        self.executors.forget_records(before.request.key, before.address)


def _is_in_outage(live: LiveRequest, serving: Iterable[ExecutorState]) -> bool:
    """Nobody is there to begin it. Of what was begun the client has tokens: that waits for however long it takes."""
    return not live.attempt and not any(live.fits(executor.description) for executor in serving)

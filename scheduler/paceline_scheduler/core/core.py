"""The scheduler's state machine: events and the time in, plans and outputs out.

The one place that knows all requests and all executors. It decides with the planner, and changes executors only through
`ExecutorState`, `apply_result` and `rebuild`.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from paceline_scheduler.core.admission import check_fits, check_queue, no_longer_served
from paceline_scheduler.core.blocks import BlockCounts
from paceline_scheduler.core.executor_state import ExecutorState
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest, Status, finish_notice
from paceline_scheduler.core.outputs import NO_OUTPUTS, Failure, Outputs, TokenOutputs
from paceline_scheduler.core.plan import BatchPlan, FinalRelease, StepResult
from paceline_scheduler.core.planner import ExecutorView, Waiting, decide
from paceline_scheduler.core.reconcile import rebuild
from paceline_scheduler.core.request import FinishReason, Request, RequestKey
from paceline_scheduler.core.results import apply_result, take_off
from paceline_scheduler.core.rows import ENDING, RUNNING
from paceline_scheduler.core.waiting import WaitingQueue
from paceline_scheduler.errors import DeadlineExceededError, DuplicateRequestError, UnknownRequestError


@dataclass(frozen=True, slots=True)
class ExecutorCounts:
    """What operators see of an executor."""

    num_running_requests: int
    num_plans_in_flight: int
    blocks: BlockCounts
    num_filled_slots: int
    num_owned_slots: int


class Core:
    """All requests and executors of one scheduler. `now` is seconds on the injected monotonic clock."""

    def __init__(self, limits: CoreLimits) -> None:
        self.limits = limits
        self._executors: dict[str, ExecutorState] = {}
        self._waiting = WaitingQueue()
        self._by_handle: dict[int, LiveRequest] = {}  # what the edge still hears of
        self._by_key: dict[RequestKey, LiveRequest] = {}  # until it has left its row as well
        self._deadlines: list[tuple[float, int, LiveRequest]] = []
        self._num_arrivals = 0

    # Requests

    def submit(self, request: Request, now: float) -> None:
        """Queue a request; raises a RequestRefusedError, changing nothing, if it is not taken."""
        before = self._by_key.get(request.key)
        if before is not None and before.request.handle in self._by_handle:
            raise DuplicateRequestError(f"request_id {request.key.request_id!r} is in use; choose another one")
        check_fits(request, self._executors.values())
        check_queue(request, self._waiting, self.limits, self._executors.values())
        if before is not None:
            self._make_way(before)
        self._num_arrivals += 1
        live = LiveRequest(request, self._num_arrivals, submitted_s=now)
        self._by_handle[request.handle] = self._by_key[request.key] = live
        if request.deadline_s is not None:
            self._watch_deadline(request.deadline_s, live)
        self._waiting.add(live)

    def end(self, handle: int, num_output_tokens: int, reason: FinishReason) -> int:
        """End a request from the edge's side; unknown handles are ignored, nothing more is delivered for it.

        Returns how many tokens of its prompt came from the prefix cache.
        """
        live = self._by_handle.get(handle)
        if live is None:
            return 0
        self._end(live, FinalRelease(num_output_tokens, reason))
        return live.num_prompt_cached_tokens or 0

    def cancel(self, key: RequestKey) -> Outputs:
        """End a request as CANCELLED and tell its stream."""
        live = self._by_key.get(key)
        if live is None or live.request.handle not in self._by_handle:
            raise UnknownRequestError(f"no running request {key.request_id!r} of this tenant")
        outputs = self._finish_notice(live, FinishReason.CANCELLED)
        self._end(live, FinalRelease(self._num_output(live), FinishReason.CANCELLED))
        return Outputs(tokens=(outputs,))

    def expire(self, now: float) -> Outputs:
        """Fail the requests whose deadline has passed."""
        failures = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, live = heapq.heappop(self._deadlines)
            if live.request.handle not in self._by_handle:
                continue
            failures.append(Failure(live.request.handle, DeadlineExceededError(_deadline_sentence(live))))
            self._end(live, FinalRelease(self._num_output(live), FinishReason.ERROR))
        return Outputs(failures=tuple(failures))

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do next."""
        while self._deadlines and self._deadlines[0][2].request.handle not in self._by_handle:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def acknowledge(self, keys: Iterable[RequestKey]) -> None:
        """Let the executors forget the records of requests whose clients have all of them; others are passed over."""
        for key in keys:
            live = self._by_key.get(key)
            if live is None:
                self._forget_records(key)
            elif live.request.handle not in self._by_handle:
                live.is_acknowledged = True  # its record is made when it leaves its row

    # Executors

    def attach(self, description: ExecutorDescription, snapshot: Snapshot) -> Outputs:
        """Take over an executor as its snapshot shows it; requests it lost wait again."""
        wanted = self._detach_all(description.address)
        executor, recovered = rebuild(description, snapshot, wanted)
        if description.address in self._executors:
            executor.pending_forgets.extend(self._executors[description.address].pending_forgets)
        executor.pending_forgets.extend(
            seen.key for seen in snapshot.rows if seen.is_open_record and seen.key not in self._by_key
        )
        self._executors[description.address] = executor
        for live in wanted.values():
            if live.row is None:
                self._wait_again(live)
        for live, outputs in recovered:
            if outputs.finishes:
                self._by_handle.pop(live.request.handle, None)
        return Outputs(tuple(outputs for _, outputs in recovered), self._fail_unservable())

    def detach(self, address: str) -> None:
        """The stream to an executor ended: plan nothing for it until it attaches again or is lost."""
        if address in self._executors:
            self._executors[address].attached = False

    def lose(self, address: str) -> None:
        """An executor is gone: its requests wait for another placement."""
        if address not in self._executors:
            return
        for live in self._detach_all(address).values():
            live.num_executor_deaths += 1
            self._wait_again(live)
        description = self._executors[address].description
        lost = ExecutorState(description)
        lost.attached = False
        lost.pending_forgets.extend(self._executors[address].pending_forgets)
        self._executors[address] = lost

    def forget_executor(self, address: str) -> Outputs:
        """An executor that was lost is no longer expected back: fail what only it could hold."""
        self._executors.pop(address, None)
        return Outputs(failures=self._fail_unservable())

    def drain(self, address: str) -> int:
        """Place nothing new on an executor; returns how many requests still run there. KeyError if unknown."""
        executor = self._executors[address]
        executor.draining = True
        return executor.rows.num_running

    # Steps

    def plan(self, address: str, now: float) -> BatchPlan | None:
        """Return the next step of an executor, or None when there is nothing to do or enough is in flight."""
        executor = self._executors.get(address)
        if executor is None or not executor.attached:
            return None
        max_in_flight = min(self.limits.max_plans_in_flight, executor.description.max_plans_in_flight)
        if len(executor.in_flight) >= max_in_flight:
            return None
        tags, releases = executor.settle()
        view = ExecutorView(
            executor.description, executor.rows, executor.pool, executor.step_time, executor.leaving_keys
        )
        decision = decide(view, self._waiting_for(executor), self.limits)
        if decision.is_empty and not (tags or releases or executor.pending_forgets):
            return None
        for admission in decision.admissions:
            self._waiting.remove(admission.live)
        return executor.commit(decision, tags, releases, now)

    def complete(self, address: str, result: StepResult) -> Outputs:
        """Apply a result; raises DivergenceError, changing nothing, when it does not fit what was planned."""
        applied = apply_result(self._executors[address], result)
        for live in applied.ended:
            self._by_handle.pop(live.request.handle, None)
        for live in applied.left:
            if live.status is Status.FINISHED:
                self._forget(live)
            else:
                self._waiting.add(live)
        tokens = () if applied.tokens is None else (applied.tokens,)
        return Outputs(tokens, applied.failures) if tokens or applied.failures else NO_OUTPUTS

    # Views

    def executor(self, address: str) -> ExecutorState:
        """Return an executor's state, to look at. KeyError if unknown."""
        return self._executors[address]

    def num_waiting(self) -> tuple[int, int]:
        """Return the length of the queue in requests and in tokens."""
        return self._waiting.num_requests, self._waiting.num_tokens

    def num_unfinished(self) -> int:
        """Return how many requests the edge still hears of."""
        return len(self._by_handle)

    def counts(self, address: str) -> ExecutorCounts:
        """Return what operators see of an executor. KeyError if unknown."""
        executor = self._executors[address]
        occupied = (executor.rows.state == RUNNING) | (executor.rows.state == ENDING)
        return ExecutorCounts(
            num_running_requests=executor.rows.num_running,
            num_plans_in_flight=len(executor.in_flight),
            blocks=executor.pool.counts(),
            num_filled_slots=int(executor.rows.num_computed[occupied].sum()),
            num_owned_slots=int(executor.rows.num_slots[occupied].sum()),
        )

    def check(self) -> None:
        """Assert the conservation of blocks and the agreement of tables; for tests."""
        for executor in self._executors.values():
            executor.pool.check(executor.rows.tables)
        running = {(live.address, live.row) for live in self._by_key.values() if live.row is not None}
        assert len(running) == sum(live.row is not None for live in self._by_key.values()), "one request per row"

    # Inside

    def _waiting_for(self, executor: ExecutorState) -> Waiting:
        """Return what the executor may admit now: its share of the queue among those that are no busier than it is."""
        line = () if executor.draining else self._waiting.line(executor.description.model)
        if not line or len(self._executors) == 1:
            return Waiting(line, len(line))
        sharing = sum(
            other.attached
            and not other.draining
            and other.description.model == executor.description.model
            and other.rows.num_running <= executor.rows.num_running
            for other in self._executors.values()
        )
        return Waiting(line, -(-len(line) // sharing))

    def _watch_deadline(self, deadline_s: float, live: LiveRequest) -> None:
        if len(self._deadlines) > 2 * len(self._by_handle) + 64:
            # Most of these requests ended in time; what is left of them must not pile up.
            self._deadlines = [d for d in self._deadlines if d[2].request.handle in self._by_handle]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_s, live.arrival_number, live))

    def _fail_unservable(self) -> tuple[Failure, ...]:
        """End what waits and can never run: without this it would wait, and hold up others, for ever."""
        failures = []
        for live in self._waiting.all():
            error = no_longer_served(live, self._executors.values())
            if error is not None:
                failures.append(Failure(live.request.handle, error))
                self._end(live, FinalRelease(self._num_output(live), FinishReason.ERROR))
        return tuple(failures)

    def _num_output(self, live: LiveRequest) -> int:
        if live.row is None or live.address is None:
            return len(live.output_token_ids)
        return self._executors[live.address].rows.num_output(live.row)

    def _end(self, live: LiveRequest, final: FinalRelease) -> None:
        del self._by_handle[live.request.handle]
        if live.row is not None and live.address is not None:
            self._executors[live.address].end_row(live.row, final)
            return
        self._waiting.remove(live)
        live.status, live.final = Status.FINISHED, final
        self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        """It is over and on no row: only the record of its end is kept, where it ended, until that is acknowledged."""
        if self._by_key.get(live.request.key) is live:
            del self._by_key[live.request.key]
        kept_at = None if live.is_acknowledged else live.record_address
        # Attempts before the last left records without an end, which no executor drops by itself.
        if live.attempt > (0 if kept_at is None else 1):
            self._forget_records(live.request.key, kept_at)

    def _make_way(self, before: LiveRequest) -> None:
        """Its id is used again: nothing of it is left where the new request may be placed."""
        if before.address is not None:
            self._executors[before.address].leaving_keys.add(before.request.key)
        self._forget_records(before.request.key, before.address)

    def _forget_records(self, key: RequestKey, kept_at: str | None = None) -> None:
        for address, executor in self._executors.items():
            if address != kept_at:
                executor.pending_forgets.append(key)

    def _wait_again(self, live: LiveRequest) -> None:
        if live.status is Status.FINISHED:
            self._forget(live)
        else:
            self._waiting.add(live)

    def _detach_all(self, address: str) -> dict[RequestKey, LiveRequest]:
        """Take all requests off the rows of an executor, keeping what is known of their output."""
        executor = self._executors.get(address)
        if executor is None:
            return {}
        found = {}
        for row, live in enumerate(executor.rows.live):
            if live is None:
                continue
            take_off(executor, row, live)
            if not live.is_stranger:
                found[live.request.key] = live
        return found

    def _finish_notice(self, live: LiveRequest, reason: FinishReason) -> TokenOutputs:
        """Return outputs without tokens that only tell the end of a request."""
        num_output = self._num_output(live)
        notice = finish_notice(live, reason, None, num_output)
        return TokenOutputs(
            handles=(live.request.handle,),
            offsets=np.array([num_output], dtype=np.int32),
            num_tokens=np.zeros(1, dtype=np.int32),
            token_ids=np.zeros(0, dtype=np.int32),
            attempts=np.array([live.attempt], dtype=np.int32),
            rolling_hashes=np.array([self._output_hash(live)], dtype=np.uint64),
            finishes={live.request.handle: notice},
        )

    def _output_hash(self, live: LiveRequest) -> int:
        if live.row is None or live.address is None:
            return live.output_hash
        return int(self._executors[live.address].rows.output_hash[live.row])


def _deadline_sentence(live: LiveRequest) -> str:
    return f"the timeout passed while the request was {live.status.value}; allow more time or send less"

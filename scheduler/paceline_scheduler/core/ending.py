"""How requests end other than by a step."""

from collections.abc import Iterable

from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import FinalRelease, FinishReason, RecordId
from paceline_scheduler.core.events import BeginAnew
from paceline_scheduler.core.executor.attachment import Attachment
from paceline_scheduler.core.live import LiveRequest, finish_notice
from paceline_scheduler.core.outputs import Failure, FinishNotice, TokenOutputs
from paceline_scheduler.core.planning.planner import MAX_LOOKED_AT
from paceline_scheduler.core.queue.admission import deadline_misses, no_longer_served
from paceline_scheduler.core.request_outputs import outputs_of
from paceline_scheduler.core.state import CoreState
from paceline_scheduler.errors import (
    DeadlineExceededError,
    GivenUpError,
    OutageError,
    RequestFailedError,
    UnknownRequestError,
)

_PROBE_EVERY = 16
"""Of so many late requests one is run all the same: else nothing would test the forecast."""

_GIVEN_UP_RETRY_S = 0.1


def detach(state: CoreState, handle: int, now: float) -> None:
    live = state.requests.by_handle(handle)
    if live is None:
        return
    if live.request.is_resumable:
        state.requests.detach(live, now)
    else:
        state.end(live, FinalRelease(state.num_output(live), FinishReason.CANCELLED), now)


def end(state: CoreState, handle: int, final: FinalRelease, now: float) -> FinishNotice | None:
    live = state.requests.by_handle(handle)
    if live is None:
        return None
    drafts = state.drafts_of(live)
    state.end(live, final, now)
    return finish_notice(live, final.reason, None, final.num_output_tokens, drafts)


def cancel(state: CoreState, key: RecordId, now: float) -> TokenOutputs:
    live = state.requests.by_key(key)
    if live is None or not state.requests.is_open(live):
        raise UnknownRequestError(f"this tenant runs no request {key.request_id!r}; check the request_id")
    output = state.output_of(live)
    output_hash = rolling_hash(HASH_START, output)
    state.end(live, FinalRelease(len(output), FinishReason.CANCELLED), now)
    return outputs_of(live, len(output), output[:0], output_hash, FinishReason.CANCELLED)


def acknowledge(state: CoreState, keys: Iterable[RecordId]) -> None:
    requests = state.requests
    for key in keys:
        requests.drop_retained(key)
        live = requests.by_key(key)
        if live is None:
            state.executors.forget_records(key)
        elif not requests.is_open(live):
            live.record.is_acknowledged = True


def expire(state: CoreState, now: float) -> tuple[Failure, ...]:
    requests = state.requests
    requests.drop_expired(now)
    for live in requests.pop_abandoned(now):
        state.give_up(live, now)
    return _fail(state, [(live, _lateness(live, now)) for live in requests.pop_late(now)], now)


def end_detached(state: CoreState, executor: Attachment, now: float) -> None:
    """Ends requests without a listener that keep others waiting.

    A queued one makes newcomers be refused; a running one holds back those in the queue that have a listener.
    """
    if executor.draining or not state.executors.is_synced:
        return  # what waits does so for another reason
    queue = tuple(state.waiting.of_model(executor.description.model))
    for live in queue:
        if live.is_abandoned(now):
            state.give_up(live, now)
    if any(live.detached_until_s is None for live in queue):
        for live in [live for live in executor.ledger.rows.live if live is not None and state.requests.is_open(live)]:
            if live.is_abandoned(now):
                state.give_up(live, now)


def refuse_late(state: CoreState, now: float) -> tuple[Failure, ...]:
    """Even alone these requests would miss their deadline: they would cost a prefill."""
    if not state.requests.has_deadlines:
        return ()
    waiting, late = state.waiting, []
    for model in waiting.models():
        late += deadline_misses(
            waiting.of_model(model)[:MAX_LOOKED_AT], state.executors.serving(model), state.limits, now
        )
    first = state.num_untested
    state.num_untested += len(late)
    return _fail(state, (each for number, each in enumerate(late, first + 1) if number % _PROBE_EVERY), now)


def fail_unservable(state: CoreState, now: float) -> tuple[Failure, ...]:
    """These requests can never run; they would hold up others for ever."""
    if not state.executors.is_synced:
        return ()
    found = [(live, no_longer_served(live, state.executors)) for live in state.waiting.all()]
    return _fail(state, [(live, error) for live, error in found if error is not None], now)


def begin_anew(state: CoreState, event: BeginAnew) -> tuple[Failure, ...]:
    error = GivenUpError(event.reason, _GIVEN_UP_RETRY_S, event.active)
    failures = tuple(Failure(handle, error) for handle in sorted(state.requests.listening_handles()))
    state.begin_anew()
    state.executors.expect(event.addresses)
    return failures


def _fail(
    state: CoreState, failing: Iterable[tuple[LiveRequest, RequestFailedError]], now: float
) -> tuple[Failure, ...]:
    failures = []
    for live, error in failing:
        failures.append(Failure(live.request.handle, error))
        state.give_up(live, now)
    return tuple(failures)


def _lateness(live: LiveRequest, now: float) -> RequestFailedError:
    request = live.request
    if request.deadline_s is None or now < request.deadline_s:
        return OutageError(request.model, request.max_outage_s)
    return DeadlineExceededError(
        f"the timeout passed while the request was {live.status.value}; allow more time or send less"
    )

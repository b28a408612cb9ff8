"""How requests come in: submitted for the first time, or by a client that comes back. All of a group, or none.

Everything is checked before anything changes: what is refused has left no trace.
"""

from collections.abc import Sequence
from dataclasses import replace

from paceline.plan.hashes import HASH_START
from paceline_scheduler.core import recovery
from paceline_scheduler.core.live import MAX_WAITED_S, LiveRequest, queue_key_of
from paceline_scheduler.core.outputs import Resumed
from paceline_scheduler.core.phases import PhaseClock
from paceline_scheduler.core.queue.admission import check_fits, check_queue
from paceline_scheduler.core.request import NOTHING_HELD, Request
from paceline_scheduler.core.requests.resuming import ResumeMode, prior_of, resume_mode
from paceline_scheduler.core.retained import RetainedLogprobs, RetainedOutput
from paceline_scheduler.core.state import CoreState
from paceline_scheduler.errors import (
    DrainingError,
    DuplicateRequestError,
    InvalidRequestError,
    NoExecutorError,
    UnsupportedError,
)

_OWED_S = 60.0
"""For so long a new scheduler believes that another one took a request."""

_OWED_RETRY_S = 0.5
_DRAINING_RETRY_S = 1.0


def submit(state: CoreState, requests: Sequence[Request], now: float) -> None:
    _require_open(state)
    for request in requests:
        _require_unused(state, request)
    _begin_all(state, requests, now)


def resume(state: CoreState, requests: Sequence[Request], now: float) -> tuple[Resumed, ...]:
    _require_open(state)
    found = []
    for request in requests:
        live = state.requests.by_key(request.key) or state.requests.retained(request.key)
        output = prior_of(request) if live is None else state.output_of(live)
        found.append((request, live, resume_mode(live, output, request)))
    begun = iter(_begin_all(state, [each for each, _, mode in found if mode is ResumeMode.START], now))
    return tuple(
        next(begun) if mode is ResumeMode.START else _go_on(state, each, live, mode, now) for each, live, mode in found
    )


def check_taken(state: CoreState, live: LiveRequest, now: float, *, is_returning: bool = False) -> None:
    """Raises a RequestRefusedError. No forecast refuses a request that another scheduler took."""
    executors = state.executors
    try:
        check_fits(live.request, executors.by_address.values(), state.limits)
    except (InvalidRequestError, UnsupportedError) as error:
        if is_returning:
            raise NoExecutorError(
                f"no attached executor can hold the request ({error}); try again", _OWED_RETRY_S
            ) from error
        raise
    check_queue(live, state.waiting, state.limits, executors.serving(live.request.model), is_returning=is_returning)
    if not is_returning:
        tenant = live.request.key.tenant
        state.tenants.check_queue(tenant, state.waiting.of_tenant(tenant), (1, live.num_own_tokens))
        state.tenants.check_rates(tenant, now)


def _require_open(state: CoreState) -> None:
    if state.is_draining:
        raise DrainingError("this scheduler is shutting down; send the request again", _DRAINING_RETRY_S)


def _require_unused(state: CoreState, request: Request) -> None:
    before = state.requests.by_key(request.key)
    if before is not None and state.requests.is_open(before) and before.detached_until_s is None:
        raise DuplicateRequestError(f"request_id {request.key.request_id!r} is in use; choose another one")


def _go_on(state: CoreState, request: Request, live: LiveRequest | None, mode: ResumeMode, now: float) -> Resumed:
    assert live is not None, "what is not known is begun"
    if mode is ResumeMode.ATTACH:
        return recovery.join(state, live, request, now)
    return recovery.restart(state, live, request, now)


def _begin_all(state: CoreState, requests: Sequence[Request], now: float) -> list[Resumed]:
    ended = [recovery.ended_by_prior(state, request) for request in requests]
    waiting = [each for each, end in zip(requests, ended, strict=True) if end is None]
    for live in _checked(state, waiting, now):
        before = state.requests.by_key(live.request.key)
        if before is not None and state.requests.is_open(before):
            state.give_up(before, now)
        state.enqueue(live)
        state.tenants.take(live.request.key.tenant, 1, live.num_own_tokens, now)
    return [end or Resumed(prior_of(each), None) for each, end in zip(requests, ended, strict=True)]


def _checked(state: CoreState, requests: Sequence[Request], now: float) -> list[LiveRequest]:
    newcomers: list[LiveRequest] = []
    ahead: list[LiveRequest] = []  # queued while those behind them are checked
    try:
        for request in requests:
            for live in newcomers[len(ahead) :]:
                state.waiting.add(live)
                ahead.append(live)
            if any(live.request.key == request.key for live in newcomers):
                raise DuplicateRequestError(
                    f"two completions have the request_id {request.key.request_id!r}; choose another one"
                )
            live = _newcomer(state, request, state.num_arrivals + 1 + len(newcomers), now)
            check_taken(state, live, now, is_returning=_is_returning(state, request, now))
            newcomers.append(live)
    finally:
        for live in ahead:
            state.waiting.remove(live)
    return newcomers


def _newcomer(state: CoreState, request: Request, arrival_number: int, now: float) -> LiveRequest:
    point, prior, requests = request.point, prior_of(request), state.requests
    before = requests.by_key(request.key) or requests.retained(request.key)
    submitted_s = now - min(request.waited_s, MAX_WAITED_S)
    output_hash = point.resume_hash if len(prior) else HASH_START
    logprobs = RetainedLogprobs(len(prior)) if request.num_logprobs is not None else None
    return LiveRequest(
        request if point is NOTHING_HELD else replace(request, point=NOTHING_HELD),
        queue_key_of(request, arrival_number, submitted_s),
        PhaseClock.begin(now - request.waited_s, was_placed=point.last_attempt > 0 or len(prior) > 0),
        attempt=max(point.last_attempt, 0 if before is None else before.attempt),
        output=RetainedOutput(prior, output_hash, logprobs),
    )


def _is_returning(state: CoreState, request: Request, now: float) -> bool:
    """Another scheduler may have taken it before this one started."""
    since_s = now if state.first_attached_s is None else state.first_attached_s
    return request.attachment > 1 and now - since_s < _OWED_S

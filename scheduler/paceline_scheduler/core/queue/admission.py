"""Whether a request is taken: some executor could ever hold it, and the queue has room. Decides; changes nothing."""

from collections.abc import Collection, Iterable, Sequence, Set

from paceline.forms.library import LIBRARY
from paceline_scheduler.core.executor.attachment import Attachment
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.planning.capacity import ExecutorView, find_hits
from paceline_scheduler.core.planning.forecast import Ahead, Idle, begin_s, idle, load_of
from paceline_scheduler.core.planning.shares import max_request_tokens
from paceline_scheduler.core.queue.outlook import first_token_s
from paceline_scheduler.core.queue.waiting import WaitingQueue
from paceline_scheduler.core.request import Request
from paceline_scheduler.errors import (
    DeadlineUnreachableError,
    InvalidRequestError,
    NoExecutorError,
    NoLongerServedError,
    QueueFullError,
    UnknownModelError,
    UnsupportedError,
)

_NO_EXECUTOR_RETRY_S = 1.0
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 30.0


def check_fits(request: Request, executors: Collection[Attachment], limits: CoreLimits) -> None:
    """Raises a RequestRefusedError where no executor could hold it in its tenant's share, or operators keep all of them
    from taking it. One that is away is waited for.
    """
    if not executors:
        raise NoExecutorError("no executor is attached yet; try again", _NO_EXECUTOR_RETRY_S)
    serving = [executor for executor in executors if executor.description.model == request.model]
    if not serving:
        raise UnknownModelError(f"no executor serves the model {request.model!r}; ListModels names the models served")
    serving = [executor for executor in serving if not _is_closed(executor)]
    if not serving:
        raise NoExecutorError(f"every executor of the model {request.model!r} is draining", _NO_EXECUTOR_RETRY_S)
    if request.structured:
        serving = [executor for executor in serving if executor.description.holds_forms]
        if not serving:
            sentence = f"no executor of the model {request.model!r} holds outputs to a form with {LIBRARY}"
            raise UnsupportedError("structured", f"{sentence}; upgrade them, or leave structured unset")
    num_prompt = len(request.prompt_token_ids)
    tenant = request.key.tenant
    room = max(max_request_tokens(executor.description, tenant, limits.tenants) for executor in serving) - num_prompt
    if room < 1:
        raise InvalidRequestError(
            "prompt", f"{num_prompt} tokens leave no room for output; at most {num_prompt + room - 1} fit"
        )
    if request.max_tokens is not None and request.max_tokens > room:
        raise InvalidRequestError(
            "stopping.max_tokens", f"is {request.max_tokens}; after a prompt of {num_prompt} tokens at most {room} fit"
        )


def _is_closed(executor: Attachment) -> bool:
    """By an operator. One that is away, or goes by itself, comes back as another process."""
    return executor.attached and executor.draining and not executor.leaving


def check_queue(
    live: LiveRequest,
    waiting: WaitingQueue,
    limits: CoreLimits,
    serving: Sequence[Attachment],
    *,
    is_returning: bool = False,
) -> None:
    """Raises where it would overfill the queue, or wait for too long. Only a full queue refuses one that lost its
    scheduler. No time is forecast without executors `serving` its model.
    """
    num_prompt = live.num_prompt_tokens
    if num_prompt > limits.max_num_queued_tokens:
        raise InvalidRequestError(
            "prompt", f"has {num_prompt} tokens; the queue takes at most {limits.max_num_queued_tokens}"
        )
    tenant = live.request.key.tenant
    if not waiting.takes_requests(1, tenant, limits.max_num_queued_reqs):
        raise queue_full(waiting, limits, retry_after_s(waiting, limits, serving))
    if not waiting.takes_tokens(num_prompt, tenant, limits.max_num_queued_tokens):
        raise QueueFullError(
            f"{waiting.num_tokens} prompt tokens are waiting, the limit is {limits.max_num_queued_tokens}",
            retry_after_s(waiting, limits, serving),
        )
    ahead = waiting.ahead_of(live, full_tenants(serving))
    fitting = [executor for executor in serving if live.fits(executor.description)]
    if ahead.num_requests and fitting and not is_returning:
        _check_first_token(first_token_s(live, fitting, ahead, limits), ahead, limits)


def full_tenants(serving: Sequence[Attachment]) -> Set[str]:
    """Whose requests the last plan of each executor passed over."""
    return frozenset.intersection(*(executor.full_tenants for executor in serving)) if serving else frozenset()


def check_wait(ahead: Ahead, limits: CoreLimits, serving: Sequence[Attachment]) -> None:
    """Cheap: it comes before a prompt is read."""
    if ahead.num_requests and serving:
        _check_first_token(first_token_s(None, serving, ahead, limits), ahead, limits)


def _check_first_token(expected_s: float, ahead: Ahead, limits: CoreLimits) -> None:
    if expected_s > limits.expected_first_token_s:
        raise QueueFullError(
            f"the first token is expected in {expected_s:.1f} s, the limit is {limits.expected_first_token_s:g} s: "
            f"{ahead.num_requests} requests with {ahead.num_tokens} tokens are ahead",
            _within(expected_s - limits.expected_first_token_s),
        )


def queue_full(waiting: WaitingQueue, limits: CoreLimits, retry_s: float) -> QueueFullError:
    return QueueFullError(
        f"{waiting.num_requests} requests are waiting, the limit is {limits.max_num_queued_reqs}", retry_s
    )


def deadline_misses(
    waiting: Iterable[LiveRequest], serving: Iterable[Attachment], limits: CoreLimits, now: float
) -> list[tuple[LiveRequest, DeadlineUnreachableError]]:
    """They would miss it before their first output, even alone."""
    executors = [idle(executor.view(), limits) for executor in serving]
    return [
        (live, DeadlineUnreachableError(_too_late_sentence(live)))
        for live in waiting
        # Its client has tokens already.
        if live.attempt == 0
        and live.request.deadline_s is not None
        and _is_late(live, executors, live.request.deadline_s - now, limits)
    ]


def _is_late(live: LiveRequest, executors: Sequence[Idle], left_s: float, limits: CoreLimits) -> bool:
    fitting = [executor for executor in executors if live.fits(executor.view.description)]
    return bool(fitting) and all(_is_late_on(live, executor, left_s, limits) for executor in fitting)


def _is_late_on(live: LiveRequest, executor: Idle, left_s: float, limits: CoreLimits) -> bool:
    num_output = live.least_rest_on(executor.view.description)
    max_drafts = live.max_drafts_on(executor.view.description, limits)
    num_known, num_shared = live.num_known_tokens, live.num_known_tokens - live.num_own_tokens
    if left_s >= executor.least_s(num_shared, num_known, num_output, max_drafts):
        return False  # as most are, without the prefix cache
    return left_s < executor.least_s(_num_cached(live, executor.view), num_known, num_output, max_drafts)


def _too_late_sentence(live: LiveRequest) -> str:
    return (
        f"{live.num_known_tokens} tokens cannot be computed before its timeout passes, even alone; it was not started: "
        "allow more time or send less"
    )


def no_longer_served(live: LiveRequest, executors: Iterable[Attachment]) -> NoLongerServedError | None:
    """Returns None if a present executor can run it."""
    descriptions = [executor.description for executor in executors]
    if any(live.fits(description) for description in descriptions):
        return None
    request = live.request
    largest = max((d.max_request_tokens for d in descriptions if d.model == request.model), default=0)
    if not largest:
        return NoLongerServedError(
            f"the executors of the model {request.model!r} are gone; ListModels names the models served"
        )
    if request.structured and not any(d.holds_forms for d in descriptions if d.model == request.model):
        return NoLongerServedError(f"the executors of {request.model!r} that hold outputs to a form are gone")
    return NoLongerServedError(
        f"the executor that could hold this request is gone; the others hold at most {largest} tokens"
    )


def retry_after_s(waiting: WaitingQueue, limits: CoreLimits, executors: Iterable[Attachment]) -> float:
    """An eighth of the queue runs by then: those who come back find room."""
    loads = [load_of(executor.view(), limits) for executor in executors if executor.attached]
    if not loads:
        return _MAX_RETRY_S
    return _within(begin_s(loads, waiting.all_ahead.share(8)))


def _within(seconds: float) -> float:
    return min(max(seconds, _MIN_RETRY_S), _MAX_RETRY_S)


def _num_cached(live: LiveRequest, view: ExecutorView) -> int:
    return len(find_hits(view, live)) * view.description.block_size

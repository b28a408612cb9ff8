"""Whether a request is taken: some executor could ever hold it, and the queue has room. Decides; changes nothing."""

from collections.abc import Collection, Iterable

from paceline_scheduler.core.executor_state import ExecutorState
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.request import Request
from paceline_scheduler.core.waiting import WaitingQueue
from paceline_scheduler.errors import (
    InvalidRequestError,
    NoExecutorError,
    NoLongerServedError,
    QueueFullError,
    UnknownModelError,
)

_NO_EXECUTOR_RETRY_S = 1.0
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 30.0
_RATE_CHUNK = 256


def check_fits(request: Request, executors: Collection[ExecutorState]) -> None:
    """Refuse a request that no executor could ever hold, or that none would take now."""
    if not executors:
        raise NoExecutorError("no executor is attached yet; try again", _NO_EXECUTOR_RETRY_S)
    serving = [executor for executor in executors if executor.description.model == request.model]
    if not serving:
        raise UnknownModelError(f"no executor serves the model {request.model!r}; ListModels names those there are")
    if all(executor.draining for executor in serving):
        raise NoExecutorError(f"every executor of the model {request.model!r} is draining", _NO_EXECUTOR_RETRY_S)
    num_prompt = len(request.prompt_token_ids)
    room = max(executor.description.max_request_tokens for executor in serving) - num_prompt
    if room < 1:
        raise InvalidRequestError(
            "prompt", f"{num_prompt} tokens leave no room for output: at most {num_prompt + room - 1} fit"
        )
    if request.max_tokens is not None and request.max_tokens > room:
        raise InvalidRequestError(
            "stopping.max_tokens", f"{request.max_tokens} after a prompt of {num_prompt} tokens exceeds {room}"
        )


def check_queue(
    request: Request, waiting: WaitingQueue, limits: CoreLimits, executors: Iterable[ExecutorState]
) -> None:
    """Refuse a request that would overfill the queue."""
    num_prompt = len(request.prompt_token_ids)
    if num_prompt > limits.max_num_queued_tokens:
        raise InvalidRequestError(
            "prompt", f"{num_prompt} tokens are more than the {limits.max_num_queued_tokens} that may wait"
        )
    if waiting.num_requests >= limits.max_num_queued_reqs:
        raise QueueFullError(
            f"{waiting.num_requests} requests are waiting, the limit", _retry_after_s(waiting, executors)
        )
    if waiting.num_tokens + num_prompt > limits.max_num_queued_tokens:
        raise QueueFullError(
            f"{waiting.num_tokens} prompt tokens are waiting, near the limit", _retry_after_s(waiting, executors)
        )


def no_longer_served(live: LiveRequest, executors: Iterable[ExecutorState]) -> NoLongerServedError | None:
    """Return why a waiting request can never run on what executors there are now, None if it can."""
    descriptions = [executor.description for executor in executors]
    if any(live.fits(description) for description in descriptions):
        return None
    request = live.request
    largest = max((d.max_request_tokens for d in descriptions if d.model == request.model), default=0)
    if not largest:
        return NoLongerServedError(
            f"the executors of the model {request.model!r} are gone; ListModels names what is left"
        )
    return NoLongerServedError(
        f"the executor that could hold this request is gone; what is left holds {largest} tokens of prompt and output"
    )


def _retry_after_s(waiting: WaitingQueue, executors: Iterable[ExecutorState]) -> float:
    """Return how long the waiting prompts will take to be computed, roughly: when there is room again."""
    rate = sum(_RATE_CHUNK / e.step_time.predict_ns(_RATE_CHUNK, 0) * 1e9 for e in executors if e.attached)
    seconds = waiting.num_tokens / rate if rate else _MAX_RETRY_S
    return min(max(seconds, _MIN_RETRY_S), _MAX_RETRY_S)

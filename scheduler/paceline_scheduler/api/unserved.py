"""Requests of models that no executor has served here yet: without a tokenizer the core's queue cannot have them.

They wait while an executor may still come that serves the model, within the bounds of that queue.
"""

import asyncio
from collections.abc import Callable

from paceline_scheduler.api.stream import RequestStream, StreamState
from paceline_scheduler.api.validation import check_alone, deadline_of, max_outage_of, waited_of
from paceline_scheduler.backend import Backend, Executors
from paceline_scheduler.errors import DeadlineExceededError, OutageError, QueueFullError

_FULL_RETRY_S = 4.0


class Unserved:
    """`require_serving` raises where this scheduler is not, or no longer, the one to wait at."""

    def __init__(self, backend: Backend, executors: Executors, require_serving: Callable[[], None]) -> None:
        self._backend = backend
        self._executors = executors
        self._require_serving = require_serving
        self._num_bytes: dict[RequestStream, int] = {}

    async def until_known(self, stream: RequestStream, came_s: float, max_seconds: float | None) -> float:
        """Returns for how long it waited: until its model is known, none can come, or the stream has ended. Raises
        QueueFullError, OutageError, DeadlineExceededError, and what `require_serving` does.
        """
        if self._is_decided(stream.request.model):
            return 0.0
        message = stream.request
        check_alone(message)
        deadline_s, max_outage_s = deadline_of(message, came_s, max_seconds), max_outage_of(message)
        outage_until_s = came_s + max_outage_s - waited_of(message)
        until_s = outage_until_s if deadline_s is None else min(outage_until_s, deadline_s)
        self._take(stream)
        try:
            async with asyncio.timeout(max(0.0, until_s - self._backend.now_s())) as stream.waiting:
                await self._executors.until(lambda: self._is_decided(message.model))
        except TimeoutError:
            if stream.state is not StreamState.ENDED:
                if until_s == deadline_s:
                    raise DeadlineExceededError(
                        "the timeout passed before an executor of its model came; allow more time"
                    ) from None
                raise OutageError(message.model, max_outage_s) from None
        finally:
            stream.waiting = None
            del self._num_bytes[stream]
        return self._backend.now_s() - came_s

    def _is_decided(self, name: str) -> bool:
        if not self._executors.may_come:
            return True
        known = [model.name for model in self._executors.known_models()]
        if name in known or (known and not name):
            return True
        self._require_serving()
        return False

    def _take(self, stream: RequestStream) -> None:
        """A byte counts as a token: nobody can tell yet."""
        views, streams = self._backend.views, (*self._num_bytes, stream)
        own = [len(each.handles) for each in streams if each.key.tenant == stream.key.tenant]
        views.require_room(sum(own), stream.key.tenant, self._backend.now_s())
        num_bytes = stream.request.ByteSize()
        (num_requests, num_tokens), limits = views.num_waiting(), views.limits()
        num_requests += sum(len(each.handles) for each in streams)
        num_tokens += sum(self._num_bytes.values()) + num_bytes
        if num_requests > limits.max_num_queued_reqs or num_tokens > limits.max_num_queued_tokens:
            raise QueueFullError(f"{len(streams) - 1} requests wait for an executor of their model", _FULL_RETRY_S)
        self._num_bytes[stream] = num_bytes

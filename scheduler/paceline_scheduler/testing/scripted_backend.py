"""A Backend without core and executors: it remembers what the edge asked for, and delivers the tokens a test names."""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from paceline_scheduler.backend import ExecutorStatus, LimitValues, OutputSink, ServedModel, StepSink
from paceline_scheduler.core.logprobs import TokenLogprobs
from paceline_scheduler.core.outputs import (
    OUTPUT_HASH_START,
    Failure,
    FinishNotice,
    Outputs,
    TokenOutputs,
)
from paceline_scheduler.core.request import FinishReason, Request, RequestKey
from paceline_scheduler.core.views import Estimate, Explanation, RequestState
from paceline_scheduler.errors import QueueFullError, RequestFailedError, RequestRefusedError, UnknownRequestError
from paceline_scheduler.testing.clock import ManualClock


class ScriptedBackend:
    """Requests run until the test ends them. Set `sink` before the first step; `refusal` is raised for the next one."""

    def __init__(self, *models: ServedModel) -> None:
        self.clock = ManualClock()
        self.sink: OutputSink | None = None
        self.refusal: RequestRefusedError | None = None
        self.num_places: int | None = None  # in the queue; None: as many as wanted
        self.served = models
        self.requests: dict[int, Request] = {}  # every one ever submitted, by handle
        self.ended: list[tuple[int, int, FinishReason]] = []  # what the edge ended: handle, length, reason
        self.num_cached_tokens = 0  # what `end` answers
        self.cancelled: list[RequestKey] = []
        self.acknowledged: list[RequestKey] = []
        self.known_executors: tuple[ExecutorStatus, ...] = ()
        self.drained: list[str] = []
        self.watchers: list[StepSink] = []
        self.limit_values = LimitValues(1024, 4_194_304, 2048)
        self._submitted: asyncio.Queue[Request] = asyncio.Queue()
        self._running: dict[RequestKey, int] = {}
        self._num_output: dict[int, int] = {}
        self._hashes: dict[int, int] = {}

    # What a test does

    async def next_request(self) -> Request:
        """Wait for the next request to be submitted."""
        return await self._submitted.get()

    def step(
        self,
        tokens: Mapping[int, Sequence[int]],
        finished: Mapping[int, FinishReason] | None = None,
        logprobs: Mapping[int, tuple[TokenLogprobs, ...]] | None = None,
        prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] | None = None,
    ) -> None:
        """Deliver the new tokens of one step, by handle. A STOP among `finished` was caused by the last token."""
        finished = finished or {}
        handles = tuple(tokens)
        offsets = [self._num_output[handle] for handle in handles]
        self._count(tokens)
        batch = TokenOutputs(
            handles=handles,
            offsets=np.array(offsets, dtype=np.int32),
            num_tokens=np.array([len(tokens[handle]) for handle in handles], dtype=np.int32),
            token_ids=np.array([token_id for handle in handles for token_id in tokens[handle]], dtype=np.int32),
            attempts=np.ones(len(handles), dtype=np.int32),
            rolling_hashes=np.array([self._hashes[handle] for handle in handles], dtype=np.uint64),
            finishes={handle: self._notice(handle, reason, tokens[handle]) for handle, reason in finished.items()},
            logprobs=dict(logprobs or {}),
            prompt_logprobs=dict(prompt_logprobs or {}),
        )
        self._deliver(Outputs(tokens=(batch,)))

    def fail(self, handle: int, error: RequestFailedError) -> None:
        """Let a request fail."""
        del self._running[self.requests[handle].key]
        self._deliver(Outputs(failures=(Failure(handle, error),)))

    # What the edge asks

    def now_s(self) -> float:
        """Return the time of the test's clock."""
        return self.clock()

    def require_time(self, model: str) -> None:
        """Take everything."""

    def require_room(self, num_requests: int) -> None:
        """Have room, unless the test set `num_places`."""
        if self.num_places is not None and num_requests > self.num_places:
            raise QueueFullError("the queue is full", 2.0)

    def submit(self, *requests: Request) -> None:
        """Take all requests, unless the test wants them refused."""
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        for request in requests:
            self._take(request)

    def _take(self, request: Request) -> None:
        self.requests[request.handle] = request
        self._running[request.key] = request.handle
        self._num_output[request.handle] = 0
        self._hashes[request.handle] = OUTPUT_HASH_START
        self._submitted.put_nowait(request)

    def end(self, handle: int, num_output_tokens: int, reason: FinishReason) -> int:
        """Remember an end."""
        self.ended.append((handle, num_output_tokens, reason))
        self._running.pop(self.requests[handle].key, None)
        return self.num_cached_tokens

    def cancel(self, key: RequestKey) -> None:
        """End a running request and tell its stream."""
        if key not in self._running:
            raise UnknownRequestError(f"no running request {key.request_id!r} of this tenant")
        self.cancelled.append(key)
        handle = self._running[key]
        self.step({handle: []}, {handle: FinishReason.CANCELLED})

    def explain(self, key: RequestKey) -> Explanation:
        """Find every running request at the head of a queue."""
        if key not in self._running:
            raise UnknownRequestError(f"no request {key.request_id!r} of this tenant")
        num_output = self._num_output[self._running[key]]
        return Explanation(RequestState.WAITING, f"a row for {key.index}", 1, 2, "it was big", "", 3, num_output)

    def estimate(self, request: Request) -> Estimate:
        """Expect half a second, unless the test wants a refusal."""
        if self.refusal is not None:
            return Estimate(0.0, 0.0, 0, 0, self.refusal)
        return Estimate(0.5, 0.025, len(request.prompt_token_ids), 1, None)

    def acknowledge(self, keys: tuple[RequestKey, ...]) -> None:
        """Remember acknowledgements."""
        self.acknowledged += keys

    def models(self) -> tuple[ServedModel, ...]:
        """Return what the test serves."""
        return self.served

    def executors(self) -> tuple[ExecutorStatus, ...]:
        """Return what the test set."""
        return self.known_executors

    def num_waiting(self) -> tuple[int, int]:
        """Return a queue of 3 requests and 70 tokens."""
        return 3, 70

    def drain_executor(self, address: str) -> int:
        """Remember a drain; raises KeyError for an executor that was never attached."""
        executor = {known.address: known for known in self.known_executors if known.incarnation}[address]
        self.drained.append(address)
        return executor.num_running_requests

    def limits(self) -> LimitValues:
        """Return the bounds."""
        return self.limit_values

    def set_limits(self, limits: LimitValues) -> None:
        """Change the bounds."""
        self.limit_values = limits

    def watch_steps(self, sink: StepSink) -> None:
        """Remember a watcher."""
        self.watchers.append(sink)

    def unwatch_steps(self, sink: StepSink) -> None:
        """Forget a watcher."""
        self.watchers.remove(sink)

    # Inside

    def _count(self, tokens: Mapping[int, Sequence[int]]) -> None:
        for handle, token_ids in tokens.items():
            self._num_output[handle] += len(token_ids)
            value = self._hashes[handle]
            for token_id in token_ids:
                value = ((value ^ token_id) * 0x100000001B3) % 2**64
                value ^= value >> 32
            self._hashes[handle] = value

    def _notice(self, handle: int, reason: FinishReason, token_ids: Sequence[int]) -> FinishNotice:
        self._running.pop(self.requests[handle].key, None)
        return FinishNotice(
            reason=reason,
            stop_token_id=token_ids[-1] if reason is FinishReason.STOP else None,
            num_prompt_tokens=len(self.requests[handle].prompt_token_ids),
            num_cached_tokens=2,
            num_output_tokens=self._num_output[handle],
        )

    def _deliver(self, outputs: Outputs) -> None:
        assert self.sink is not None, "the test joins edge and backend"
        self.sink.deliver(outputs)

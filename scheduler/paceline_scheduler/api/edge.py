"""The open requests of all clients: from the message to the backend, and from the backend's tokens to their streams.

A request's life here: `open` → `start` (checked, tokenised, submitted, a core request per completion) → `deliver`
(detokenised, stop texts looked for, put into the outbox of its gRPC stream) → its end. A completion ends by the device
or by a stop text; all of them end by a failure of one, by `cancel`, or by `close_outbox` because the client went away.
Knows neither messages nor gRPC; everything runs on the event loop.
"""

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import structlog

from paceline_scheduler.api.completion import CompletionText, StopMatch
from paceline_scheduler.api.detokenizer import Detokenizer
from paceline_scheduler.api.fan_out import core_requests
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.outbox import DrainNotice, Finish, Outbox, PendingDelta
from paceline_scheduler.api.raw import RawRequest
from paceline_scheduler.api.stream import Completion, RequestStream, StreamState
from paceline_scheduler.api.texts import Texts
from paceline_scheduler.api.tokenizer import TextModel
from paceline_scheduler.api.validation import (
    ValidRequest,
    check_key,
    check_prompt_logprobs,
    num_completions,
    validate,
)
from paceline_scheduler.backend import Backend
from paceline_scheduler.core.outputs import (
    OUTPUT_HASH_START,
    FinishNotice,
    Outputs,
    TokenOutputs,
    fold_output_hash,
)
from paceline_scheduler.core.request import FinishReason, Int32Array, RequestKey
from paceline_scheduler.core.views import Estimate, Explanation, RequestState
from paceline_scheduler.errors import (
    DrainingError,
    DuplicateRequestError,
    ExecutorFailedError,
    QueueFullError,
    RequestFailedError,
    RequestRefusedError,
    SchedulerError,
    SlowConsumerError,
)

_DRAINING_RETRY_S = 1.0
_SESSION_FULL_RETRY_S = 0.2
_NO_HANDLE = 0  # of a request that is not submitted
_SLOW_CONSUMER = "too much output was left unread; send the request again and read faster, or ask for less"

_log = structlog.get_logger(__name__)


class Edge:
    """An OutputSink that serves clients. The composition root tells the backend to deliver to it."""

    def __init__(self, backend: Backend, texts: Texts, limits: EdgeLimits) -> None:
        self.backend = backend
        self.texts = texts
        self.limits = limits
        self._handles = itertools.count(1)
        self._running: dict[int, Completion] = {}  # by handle: what the backend delivers to
        self._by_key: dict[RequestKey, RequestStream] = {}  # preparing and running, by the key of completion 0
        self._open: dict[Outbox, set[RequestStream]] = {}  # every call of a client, and its requests
        self._drain_notice: DrainNotice | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    # Calls of clients

    def open_outbox(self, max_bytes_per_request: int = 0) -> Outbox:
        """Begin a call; `close_outbox` must follow, whatever happens."""
        outbox = Outbox(self.limits.max_stream_bytes, max_bytes_per_request)
        self._open[outbox] = set()
        self._idle.clear()
        if self._drain_notice is not None:
            outbox.announce_drain(self._drain_notice)
        return outbox

    def close_outbox(self, outbox: Outbox) -> None:
        """End a call: what still runs of its requests is cancelled."""
        for stream in tuple(self._open[outbox]):
            self._end_early(stream, FinishReason.CANCELLED)
        del self._open[outbox]
        if not self._open:
            self._idle.set()

    def drain(self, reason: str, grace_s: float) -> None:
        """Take no new requests, and tell every client so; running requests go on."""
        self._drain_notice = DrainNotice(reason, grace_s)
        for outbox in self._open:
            outbox.announce_drain(self._drain_notice)

    async def drained(self) -> None:
        """Wait until every call has ended, its output sent."""
        await self._idle.wait()

    # Requests

    def require_open(self) -> None:
        """Raise DrainingError when nothing new is taken."""
        if self._drain_notice is not None:
            raise DrainingError("the scheduler is shutting down; send the request again", _DRAINING_RETRY_S)

    def open(self, key: RequestKey, outbox: Outbox, n: int | None = None) -> RequestStream:
        """Begin a request; `key` is that of its first completion, `n` how many it asks for.

        Raises InvalidRequestError for the key, DrainingError, QueueFullError for a full session or queue,
        DuplicateRequestError.
        """
        check_key(key)
        self.require_open()
        num, at_most = num_completions(n), self.limits.max_session_requests
        if outbox.num_open + num > at_most:
            raise QueueFullError(f"this session runs {outbox.num_open} of {at_most} completions", _SESSION_FULL_RETRY_S)
        if key in self._by_key:
            raise DuplicateRequestError(f"request_id {key.request_id!r} is in use; choose another one")
        # Before anything is read, rendered or tokenised: a full queue refuses many, and each must cost little.
        self.backend.require_room(num)
        handles = tuple(itertools.islice(self._handles, num))
        stream = self._by_key[key] = RequestStream(handles, key, outbox)
        self._open[outbox].add(stream)
        outbox.num_open += num
        return stream

    async def start(self, stream: RequestStream, raw: RawRequest, max_seconds: float | None = None) -> None:
        """Check, tokenise and submit a request. Raises what is wrong with it, and then the stream has ended.

        `max_seconds` is what the client's call has left. Of a stream that ended meanwhile nothing is submitted or told.
        """
        try:
            valid, text_model, token_ids = await self._prepare(raw, max_seconds)
            if stream.state is StreamState.PREPARING:
                self._submit(stream, valid, text_model, token_ids)
        except SchedulerError:
            if stream.state is not StreamState.ENDED:
                self._forget(stream)
                raise
        except BaseException:
            self._forget(stream)
            raise

    async def _prepare(self, raw: RawRequest, max_seconds: float | None) -> tuple[ValidRequest, TextModel, Int32Array]:
        valid = validate(raw, self.backend.models(), self.backend.now_s(), max_seconds, self.limits)
        if valid.priority >= 0 and valid.deadline_s is None:
            self.backend.require_time(valid.model.name)  # before it is tokenised
        text_model = await self.texts.model(valid.model)
        token_ids = await self.texts.token_ids(valid.prompt, valid.model)
        check_prompt_logprobs(valid.num_prompt_logprobs, len(token_ids))
        if valid.bad_words:
            spelt = await self.texts.bad_word_token_ids(valid.bad_words, valid.model)
            valid = replace(valid, bad_word_token_ids=spelt)
        return valid, text_model, token_ids

    def cancel(self, key: RequestKey) -> None:
        """End a request as CANCELLED and tell its stream; raises UnknownRequestError, InvalidRequestError."""
        check_key(key)
        stream = self._by_key.get(key)
        if stream is None:
            self.backend.cancel(key)
        elif stream.state is StreamState.PREPARING:
            self._cancel_unsubmitted(stream)
        else:
            for completion in tuple(stream.running):
                self.backend.cancel(completion.key)

    def _cancel_unsubmitted(self, stream: RequestStream) -> None:
        request_id, outbox = stream.key.request_id, stream.outbox
        finish = Finish(FinishReason.CANCELLED, None, None, 0, 0, 0)
        for index, handle in enumerate(stream.handles):
            outbox.put(handle, PendingDelta(request_id, 0, 0, OUTPUT_HASH_START, [], "", finish=finish, index=index))
        self._forget(stream)
        outbox.end_step()

    # What would become of a request, and what becomes of it

    async def estimate(self, raw: RawRequest) -> Estimate:
        """Return what is expected of a request if it were sent now; a refusal, of all or any completion, is part of it.

        Of several completions the one that is expected last is meant.
        """
        key = RequestKey(raw.tenant, raw.request_id)
        try:
            check_key(key)
            self.require_open()
            if key in self._by_key:
                raise DuplicateRequestError(f"request_id {key.request_id!r} is in use; choose another one")
            num = num_completions(raw.sampling.n)
            self.backend.require_room(num)
            valid, _, token_ids = await self._prepare(raw, None)
        except RequestRefusedError as refusal:
            return Estimate(0.0, 0.0, 0, 0, refusal)
        requests = core_requests(valid, token_ids, (_NO_HANDLE,) * num)
        estimates = [self.backend.estimate(request) for request in requests]
        refused = (estimate for estimate in estimates if estimate.refusal is not None)
        return next(refused, max(estimates, key=lambda estimate: estimate.time_to_first_token_s))

    def explain(self, key: RequestKey) -> Explanation:
        """Say where a request is; of several completions, where the first one is that has not ended.

        Raises UnknownRequestError, InvalidRequestError.
        """
        check_key(key)
        stream = self._by_key.get(key)
        if stream is None:
            return self.backend.explain(key)
        if stream.state is StreamState.PREPARING:
            return Explanation(RequestState.WAITING, "its prompt is being tokenised", 0, 0, "", "", 0, 0)
        return self.backend.explain(stream.running[0].key)

    # What the backend delivers

    def deliver(self, outputs: Outputs) -> None:
        """Hand new tokens and failures to their streams; each is woken once."""
        touched: set[Outbox] = set()
        for batch in outputs.tokens:
            self._deliver_tokens(batch, touched)
        for failure in outputs.failures:
            completion = self._running.get(failure.handle)
            if completion is not None:
                touched.add(completion.stream.outbox)
                self._release_held(completion.stream)
                self._end_completion(completion)  # the backend has ended it already
                self._fail(completion.stream, failure.error)
        for outbox in touched:
            outbox.end_step()
            if outbox.is_over:
                self._relieve(outbox)

    def _deliver_tokens(self, batch: TokenOutputs, touched: set[Outbox]) -> None:
        running = self._running
        token_ids = batch.token_ids.tolist()
        columns = (batch.offsets, batch.num_tokens, batch.attempts, batch.rolling_hashes)
        rows = zip(batch.handles, *(column.tolist() for column in columns), strict=True)
        start = 0
        for handle, offset, num_tokens, attempt, rolling_hash in rows:
            stop = start + num_tokens
            completion = running.get(handle)
            if completion is not None:
                touched.add(completion.stream.outbox)
                try:
                    self._take(completion, batch, offset, token_ids[start:stop], attempt, rolling_hash)
                except Exception:  # one request's output must not keep the others from theirs
                    key = completion.key
                    _log.exception("output_lost", request_id=key.request_id, tenant=key.tenant)
                    error = ExecutorFailedError("the output could not be turned into text", "INTERNAL")
                    self._fail(completion.stream, error)
            start = stop

    def _take(
        self, completion: Completion, batch: TokenOutputs, offset: int, token_ids: list[int], attempt: int, hash_: int
    ) -> None:
        """Put one completion's new tokens on their way to the client, as far as they belong to its output."""
        if offset != completion.num_tokens:
            error = ExecutorFailedError(f"tokens before offset {offset} are missing", "OUTPUT_GAP")
            self._fail(completion.stream, error)
            return
        handle, key = completion.handle, completion.key
        notice = batch.finishes.get(handle)
        if notice is None:
            text, match = completion.text.take(token_ids)
        else:
            text, match = completion.text.take_last(token_ids, notice.stop_token_id)
        if match is not None and match.num_tokens < len(token_ids):
            token_ids = token_ids[: match.num_tokens]
            hash_ = _fold(completion.rolling_hash, token_ids)
        delta = PendingDelta(key.request_id, offset, attempt, hash_, token_ids, text)
        if key.index:  # set only where it says something: this runs for every row of every step
            delta.index = key.index
        if handle in batch.logprobs:
            delta.logprobs = batch.logprobs[handle][: len(token_ids)]
        if handle in batch.prompt_logprobs:
            delta.prompt_logprobs = batch.prompt_logprobs[handle]
        completion.num_tokens += len(token_ids)
        completion.rolling_hash = hash_
        if match is not None or notice is not None:
            delta.finish = self._finish(completion, notice, match)
        # The first and the last at once, the rest when enough of it has been gathered.
        is_held = offset > 0 and delta.finish is None
        completion.stream.outbox.put(handle, delta, completion.stream.num_tokens_per_delta if is_held else 0)

    def _relieve(self, outbox: Outbox) -> None:
        """End requests of a client that does not read, those of which most waits first."""

        def num_bytes(stream: RequestStream) -> int:
            return sum(map(outbox.num_bytes_of, stream.handles))

        for stream in sorted(self._open[outbox], key=num_bytes, reverse=True):
            if not outbox.is_over or not num_bytes(stream):
                return
            self._cut(stream)

    # The end of a completion, and of a request

    def _submit(self, stream: RequestStream, valid: ValidRequest, text_model: TextModel, token_ids: Int32Array) -> None:
        stream.num_prompt_tokens = len(token_ids)
        stream.num_tokens_per_delta = min(valid.stream_interval, self.limits.max_held_tokens)
        stream.state = StreamState.RUNNING
        requests = core_requests(valid, token_ids, stream.handles)
        for request in requests:
            detokenizer = Detokenizer(text_model.spelling, valid.skip_special_tokens)
            text = CompletionText(detokenizer, valid.stop_texts, valid.matched_text, valid.min_tokens)
            completion = Completion(stream, request.handle, request.key, text)
            stream.running.append(completion)
            self._running[request.handle] = completion
        self.backend.submit(*requests)

    def _finish(self, completion: Completion, notice: FinishNotice | None, match: StopMatch | None) -> Finish:
        """End a completion; returns what the client is told. A stop text comes before whatever the device saw."""
        self._end_completion(completion)
        if notice is not None:
            num_cached_tokens = notice.num_cached_tokens
        else:
            num_cached_tokens = self.backend.end(completion.handle, completion.num_tokens, FinishReason.STOP)
        return Finish(
            reason=FinishReason.STOP if match is not None or notice is None else FinishReason(notice.reason),
            stop_text=None if match is None else match.stop_text,
            stop_token_id=None if match is not None or notice is None else notice.stop_token_id,
            num_prompt_tokens=completion.stream.num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            num_output_tokens=completion.num_tokens,
        )

    def _cut(self, stream: RequestStream) -> None:
        """End a request whose client does not read: what waits for it is dropped, and makes room for saying so."""
        for handle in stream.handles:
            stream.outbox.drop(handle)
        self._fail(stream, SlowConsumerError(_SLOW_CONSUMER))

    def _fail(self, stream: RequestStream, error: RequestFailedError) -> None:
        """End all of a request by an error, which its client is told once, after the output before it."""
        self._release_held(stream)
        self._end_early(stream, FinishReason.ERROR)
        stream.outbox.fail(stream.key.request_id, error)

    def _release_held(self, stream: RequestStream) -> None:
        """Put what waits for more output into the outbox: there may be no more."""
        for handle in stream.handles:
            stream.outbox.release(handle)

    def _end_early(self, stream: RequestStream, reason: FinishReason) -> None:
        """End what the backend, if it knows it, still runs of a request."""
        running = tuple(stream.running)
        self._forget(stream)
        for completion in running:
            self.backend.end(completion.handle, completion.num_tokens, reason)

    def _end_completion(self, completion: Completion) -> None:
        """Nothing more comes of a completion; with its last one the request is over."""
        stream = completion.stream
        if len(stream.running) == 1:
            self._forget(stream)
            return
        stream.running.remove(completion)
        del self._running[completion.handle]
        stream.outbox.num_open -= 1

    def _forget(self, stream: RequestStream) -> None:
        """Nothing more goes into the stream; what is in its outbox is still sent. Does nothing the second time."""
        if stream.state is StreamState.ENDED:
            return
        stream.outbox.num_open -= len(stream.running) or len(stream.handles)
        stream.state = StreamState.ENDED
        for completion in stream.running:
            del self._running[completion.handle]
        stream.running.clear()
        del self._by_key[stream.key]
        self._open[stream.outbox].discard(stream)


def _fold(rolling_hash: int, token_ids: list[int]) -> int:
    """Return the rolling hash after these tokens too."""
    hashes = np.array([rolling_hash], dtype=np.uint64)
    for token_id in token_ids:
        hashes = fold_output_hash(hashes, np.array([token_id], dtype=np.int32))
    return int(hashes[0])

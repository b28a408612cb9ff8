"""The open requests of all clients: from the message to the backend, and from the backend's tokens to their streams.

A request's life here: `open` → `start` (checked, tokenised, submitted) → `deliver` (detokenised, stop texts looked for,
put into the outbox of its gRPC stream) → its end, which is one of: the device's, a stop text, a failure, `cancel`, or
`close_outbox` because the client went away. Knows neither messages nor gRPC; everything runs on the event loop.
"""

import asyncio
import itertools

import numpy as np
import structlog

from paceline_scheduler.api.completion import CompletionText, StopMatch
from paceline_scheduler.api.detokenizer import Detokenizer
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.outbox import DrainNotice, Finish, Outbox, PendingDelta
from paceline_scheduler.api.raw import RawRequest
from paceline_scheduler.api.stream import RequestStream, StreamState
from paceline_scheduler.api.texts import Texts
from paceline_scheduler.api.tokenizer import TextModel
from paceline_scheduler.api.validation import ValidRequest, check_key, validate
from paceline_scheduler.backend import Backend
from paceline_scheduler.core.outputs import FinishNotice, Outputs, TokenOutputs, fold_output_hash
from paceline_scheduler.core.request import FinishReason, Int32Array, Request, RequestKey
from paceline_scheduler.errors import (
    DrainingError,
    DuplicateRequestError,
    ExecutorFailedError,
    QueueFullError,
    RequestFailedError,
    SchedulerError,
    SlowConsumerError,
)

_DRAINING_RETRY_S = 1.0
_SESSION_FULL_RETRY_S = 0.2

_log = structlog.get_logger(__name__)


class Edge:
    """An OutputSink that serves clients. The composition root tells the backend to deliver to it."""

    def __init__(self, backend: Backend, texts: Texts, limits: EdgeLimits) -> None:
        self.backend = backend
        self.texts = texts
        self.limits = limits
        self._handles = itertools.count(1)
        self._running: dict[int, RequestStream] = {}  # by handle: what the backend delivers to
        self._by_key: dict[RequestKey, RequestStream] = {}  # preparing and running
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

    def open(self, key: RequestKey, outbox: Outbox) -> RequestStream:
        """Begin a request.

        Raises InvalidRequestError for the key, DrainingError, QueueFullError for a full session, DuplicateRequestError.
        """
        check_key(key)
        self.require_open()
        if outbox.num_open >= self.limits.max_session_requests:
            raise QueueFullError(f"this session runs {outbox.num_open} requests, the limit", _SESSION_FULL_RETRY_S)
        if key in self._by_key:
            raise DuplicateRequestError(f"request_id {key.request_id!r} is in use; choose another one")
        stream = self._by_key[key] = RequestStream(next(self._handles), key, outbox)
        self._open[outbox].add(stream)
        outbox.num_open += 1
        return stream

    async def start(self, stream: RequestStream, raw: RawRequest, max_seconds: float | None = None) -> None:
        """Check, tokenise and submit a request. Raises what is wrong with it, and then the stream has ended.

        `max_seconds` is what the client's call has left. Of a stream that ended meanwhile nothing is submitted or told.
        """
        now_s = self.backend.now_s()
        try:
            valid = validate(raw, self.backend.models(), now_s, max_seconds, self.limits)
            text_model = await self.texts.model(valid.model)
            token_ids = await self.texts.token_ids(valid.prompt, valid.model)
            if stream.state is StreamState.PREPARING:
                self._submit(stream, valid, text_model, token_ids)
        except SchedulerError:
            if stream.state is not StreamState.ENDED:
                self._forget(stream)
                raise
        except BaseException:
            self._forget(stream)
            raise

    def cancel(self, key: RequestKey) -> None:
        """End a request as CANCELLED and tell its stream; raises UnknownRequestError, InvalidRequestError."""
        check_key(key)
        stream = self._by_key.get(key)
        if stream is None or stream.state is not StreamState.PREPARING:
            self.backend.cancel(key)
            return
        finish = Finish(FinishReason.CANCELLED, None, None, 0, 0, 0)
        stream.outbox.put(stream.handle, PendingDelta(key.request_id, 0, 0, stream.rolling_hash, [], "", finish=finish))
        self._forget(stream)
        stream.outbox.wake()

    # What the backend delivers

    def deliver(self, outputs: Outputs) -> None:
        """Hand new tokens and failures to their streams; each is woken once."""
        touched: set[Outbox] = set()
        for batch in outputs.tokens:
            self._deliver_tokens(batch, touched)
        for failure in outputs.failures:
            stream = self._running.get(failure.handle)
            if stream is not None:
                self._fail(stream, failure.error)
        for outbox in touched:
            outbox.wake()

    def _deliver_tokens(self, batch: TokenOutputs, touched: set[Outbox]) -> None:
        running = self._running
        token_ids = batch.token_ids.tolist()
        columns = (batch.offsets, batch.num_tokens, batch.attempts, batch.rolling_hashes)
        rows = zip(batch.handles, *(column.tolist() for column in columns), strict=True)
        start = 0
        for handle, offset, num_tokens, attempt, rolling_hash in rows:
            stop = start + num_tokens
            stream = running.get(handle)
            if stream is not None:
                touched.add(stream.outbox)
                try:
                    self._take(stream, batch, offset, token_ids[start:stop], attempt, rolling_hash)
                except Exception:  # one request's output must not keep the others from theirs
                    _log.exception("output_lost", request_id=stream.key.request_id, tenant=stream.key.tenant)
                    self._give_up(stream, ExecutorFailedError("the output could not be turned into text", "INTERNAL"))
            start = stop

    def _take(
        self, stream: RequestStream, batch: TokenOutputs, offset: int, token_ids: list[int], attempt: int, hash_: int
    ) -> None:
        """Put one request's new tokens into its outbox, as far as they belong to its output."""
        handle, outbox, completion = stream.handle, stream.outbox, stream.completion
        assert completion is not None, "a running stream has one"
        if offset != stream.num_output_tokens:
            self._give_up(stream, ExecutorFailedError(f"tokens before offset {offset} are missing", "OUTPUT_GAP"))
            return
        notice = batch.finishes.get(handle)
        text, match = completion.take(token_ids if notice is None else _spoken(token_ids, notice))
        if notice is not None and match is None:
            rest, stop_text = completion.finish()
            text += rest
            match = None if stop_text is None else StopMatch(stop_text, len(token_ids))
        if match is not None and match.num_tokens < len(token_ids):
            token_ids = token_ids[: match.num_tokens]
            hash_ = _fold(stream.rolling_hash, token_ids)
        delta = PendingDelta(stream.key.request_id, offset, attempt, hash_, token_ids, text)
        if handle in batch.logprobs:
            delta.logprobs = batch.logprobs[handle][: len(token_ids)]
        stream.num_output_tokens += len(token_ids)
        stream.rolling_hash = hash_
        if match is not None or notice is not None:
            if notice is None:
                num_cached_tokens = self._end_early(stream, FinishReason.STOP)
            else:
                num_cached_tokens = notice.num_cached_tokens
                self._forget(stream)
            delta.finish = _finish(stream, notice, match, num_cached_tokens)
            outbox.put(handle, delta)
        elif not outbox.put(handle, delta):
            outbox.drop(handle)
            self._give_up(stream, SlowConsumerError("too much output was left unread; read faster, or ask for less"))

    # The end of a request

    def _submit(self, stream: RequestStream, valid: ValidRequest, text_model: TextModel, token_ids: Int32Array) -> None:
        stream.completion = CompletionText(
            Detokenizer(text_model.spelling, valid.skip_special_tokens), valid.stop_texts
        )
        stream.num_prompt_tokens = len(token_ids)
        stream.state = StreamState.RUNNING
        self._running[stream.handle] = stream
        self.backend.submit(
            Request(
                handle=stream.handle,
                key=valid.key,
                model=valid.model.name,
                prompt_token_ids=token_ids,
                sampling=valid.sampling,
                end_token_ids=valid.end_token_ids,
                max_tokens=valid.max_tokens,
                num_logprobs=valid.num_logprobs,
                deadline_s=valid.deadline_s,
                cache_salt=valid.cache_salt,
                bypass_prefix_cache=valid.bypass_prefix_cache,
                origin=valid.origin,
                body_digest=valid.body_digest,
            )
        )

    def _end_early(self, stream: RequestStream, reason: FinishReason) -> int:
        """End a request that the backend, if it knows it, still runs; returns how much of its prompt was cached."""
        was_running = stream.state is StreamState.RUNNING
        self._forget(stream)
        return self.backend.end(stream.handle, stream.num_output_tokens, reason) if was_running else 0

    def _give_up(self, stream: RequestStream, error: RequestFailedError) -> None:
        self._end_early(stream, FinishReason.ERROR)
        stream.outbox.fail(stream.key.request_id, error)

    def _fail(self, stream: RequestStream, error: RequestFailedError) -> None:
        self._forget(stream)
        stream.outbox.fail(stream.key.request_id, error)

    def _forget(self, stream: RequestStream) -> None:
        """Nothing more goes into the stream; what is in its outbox is still sent. Does nothing the second time."""
        if stream.state is StreamState.ENDED:
            return
        stream.state = StreamState.ENDED
        self._running.pop(stream.handle, None)
        del self._by_key[stream.key]
        self._open[stream.outbox].discard(stream)
        stream.outbox.num_open -= 1


def _spoken(token_ids: list[int], notice: FinishNotice) -> list[int]:
    """The tokens that spell text: the one that ended the completion, like a stop text, is no part of it."""
    ended_by_last = bool(token_ids) and notice.stop_token_id == token_ids[-1]
    return token_ids[:-1] if ended_by_last else token_ids


def _finish(
    stream: RequestStream, notice: FinishNotice | None, match: StopMatch | None, num_cached_tokens: int
) -> Finish:
    """What the client is told; a stop text comes before whatever the device saw."""
    return Finish(
        reason=FinishReason.STOP if match is not None or notice is None else FinishReason(notice.reason),
        stop_text=None if match is None else match.stop_text,
        stop_token_id=None if match is not None or notice is None else notice.stop_token_id,
        num_prompt_tokens=stream.num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        num_output_tokens=stream.num_output_tokens,
    )


def _fold(rolling_hash: int, token_ids: list[int]) -> int:
    """Return the rolling hash after these tokens too."""
    hashes = np.array([rolling_hash], dtype=np.uint64)
    for token_id in token_ids:
        hashes = fold_output_hash(hashes, np.array([token_id], dtype=np.int32))
    return int(hashes[0])

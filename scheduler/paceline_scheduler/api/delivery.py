"""From the backend's tokens to clients' streams, up to the end of a completion, of a request, or of an attachment.

Tokens become text, stop texts are looked for, and everything goes into the outbox of its call. The one place that ends
streams. Does not know how a request was checked and tokenised, nor messages.

How a stream ends, and what becomes of its request:
- all its completions have: by the device, or by a stop text, of which the backend is told.
- it fails, or is cancelled: all of it ends.
- its client went away (`leave`), came back by another stream (`supersede`), or does not read (a slow one is cut): a
  request that asked to be resumable goes on without a listener for a while, another one ends.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import structlog

from paceline.plan.hashes import rolling_hash
from paceline.plan.values import FinishReason
from paceline.process.trace_ids import trace_fields
from paceline_scheduler.api.completion import StopMatch
from paceline_scheduler.api.outbox import Finish, Outbox, PendingDelta
from paceline_scheduler.api.registry import OpenRequests
from paceline_scheduler.api.resumption import claimed_end, has_finish
from paceline_scheduler.api.stream import RequestStream, StreamedCompletion, StreamState
from paceline_scheduler.backend import Backend
from paceline_scheduler.core.events import Detach, EndCompletion
from paceline_scheduler.core.outputs import NO_DRAFTS, Failure, FinishNotice, Resumed, TokenOutputs
from paceline_scheduler.core.request import Request
from paceline_scheduler.errors import ExecutorFailedError, RequestFailedError, SlowConsumerError, SupersededError

_SLOW_CONSUMER = "too much output was left unread; send the request again and read faster, or ask for less"
_SUPERSEDED = "the client has attached to the request anew; its output goes on there"

_log = structlog.get_logger(__name__)

# A set would have the order of addresses.
_Touched = dict[Outbox, None]


class Delivery:
    def __init__(self, backend: Backend, requests: OpenRequests) -> None:
        self._backend = backend
        self._requests = requests

    def deliver(self, tokens: Sequence[TokenOutputs], failures: Sequence[Failure]) -> None:
        touched: _Touched = {}
        for batch in tokens:
            self._deliver_tokens(batch, touched)
        for failure in failures:
            completion = self._requests.running.get(failure.handle)
            if completion is not None:
                touched[completion.stream.outbox] = None
                self._release_held(completion.stream)
                self._requests.end_completion(completion)
                self.fail(completion.stream, failure.error)
        for outbox in touched:
            outbox.end_step()
            if outbox.is_over:
                self._relieve(outbox)

    def _deliver_tokens(self, batch: TokenOutputs, touched: _Touched) -> None:
        running = self._requests.running
        token_ids = batch.token_ids.tolist()
        columns = (batch.offsets, batch.num_tokens, batch.attempts, batch.rolling_hashes)
        rows = zip(batch.handles, *(column.tolist() for column in columns), strict=True)
        start = 0
        for handle, offset, num_tokens, attempt, hash_ in rows:
            stop = start + num_tokens
            completion = running.get(handle)
            if completion is not None:
                touched[completion.stream.outbox] = None
                try:
                    self._take(completion, batch, offset, token_ids[start:stop], attempt, hash_)
                except Exception:  # one request's output must not keep the others from theirs
                    self._lose(completion)
            start = stop

    def _lose(self, completion: StreamedCompletion) -> None:
        key, trace = completion.key, trace_fields(completion.stream.request.trace_parent)
        _log.exception("output_lost", request_id=key.request_id, tenant=key.tenant, **trace)
        self.fail(completion.stream, ExecutorFailedError("the output could not be turned into text", "INTERNAL"))

    def _take(
        self,
        completion: StreamedCompletion,
        batch: TokenOutputs,
        offset: int,
        token_ids: list[int],
        attempt: int,
        hash_: int,
    ) -> None:
        if offset != completion.num_tokens:
            error = ExecutorFailedError(f"tokens before offset {offset} are missing", "OUTPUT_GAP")
            self.fail(completion.stream, error)
            return
        handle, key = completion.handle, completion.key
        notice = batch.finishes.get(handle)
        if notice is None:
            text, match = completion.text.take(token_ids)
        else:
            text, match = completion.text.take_last(token_ids, notice.stop_token_id)
        if match is not None and match.num_tokens < len(token_ids):
            token_ids = token_ids[: match.num_tokens]
            hash_ = rolling_hash(completion.rolling_hash, np.array(token_ids, dtype=np.int32))
        delta = PendingDelta(key.request_id, offset, attempt, hash_, token_ids, text)
        if key.index:  # only where it says something: this runs for every row
            delta.index = key.index
        if handle in batch.logprobs:
            delta.logprobs = batch.logprobs[handle][: len(token_ids)]
        if handle in batch.prompt_logprobs:
            delta.prompt_logprobs = batch.prompt_logprobs[handle]
        if completion.token_bytes is not None:
            delta.token_bytes = completion.token_bytes
        if completion.text.has_parts:
            delta.parts = completion.text.take_parts()
        completion.num_tokens += len(token_ids)
        completion.rolling_hash = hash_
        if match is not None or notice is not None:
            delta.finish = self._finish(completion, notice, match)
        # The first and the last go at once, the rest when enough was gathered.
        is_held = offset > 0 and delta.finish is None
        completion.stream.outbox.put(handle, delta, completion.stream.num_tokens_per_delta if is_held else 0)

    def _relieve(self, outbox: Outbox) -> None:
        """Those with most unread output are cut."""

        def num_bytes(stream: RequestStream) -> int:
            return sum(map(outbox.num_bytes_of, stream.handles))

        for stream in sorted(self._requests.of_call(outbox), key=num_bytes, reverse=True):
            if not outbox.is_over or not num_bytes(stream):
                return
            # What waits for it makes room for saying so.
            self._drop(stream)
            error = SlowConsumerError(_SLOW_CONSUMER)
            stream.span.end(error)
            self._let_go(stream, FinishReason.ERROR)
            outbox.fail(stream.key.request_id, error)

    def go_on(self, stream: RequestStream, requests: Sequence[Request], found: tuple[Resumed, ...]) -> None:
        """Each completion goes on where its client's copy ends."""
        beyond = []
        for completion, request, resumed in zip(tuple(stream.running), requests, found, strict=True):
            if resumed.outputs is None and not len(resumed.prefix_token_ids):
                continue  # as of every request that has just been queued
            try:
                is_over = self._catch_up(completion, request, resumed)
            except Exception:
                self._lose(completion)
                break
            if resumed.outputs is not None and not is_over:
                beyond.append(resumed.outputs)
        stream.outbox.end_step()
        self.deliver(beyond, ())

    def _catch_up(self, completion: StreamedCompletion, request: Request, resumed: Resumed) -> bool:
        """Returns whether the completion has ended by then."""
        point, prefix = request.point, resumed.prefix_token_ids.tolist()
        completion.num_tokens, completion.rolling_hash = len(prefix), point.resume_hash
        match, stop_token_id = completion.text.replay(prefix, request.end_token_ids)
        completion.text.take_parts()  # the client has them
        notice = None if resumed.outputs is None else resumed.outputs.finishes.get(completion.handle)
        if match is None and stop_token_id is None:
            return False
        delta = PendingDelta(
            request_id=completion.key.request_id,
            offset=len(prefix),
            attempt=point.last_attempt,
            rolling_hash=point.resume_hash,
            token_ids=[],
            text="",
            index=completion.key.index,
        )
        if match is not None:
            completion.num_tokens = match.num_tokens
        delta.finish = replace(self._finish(completion, notice, match), stop_token_id=stop_token_id)
        completion.stream.outbox.put(completion.handle, delta)
        return True

    def _finish(self, completion: StreamedCompletion, notice: FinishNotice | None, match: StopMatch | None) -> Finish:
        """A stop text comes before whatever the device saw."""
        self._requests.end_completion(completion)
        known = notice or self._backend.feed(EndCompletion(completion.handle, completion.num_tokens, FinishReason.STOP))
        finish = Finish(
            reason=FinishReason.STOP if match is not None or notice is None else FinishReason(notice.reason),
            stop_text=None if match is None else match.stop_text,
            stop_token_id=None if match is not None or notice is None else notice.stop_token_id,
            num_prompt_tokens=completion.stream.num_prompt_tokens,
            num_cached_tokens=0 if known is None else known.num_cached_tokens,
            num_output_tokens=completion.num_tokens,
            num_reasoning_tokens=completion.text.num_reasoning_tokens,
            times=None if known is None else known.times,
            drafts=NO_DRAFTS if known is None else known.drafts,
        )
        completion.stream.span.finished(finish)
        if completion.stream.state is StreamState.ENDED:
            completion.stream.span.end()
        return finish

    def fail(self, stream: RequestStream, error: RequestFailedError) -> None:
        """The output before the error goes first."""
        self._release_held(stream)
        self._end(stream, FinishReason.ERROR)
        stream.span.end(error)
        stream.outbox.fail(stream.key.request_id, error)

    def cancel_unsubmitted(self, stream: RequestStream) -> None:
        """The backend does not run it for this stream.

        The client may have the finish of some completions.
        """
        request_id, outbox = stream.key.request_id, stream.outbox
        for index, handle in enumerate(stream.handles):
            if has_finish(stream.request, index):
                continue
            offset, hash_ = claimed_end(stream.request, index)
            finish = Finish(FinishReason.CANCELLED, None, None, 0, 0, offset)
            outbox.put(handle, PendingDelta(request_id, offset, 0, hash_, [], "", finish=finish, index=index))
        self._requests.forget(stream)
        stream.span.leave()
        outbox.end_step()

    def leave(self, stream: RequestStream) -> None:
        self._let_go(stream, FinishReason.CANCELLED)

    def take_over(self, stream: RequestStream) -> None:
        before, stream.before = stream.before, None
        while before is not None:
            self.supersede(before, stream.outbox)
            before = before.before

    def supersede(self, stream: RequestStream, outbox: Outbox) -> None:
        """The client has come back by the call of `outbox`."""
        if stream.state is StreamState.ENDED:
            return
        self._drop(stream)
        self._let_go(stream, FinishReason.CANCELLED)
        if stream.outbox is not outbox:  # there the error would hit the new stream
            stream.outbox.fail(stream.key.request_id, SupersededError(_SUPERSEDED))

    def _let_go(self, stream: RequestStream, reason: FinishReason) -> None:
        stream.span.leave()
        if not stream.request.resumable:
            self._end(stream, reason)
            return
        running = tuple(stream.running)
        self._requests.forget(stream)
        for completion in running:
            self._backend.feed(Detach(completion.handle))

    def _end(self, stream: RequestStream, reason: FinishReason) -> None:
        running = tuple(stream.running)
        self._requests.forget(stream)
        for completion in running:
            self._backend.feed(EndCompletion(completion.handle, completion.num_tokens, reason))

    def _drop(self, stream: RequestStream) -> None:
        for handle in stream.handles:
            stream.outbox.drop(handle)

    def _release_held(self, stream: RequestStream) -> None:
        for handle in stream.handles:
            stream.outbox.release(handle)

"""The open requests of all clients: from the message to the backend, and back by way of `delivery`.

A request's life: `open` → `start` (checked, tokenised, submitted or resumed, a core request per completion) → `deliver`
→ its end. A client comes back by opening it again with a higher attachment. Only this process's streams are known here.

Knows no gRPC; everything runs on the event loop.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from random import SystemRandom

from paceline.plan.values import RecordId
from paceline.process.callers import Caller
from paceline.v1.inference_pb2 import TOOL_CHOICE_MODE_NONE, GenerateRequest
from paceline_scheduler.api.delivery import Delivery
from paceline_scheduler.api.fan_out import core_requests
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.outbox import DrainNotice, Outbox
from paceline_scheduler.api.registry import OpenRequests
from paceline_scheduler.api.request_spans import NO_SPAN, RequestSpans
from paceline_scheduler.api.resumption import ValidResumption, check_resumption, is_begun, number_of
from paceline_scheduler.api.servicer_access import tenant_of
from paceline_scheduler.api.stream import RequestStream, StreamedCompletion, StreamState
from paceline_scheduler.api.text.detokenizer import Detokenizer
from paceline_scheduler.api.text.parts.bound import OutputFormat
from paceline_scheduler.api.text.parts.cutter import PartCutter, Wanted
from paceline_scheduler.api.text.texts import Texts
from paceline_scheduler.api.text.tokenizer import TextModel
from paceline_scheduler.api.unserved import Unserved
from paceline_scheduler.api.validation import (
    MAX_COMPLETIONS,
    TextOptions,
    check_context,
    check_key,
    check_prompt_logprobs,
    key_of,
    num_completions,
    text_options,
    validate,
)
from paceline_scheduler.backend import Arrival, Backend, Executors, ServedModel
from paceline_scheduler.core.answers import Estimate, Explanation, RequestState
from paceline_scheduler.core.events import Acknowledge, Cancel, Resume, Submit
from paceline_scheduler.core.queue.explain import awaited_executor
from paceline_scheduler.core.request import Request
from paceline_scheduler.errors import (
    DrainingError,
    DuplicateRequestError,
    QueueFullError,
    RequestFailedError,
    RequestRefusedError,
    SchedulerError,
    StaleAttachmentError,
    UnknownRequestError,
)

_DRAINING_RETRY_S = 1.0
_SESSION_FULL_RETRY_S = 0.2
_NO_HANDLE = 0
_CHANCE = SystemRandom()

OnRefusal = Callable[[RecordId, str, str, SchedulerError], None]
"""Takes key, model and trace of the refused request."""


class Edge:
    """The backend has to deliver to `delivery`.

    `draw` gives numbers from 0 to 1: refused clients do not come back together.
    """

    def __init__(
        self,
        backend: Backend,
        executors: Executors,
        texts: Texts,
        limits: EdgeLimits,
        draw: Callable[[], float] = _CHANCE.random,
    ) -> None:
        self.backend = backend
        self.executors = executors
        self.texts = texts
        self.limits = limits
        self.draw = draw
        self.requests = OpenRequests()
        self.delivery = Delivery(backend, self.requests)
        self._unserved = Unserved(backend, executors, self.require_serving)
        self._handles = itertools.count(1)
        self._drain_notice: DrainNotice | None = None
        self._on_refusal: OnRefusal = lambda *_: None
        self._spans: RequestSpans | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def on_refusal(self, tell: OnRefusal) -> None:
        self._on_refusal = tell

    def trace_with(self, spans: RequestSpans) -> None:
        self._spans = spans

    def open_outbox(self, max_bytes_per_request: int = 0) -> Outbox:
        """`close_outbox` must follow."""
        outbox = Outbox(self.limits.max_stream_bytes, max_bytes_per_request)
        self.requests.begin_call(outbox)
        self._idle.clear()
        if self._drain_notice is not None:
            outbox.announce_drain(self._drain_notice)
        return outbox

    def leave_outbox(self, outbox: Outbox) -> None:
        for stream in self.requests.of_call(outbox):
            self.delivery.leave(stream)

    def close_outbox(self, outbox: Outbox) -> None:
        self.leave_outbox(outbox)
        self.requests.end_call(outbox)
        if not self.requests.calls():
            self._idle.set()

    def drain(self, reason: str, grace_s: float) -> None:
        """Open streams go on."""
        self._drain_notice = DrainNotice(reason, grace_s)
        for outbox in self.requests.calls():
            outbox.announce_drain(self._drain_notice)

    async def drained(self) -> None:
        await self._idle.wait()

    def require_open(self) -> None:
        """Raises DrainingError."""
        if self._drain_notice is not None:
            raise DrainingError("the scheduler is shutting down; send the request again", _DRAINING_RETRY_S)

    def require_serving(self) -> None:
        """Raises DrainingError or StandbyError."""
        self.require_open()
        self.executors.require_lead()

    def open(self, request: GenerateRequest, outbox: Outbox, by: Caller) -> RequestStream:
        """The tenant becomes the caller's. A higher attachment ends the stream that the request has here. Raises
        PermissionDeniedError for a foreign tenant, InvalidRequestError for the key, DrainingError, StandbyError for
        what is new, QueueFullError, DuplicateRequestError, StaleAttachmentError.
        """
        try:
            request.tenant = tenant_of(request.tenant, by)
            return self._open(request, outbox)
        except SchedulerError as error:
            self.refuse(request, error, self.backend.now_s())
            raise

    def _open(self, request: GenerateRequest, outbox: Outbox) -> RequestStream:
        key = key_of(request)
        check_key(key)
        self.require_open()
        num, at_most = num_completions(request), self.limits.max_session_requests
        if outbox.num_open + num > at_most:
            raise QueueFullError(
                f"this session runs {outbox.num_open} of at most {at_most} completions; wait until one ends",
                _SESSION_FULL_RETRY_S,
            )
        before = self._before(key, request)
        if not is_begun(request):  # else taken before
            # Before anything is read: a full queue refuses many, and each must cost little.
            self.executors.require_lead()
            self.backend.views.require_room(num, key.tenant, self.backend.now_s())
        if before is not None and before.outbox is outbox:
            self.delivery.supersede(before, outbox)  # its client could not tell the two outputs apart
            before = self.requests.by_key(key)
        handles = tuple(itertools.islice(self._handles, num))
        stream = RequestStream(handles, key, outbox, request, before=before)
        self.requests.add(stream)
        return stream

    def _before(self, key: RecordId, request: GenerateRequest) -> RequestStream | None:
        """Raises when the attachment must not replace it."""
        stream = self.requests.by_key(key)
        if stream is None:
            return None
        number, newest = number_of(request), number_of(stream.request)
        if newest < number:
            return stream
        if newest == number:
            raise DuplicateRequestError(f"request_id {key.request_id!r} is in use; choose another one")
        raise StaleAttachmentError(
            f"attachment {number} of request_id {key.request_id!r} is too old: attachment {newest} has the request",
            newest,
        )

    async def start(self, stream: RequestStream, max_seconds: float | None = None) -> None:
        """The stream ends if this raises. `max_seconds` is what the client's call has left."""
        came_s, has_span = self.backend.now_s(), False
        try:
            arrival = Arrival.BACK if is_begun(stream.request) else Arrival.NEW
            await self.executors.until_synced(arrival)
            if self._spans is not None:
                stream.span, has_span = self._spans.begin(stream.request, stream.key, came_s), True
            waited_s = await self._unserved.until_known(stream, came_s, max_seconds)
            if stream.state is StreamState.ENDED:
                return
            first, model, resumption = await self._prepare(stream.request, came_s, max_seconds)
            if waited_s:
                first = replace(first, waited_s=first.waited_s + waited_s)
            text_model = await self.texts.model(model)
            await self.executors.until_synced(arrival)  # lost meanwhile, perhaps
            output_format = None
            if first.output_format:
                output_format = self.texts.output_format(model, text_model, first.output_format)
            if stream.state is StreamState.PREPARING:
                self._run(stream, first, resumption, text_model, output_format)
        except SchedulerError as error:
            if stream.state is not StreamState.ENDED:
                self.requests.forget(stream)
                if has_span:
                    self._on_refusal(stream.key, stream.request.model, stream.request.trace_parent, error)
                    stream.span.end(error)
                else:
                    self.refuse(stream.request, error, came_s)
                raise
        except BaseException:
            self.requests.forget(stream)
            stream.span.leave()
            raise

    def refuse(self, request: GenerateRequest, error: SchedulerError, came_s: float) -> None:
        """Of a request that nothing was told of yet."""
        span = NO_SPAN if self._spans is None else self._spans.begin(request, key_of(request), came_s)
        self._on_refusal(key_of(request), request.model, request.trace_parent, error)
        span.end(error)

    async def _prepare(
        self, message: GenerateRequest, came_s: float, max_seconds: float | None
    ) -> tuple[Request, ServedModel, ValidResumption]:
        """The first completion."""
        request, model = validate(message, self.executors.known_models(), came_s, max_seconds, self.limits)
        resumption = check_resumption(message, request.num_completions, model.max_model_len, model.vocab_size)
        if request.priority >= 0 and request.deadline_s is None and not resumption.is_begun:
            # Before it is tokenised.
            self.backend.views.require_time(model.name, self.backend.now_s(), request.key.tenant)
        # All clients come back at once: what is known is not tokenised again.
        known, options = None, text_options(message)
        if resumption.is_begun:
            known = self.backend.views.known(request.key, request.body_digest, model.name)
        if known is None:
            if message.chat.tools:
                await self.texts.require_tools([tool.name for tool in message.chat.tools], model)
            token_ids = await self.texts.token_ids(message, model)
            words = options.bad_words
            bad_words = await self.texts.bad_word_token_ids(words, model) if words else ()
            structured = await self.texts.output_form(message.chat, request.structured, token_ids, model)
        else:
            token_ids, bad_words, structured = known.prompt_token_ids, known.bad_words, known.structured
        check_context(len(token_ids), resumption, model)
        check_prompt_logprobs(request.num_prompt_logprobs, len(token_ids))
        if options.wants_parts:
            # What the client has of it was cut so.
            output_format = known.output_format if known is not None else ""
            request = replace(request, output_format=output_format or self.texts.format_name(model.tokenizer))
        prepared = replace(request, prompt_token_ids=token_ids, bad_words=bad_words, structured=structured)
        return prepared, model, resumption

    def _run(
        self,
        stream: RequestStream,
        first: Request,
        resumption: ValidResumption,
        text_model: TextModel,
        output_format: OutputFormat | None,
    ) -> None:
        stream.num_prompt_tokens = len(first.prompt_token_ids)
        stream.span.prepared(first.model, stream.num_prompt_tokens)
        options = text_options(stream.request)
        stream.num_tokens_per_delta = min(options.stream_interval, self.limits.max_held_tokens)
        core = core_requests(first, stream.handles, resumption.points)
        parts = list(zip(core, resumption.is_finished, strict=True))
        requests = tuple(request for request, is_finished in parts if not is_finished)
        self.requests.run(
            stream, [_completion(stream, request, options, text_model, output_format) for request in requests]
        )
        if not (first.is_resumable or resumption.is_begun):
            self.backend.feed(Submit(requests))
            return
        found = self.backend.feed(Resume(requests))
        self.delivery.take_over(stream)
        self.delivery.go_on(stream, requests, found)
        self._let_go([request.key for request, is_finished in parts if is_finished])

    def _let_go(self, keys: list[RecordId]) -> None:
        """An executor that has not heard of the end may still run them."""
        for key in keys:
            with contextlib.suppress(UnknownRequestError):
                self.backend.feed(Cancel(key))
        if keys:
            self.backend.feed(Acknowledge(tuple(keys)))

    async def cancel(self, key: RecordId) -> None:
        """Anybody may listen. Raises UnknownRequestError, InvalidRequestError, and NoExecutorError while it is not
        known yet.
        """
        check_key(key)
        if self.requests.by_key(key) is None:
            await self.cancel_elsewhere(key)
        elif not self.cancel_here(key):
            with contextlib.suppress(UnknownRequestError):
                await self.cancel_elsewhere(key)

    def cancel_here(self, key: RecordId) -> bool:
        """Returns whether that was all of the request."""
        check_key(key)
        stream = self.requests.by_key(key)
        if stream is None:
            return False
        if stream.state is StreamState.RUNNING:
            for completion in tuple(stream.running):
                self.backend.feed(Cancel(completion.key))
            return True
        self.delivery.cancel_unsubmitted(stream)
        return not is_begun(stream.request)

    async def cancel_elsewhere(self, key: RecordId) -> None:
        """Raises UnknownRequestError, and NoExecutorError while it is not known yet."""
        await self.executors.until_synced(Arrival.BACK)
        stream = self.requests.by_key(key)
        if stream is not None and stream.state is StreamState.PREPARING:
            return
        if not self._cancel_detached(key):
            raise UnknownRequestError(f"this tenant runs no request {key.request_id!r}; check the request_id")

    def _cancel_detached(self, key: RecordId) -> bool:
        num_cancelled = 0
        for index in range(MAX_COMPLETIONS):  # only its client knows how many it has
            with contextlib.suppress(UnknownRequestError):
                self.backend.feed(Cancel(replace(key, index=index)))
                num_cancelled += 1
        return num_cancelled > 0

    async def estimate(self, request: GenerateRequest) -> Estimate:
        """The completion expected last counts. Raises StandbyError."""
        self.executors.require_lead()
        key = key_of(request)
        try:
            check_key(key)
            self.require_open()
            self._before(key, request)
            num = num_completions(request)
            if not is_begun(request):
                self.backend.views.require_room(num, key.tenant, self.backend.now_s())
            first, _, resumption = await self._prepare(request, self.backend.now_s(), None)
        except (RequestRefusedError, RequestFailedError) as refusal:
            return Estimate(0.0, 0.0, 0, 0, refusal)
        completions = core_requests(first, (_NO_HANDLE,) * num, resumption.points)
        now_s = self.backend.now_s()
        estimates = [self.backend.views.estimate(completion, now_s) for completion in completions]
        refused = (estimate for estimate in estimates if estimate.refusal is not None)
        return next(refused, max(estimates, key=lambda estimate: estimate.time_to_first_token_s))

    def explain(self, key: RecordId) -> Explanation:
        """The first completion that has not ended counts. Raises UnknownRequestError, InvalidRequestError, and
        StandbyError.
        """
        check_key(key)
        stream = self.requests.by_key(key)
        if stream is None:
            self.executors.require_lead()
            return self._explain_detached(key)
        if stream.state is StreamState.PREPARING:
            waiting_for = "its prompt is being tokenised"
            if stream.waiting is not None:
                waiting_for = awaited_executor(stream.request.model)
            return Explanation(RequestState.WAITING, waiting_for, 0, 0, "", "", 0, 0)
        return self.backend.views.explain(stream.running[0].key, self.backend.now_s())

    def _explain_detached(self, key: RecordId) -> Explanation:
        found = []
        for index in range(MAX_COMPLETIONS):
            with contextlib.suppress(UnknownRequestError):
                found.append(self.backend.views.explain(replace(key, index=index), self.backend.now_s()))
        if not found:
            raise UnknownRequestError(f"this tenant has no request {key.request_id!r}; check the request_id")
        return next((one for one in found if one.state is not RequestState.FINISHED), found[0])


def _completion(
    stream: RequestStream,
    request: Request,
    options: TextOptions,
    text_model: TextModel,
    output_format: OutputFormat | None,
) -> StreamedCompletion:
    spelling, parts = text_model.spelling, None
    if output_format is not None:
        chat = stream.request.chat
        wanted = Wanted(
            request.key.request_id,
            request.key.index,
            tools={tool.name: tool.parameters_json_schema for tool in chat.tools},
            takes_calls=chat.tool_choice.mode != TOOL_CHOICE_MODE_NONE,
        )
        parts = PartCutter(output_format, wanted)
        parts.begin(request.prompt_token_ids, spelling)
    detokenizer = Detokenizer(spelling, options.skip_special_tokens, request.prompt_token_ids)
    text = stream.span.new_text(detokenizer, options.stop_texts, options.matched_text, request.min_tokens, parts)
    token_bytes = spelling.token_bytes if options.wants_token_bytes else None
    return StreamedCompletion(stream, request.handle, request.key, text, token_bytes)

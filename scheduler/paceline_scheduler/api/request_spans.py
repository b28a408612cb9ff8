"""The span of each attachment to a request, from its arrival to the end of its stream, and what the edge does below it.

A sampled request carries the traceparent of this span from then on: to observers, which make the spans of its phases,
and to executors, where a successor finds it. Knows requests as they were sent; refuses to know who takes spans.
"""

from collections.abc import Callable

from paceline.plan.values import FinishReason, RecordId
from paceline.process.trace_ids import MAX_TRACE_PARENT_BYTES, read_trace_parent, write_trace_parent
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_scheduler.api.completion import CompletionText, StopMatch
from paceline_scheduler.api.outbox import Finish
from paceline_scheduler.api.resumption import number_of
from paceline_scheduler.api.text.detokenizer import Detokenizer
from paceline_scheduler.api.text.parts.cutter import PartCutter
from paceline_scheduler.api.text.stop_texts import MatchedText
from paceline_scheduler.errors import SchedulerError
from paceline_scheduler.spans import names
from paceline_scheduler.spans.values import AttributeValue, Span, SpanSink


class RequestSpan:
    """What a stream tells of itself; this one, of a request that nobody follows, keeps nothing."""

    def prepared(self, model: str, num_prompt_tokens: int) -> None:
        """It goes to the core."""

    def new_text(
        self,
        detokenizer: Detokenizer,
        stop_texts: tuple[str, ...],
        matched_text: MatchedText,
        min_tokens: int,
        parts: PartCutter | None = None,
    ) -> CompletionText:
        return CompletionText(detokenizer, stop_texts, matched_text, min_tokens, parts)

    def finished(self, finish: Finish) -> None:
        """Of one completion."""

    def end(self, error: SchedulerError | None = None) -> None:
        """Nothing more is put into its stream. What comes later changes nothing."""

    def leave(self) -> None:
        """Its client went away, or came back by another stream."""


NO_SPAN = RequestSpan()
_MAX_INTEGER = 2**63 - 1  # of an attribute


class RequestSpans:
    """`known` is the traceparent that an open request has here, "" for others."""

    def __init__(
        self,
        sink: SpanSink,
        clock: Callable[[], float],
        known: Callable[[RecordId], str],
    ) -> None:
        self._sink = sink
        self._clock = clock
        self._known = known

    def begin(self, request: GenerateRequest, key: RecordId, came_s: float) -> RequestSpan:
        """Says in the request's traceparent whether it is followed."""
        if len(request.trace_parent) > MAX_TRACE_PARENT_BYTES:
            return NO_SPAN  # it is refused
        before = read_trace_parent(self._known(key))
        parent = read_trace_parent(request.trace_parent) or before
        operation = names.CHAT if request.HasField("chat") else names.TEXT_COMPLETION
        context = self._sink.begin(parent)
        if not context.is_sampled:
            if request.trace_parent:
                request.trace_parent = write_trace_parent(context)
            return NO_SPAN
        request.trace_parent = write_trace_parent(context)
        links = () if before is None or before == parent else (before,)
        begun = Span(operation, context, parent, came_s, came_s, _of_request(request, operation), links)
        return _SampledSpan(self._sink, self._clock, request, begun)


class _SampledSpan(RequestSpan):
    def __init__(
        self,
        sink: SpanSink,
        clock: Callable[[], float],
        request: GenerateRequest,
        begun: Span,
    ) -> None:
        self._sink = sink
        self._clock = clock
        self._begun = begun
        self._trace_state = request.trace_state
        self._model = request.model
        self._attributes = dict(begun.attributes)
        self._finishes: list[Finish] = []
        self._texts: list[_TimedText] = []
        self._is_over = False

    def prepared(self, model: str, num_prompt_tokens: int) -> None:
        self._model = model
        self._attributes |= {names.INPUT_TOKENS: num_prompt_tokens}
        self._put_below(names.PREPARE, self._begun.start_s, self._clock(), {names.INPUT_TOKENS: num_prompt_tokens})

    def new_text(
        self,
        detokenizer: Detokenizer,
        stop_texts: tuple[str, ...],
        matched_text: MatchedText,
        min_tokens: int,
        parts: PartCutter | None = None,
    ) -> CompletionText:
        text = _TimedText(self._clock, detokenizer, stop_texts, matched_text, min_tokens, parts)
        self._texts.append(text)
        return text

    def finished(self, finish: Finish) -> None:
        self._finishes.append(finish)

    def leave(self) -> None:
        self._attributes |= {} if self._is_over else {names.LEFT: True}
        self.end()

    def end(self, error: SchedulerError | None = None) -> None:
        if self._is_over:
            return
        self._is_over = True
        reason = "" if error is None else error.reason
        if reason:
            self._attributes[names.ERROR_TYPE] = reason
        if self._finishes:
            self._attributes[names.FINISH_REASONS] = tuple(FinishReason(f.reason).name.lower() for f in self._finishes)
            self._attributes[names.OUTPUT_TOKENS] = sum(finish.num_output_tokens for finish in self._finishes)
            self._attributes[names.CACHED_TOKENS] = self._finishes[0].num_cached_tokens
        first_s = min((text.first_s for text in self._texts if text.first_s is not None), default=None)
        if first_s is not None:
            self._attributes[names.TIME_TO_FIRST_CHUNK] = first_s - self._begun.start_s
            last_s, busy_s = max(text.last_s for text in self._texts), sum(text.busy_s for text in self._texts)
            self._put_below(names.DETOKENISE, first_s, last_s, {names.BUSY_S: busy_s})
        span = self._begun._replace(
            name=f"{self._begun.name} {self._model}".rstrip(),
            end_s=self._clock(),
            attributes={**self._attributes, names.REQUEST_MODEL: self._model, names.RESPONSE_MODEL: self._model},
            is_call=True,
            error=reason,
            trace_state=self._trace_state,
        )
        self._sink.put(span)

    def _put_below(self, name: str, start_s: float, end_s: float, attributes: dict[str, AttributeValue]) -> None:
        parent = self._begun.context
        self._sink.put(Span(name, self._sink.below(parent), parent, start_s, end_s, attributes))


class _TimedText(CompletionText):
    """The text of a completion, and how long it took to make: `busy_s` in all between `first_s` and `last_s`."""

    def __init__(
        self,
        clock: Callable[[], float],
        detokenizer: Detokenizer,
        stop_texts: tuple[str, ...],
        matched_text: MatchedText,
        min_tokens: int,
        parts: PartCutter | None,
    ) -> None:
        super().__init__(detokenizer, stop_texts, matched_text, min_tokens, parts)
        self._clock = clock
        self.first_s: float | None = None
        self.last_s = self.busy_s = 0.0

    def take(self, token_ids: list[int]) -> tuple[str, StopMatch | None]:
        begun_s = self._clock()
        self.first_s = begun_s if self.first_s is None else self.first_s
        taken = super().take(token_ids)
        self.last_s = self._clock()
        self.busy_s += self.last_s - begun_s
        return taken


def _of_request(request: GenerateRequest, operation: str) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        names.OPERATION: operation,
        names.PROVIDER: names.PACELINE,
        names.RESPONSE_ID: request.request_id,
        names.TENANT: request.tenant,
        names.ATTACHMENT: number_of(request),
    }
    if request.resume_from:
        attributes[names.RESUMED_FROM] = request.resume_from
    for part, field, name in names.SETTINGS:
        values = getattr(request, part)
        if values.HasField(field):
            attributes[name] = getattr(values, field)
    if request.sampling.HasField("seed") and request.sampling.seed <= _MAX_INTEGER:
        attributes[names.SEED] = request.sampling.seed
    return attributes

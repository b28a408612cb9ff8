"""Spans by OTLP, as the `OTEL_*` variables say: OpenTelemetry's resource, queue and exporter.

The only module that imports OpenTelemetry; imported only where somebody asks for traces.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

import structlog
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode

from paceline.process.trace_ids import SpanContext
from paceline_scheduler.spans.names import PACELINE
from paceline_scheduler.spans.values import Span

_SERVICE = "paceline-scheduler"
_MAX_CLOCK_ERROR_NS = 1_000_000
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope(PACELINE)
_KINDS = {True: trace.SpanKind.SERVER, False: trace.SpanKind.INTERNAL}
_OK = Status(StatusCode.UNSET)
_QUEUED = trace.SpanContext(1, 1, is_remote=False, trace_flags=_SAMPLED)

_log = structlog.get_logger(__name__)


class SpanExport:
    """`clock` is that of the spans. Raises whatever the SDK makes of variables that it cannot read."""

    def __init__(self, clock: Callable[[], float], scheduler_id: str) -> None:
        self._clock = clock
        self._clock_ns = 0  # what the clock's zero is by the wall clock
        _take_log()
        self._resource = TracerProvider(resource=_resource(scheduler_id), shutdown_on_exit=False).resource
        self._exporter = _Counting(OTLPSpanExporter())
        self._processor = BatchSpanProcessor(self._exporter)
        self._num_made = 0

    def put(self, span: Span) -> None:
        self._num_made += 1
        self._processor.on_end(_Unmade(span, self._zero_ns(), self._resource))

    def counts(self) -> dict[str, int]:
        """What is neither sent nor failed is in the queue, or found no room there."""
        return {"made": self._num_made, "sent": self._exporter.num_sent, "failed": self._exporter.num_failed}

    def close(self, timeout_s: float) -> None:
        closing = threading.Thread(target=self._processor.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(timeout_s)

    def _zero_ns(self) -> int:
        """The same for spans of one request, unless the wall clock is set."""
        zero_ns = time.time_ns() - round(self._clock() * 1e9)
        if abs(zero_ns - self._clock_ns) > _MAX_CLOCK_ERROR_NS:
            self._clock_ns = zero_ns
        return self._clock_ns


class _Unmade(ReadableSpan):
    """What a span is made of, in the queue of those to be sent: the thread that sends it makes it."""

    def __init__(self, span: Span, zero_ns: int, resource: Resource) -> None:
        self._span = span
        self._zero_ns = zero_ns
        self._of = resource
        self._context = _QUEUED  # asked by the queue, which takes sampled ones

    def made(self) -> ReadableSpan:
        span, zero_ns = self._span, self._zero_ns
        return ReadableSpan(
            name=span.name,
            context=_own(span.context, span.trace_state),
            parent=None if span.parent is None else _remote(span.parent, ""),
            resource=self._of,
            attributes=span.attributes,
            links=tuple(trace.Link(_remote(link, "")) for link in span.links),
            kind=_KINDS[span.is_call],
            status=Status(StatusCode.ERROR, span.error) if span.error else _OK,
            start_time=zero_ns + round(span.start_s * 1e9),
            end_time=zero_ns + round(max(span.start_s, span.end_s) * 1e9),
            instrumentation_scope=_SCOPE,
        )


class _Resource(Resource):
    """Hashed once, and not as JSON for each of its spans."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)


class _Counting(SpanExporter):
    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.num_sent = self.num_failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export([span.made() if isinstance(span, _Unmade) else span for span in spans])
        finally:
            if result is SpanExportResult.SUCCESS:
                self.num_sent += len(spans)
            else:
                self.num_failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _LogHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _log.log(record.levelno, "traces_failing", error=record.getMessage())


def _take_log() -> None:
    """The SDK complains in this process's log, not on stderr."""
    logger = logging.getLogger("opentelemetry")
    logger.propagate = False
    logger.handlers[:] = [_LogHandler(logging.WARNING)]


def _resource(scheduler_id: str) -> Resource:
    own = Resource.create({SERVICE_NAME: _SERVICE, SERVICE_INSTANCE_ID: scheduler_id})
    return _Resource(own.merge(OTELResourceDetector().detect()))


def _remote(context: SpanContext, trace_state: str) -> trace.SpanContext:
    flags = _SAMPLED if context.is_sampled else trace.TraceFlags.get_default()
    state = TraceState.from_header([trace_state]) if trace_state else None
    return trace.SpanContext(context.trace_id, context.span_id, is_remote=True, trace_flags=flags, trace_state=state)


def _own(context: SpanContext, trace_state: str) -> trace.SpanContext:
    state = TraceState.from_header([trace_state]) if trace_state else None
    return trace.SpanContext(context.trace_id, context.span_id, False, _SAMPLED, state)

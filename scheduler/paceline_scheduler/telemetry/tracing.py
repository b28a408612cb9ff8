"""Traces switched on where the environment asks for them; without that nothing of OpenTelemetry is imported.

Whatever goes wrong here is one line in the log: a scheduler serves without traces, too.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from paceline.plan.values import RecordId
from paceline.process.trace_ids import SpanContext, context_below
from paceline_scheduler.api.call_spans import CallSpans
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.request_spans import RequestSpans
from paceline_scheduler.config import Config, Traces
from paceline_scheduler.observers.traces import TraceObserver
from paceline_scheduler.runtime import Runtime
from paceline_scheduler.spans.sampler import TraceSampler
from paceline_scheduler.spans.values import Span

if TYPE_CHECKING:
    from paceline_scheduler.spans.export import SpanExport

_LOAD_AFTER_S = 1.0
"""Importing OpenTelemetry takes 0.1 s, which whoever waits for a successor would notice."""

_MAX_WAITING = 1024
_UNSUPPORTED = (
    "traces go by OTLP over gRPC: leave OTEL_TRACES_EXPORTER and OTEL_EXPORTER_OTLP_PROTOCOL out, or set them to"
    " otlp and grpc"
)
_NOT_INSTALLED = (
    "OpenTelemetry is not installed; in the checkout, pip install ./protos ./clients '.[tracing]', "
    "or set OTEL_SDK_DISABLED=true"
)

_log = structlog.get_logger(__name__)


class LateSpans:
    """A SpanSink that imports OpenTelemetry when the start is over; until then spans wait. `clock` is theirs."""

    def __init__(self, sampler: TraceSampler, clock: Callable[[], float], scheduler_id: str) -> None:
        self.clock = clock
        self._sampler = sampler
        self._scheduler_id = scheduler_id
        self._export: SpanExport | None = None
        self._waiting: deque[Span] = deque(maxlen=_MAX_WAITING)
        self._is_off = False

    async def load_later(self) -> None:
        """Keeps the event loop waiting no longer than a thread does that computes."""
        await asyncio.sleep(_LOAD_AFTER_S)
        await asyncio.to_thread(self.load)

    def load(self) -> None:
        """Send what waits, and all that comes; or nothing, if that cannot be."""
        try:
            from paceline_scheduler.spans.export import SpanExport

            export = SpanExport(self.clock, self._scheduler_id)
        except ImportError as error:
            self._switch_off(f"{_NOT_INSTALLED} ({error})")
        except Exception as error:  # the SDK has no type for variables that it cannot read
            self._switch_off(f"OpenTelemetry cannot use its OTEL_* variables: {error}")
        else:
            self._export = export
            while self._waiting:
                export.put(self._waiting.popleft())

    def _switch_off(self, error: str) -> None:
        self._is_off = True
        self._waiting.clear()
        _log.warning("traces_off", error=error)

    def begin(self, parent: SpanContext | None) -> SpanContext:
        own = context_below(parent)
        if self._sampler.takes(own.trace_id, parent) and not self._is_off:
            return own
        return (parent or own)._replace(is_sampled=False)

    def below(self, parent: SpanContext | None) -> SpanContext:
        return context_below(parent)

    def put(self, span: Span) -> None:
        if self._export is not None:
            self._export.put(span)
        elif not self._is_off:
            self._waiting.append(span)

    def counts(self) -> dict[str, int]:
        return {} if self._export is None else self._export.counts()

    def close(self, timeout_s: float) -> None:
        """Send what waits, within this time."""
        if self._waiting:
            self.load()
        if self._export is not None:
            self._export.close(timeout_s)


def trace(
    config: Config, runtime: Runtime, edge: Edge, calls: CallSpans, clock: Callable[[], float], scheduler_id: str
) -> LateSpans | None:
    """Returns where spans go from now on, None for nowhere."""
    if config.traces is Traces.OFF:
        return None
    if config.traces is Traces.UNSUPPORTED:
        _log.warning("traces_off", error=_UNSUPPORTED)
        return None
    spans = LateSpans(config.trace_sampler, clock, scheduler_id)

    def known(key: RecordId) -> str:
        live = runtime.views.open_request(key)
        return "" if live is None else live.request.trace_parent

    runtime.show_plans(TraceObserver(runtime.views, spans))
    edge.trace_with(RequestSpans(spans, clock, known))
    calls.show(spans, clock)
    return spans

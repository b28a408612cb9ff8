"""Traces switched on where the environment asks for them; without that nothing of OpenTelemetry is imported.

Whatever goes wrong here is one line in the log: a scheduler serves without traces, too.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import structlog

from paceline.plan.values import RecordId
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.request_spans import RequestSpans
from paceline_scheduler.api.status import reason_of
from paceline_scheduler.config import Traces
from paceline_scheduler.observers.traces import TraceObserver
from paceline_scheduler.runtime import Runtime

if TYPE_CHECKING:
    from paceline_scheduler.span_export import SpanExport

_UNSUPPORTED = (
    "traces go by OTLP over gRPC: leave OTEL_TRACES_EXPORTER and OTEL_EXPORTER_OTLP_PROTOCOL out, or set them to"
    " otlp and grpc"
)
_NOT_INSTALLED = "OpenTelemetry is not installed; pip install 'paceline[tracing]', or set OTEL_SDK_DISABLED=true"

_log = structlog.get_logger(__name__)


def trace(
    wanted: Traces, runtime: Runtime, edge: Edge, clock: Callable[[], float], scheduler_id: str
) -> "SpanExport | None":
    """Make spans of all that happens from now on; returns where they go, None for nowhere."""
    if wanted is Traces.OFF:
        return None
    if wanted is Traces.UNSUPPORTED:
        _log.warning("traces_off", error=_UNSUPPORTED)
        return None
    try:
        from paceline_scheduler.span_export import SpanExport

        export = SpanExport(clock, scheduler_id)
    except ImportError as error:
        _log.warning("traces_off", error=f"{_NOT_INSTALLED} ({error})")
        return None
    except Exception as error:  # the SDK has no type for variables that it cannot read
        _log.warning("traces_off", error=f"OpenTelemetry cannot use its OTEL_* variables: {error}")
        return None

    def known(key: RecordId) -> str:
        live = runtime.views.open_request(key)
        return "" if live is None else live.request.trace_parent

    runtime.show_plans(TraceObserver(runtime.views, export))
    edge.trace_with(RequestSpans(export, clock, known, reason_of))
    return export

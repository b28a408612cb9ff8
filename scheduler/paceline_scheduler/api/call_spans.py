"""The span of a call with one answer, below its caller's; calls that nobody traces have none, or every look of `top`
would be a trace. Requests have `request_spans`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from paceline.process.trace_ids import read_trace_parent
from paceline_scheduler.errors import SchedulerError
from paceline_scheduler.spans import names
from paceline_scheduler.spans.values import Span, SpanSink

Metadata = Iterable[tuple[str, str | bytes]]


class CallSpans:
    """Shows nothing before it knows where."""

    def __init__(self) -> None:
        self._sink: SpanSink | None = None
        self._clock: Callable[[], float] = float

    def show(self, sink: SpanSink, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._sink, self._clock = sink, clock

    @contextmanager
    def of(self, method: str, metadata: Metadata) -> Iterator[None]:
        """The block is the call."""
        sink = self._sink
        fields = {} if sink is None else dict(metadata)
        parent = read_trace_parent(str(fields.get("traceparent", "")))
        if sink is None or parent is None or not parent.is_sampled:
            yield
            return
        name = method.lstrip("/")
        trace_state = str(fields.get("tracestate", ""))
        context, begun_s, error = sink.begin(parent), self._clock(), ""
        try:
            yield
        except SchedulerError as failure:
            error = failure.reason
            raise
        except BaseException as failure:
            error = type(failure).__name__
            raise
        finally:
            if context.is_sampled:
                attributes = {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: name}
                if error:
                    attributes[names.ERROR_TYPE] = error
                sink.put(
                    Span(
                        name,
                        context,
                        parent,
                        begun_s,
                        self._clock(),
                        attributes,
                        is_call=True,
                        error=error,
                        trace_state=trace_state,
                    )
                )

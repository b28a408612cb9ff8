"""Spans as edge and observers make them, when what they show is over, and where they go. Values and a seam.

Refuses to know who takes them.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from paceline.process.trace_ids import SpanContext

AttributeValue = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, AttributeValue]


_NO_ATTRIBUTES: Attributes = {}


class Span(NamedTuple):
    """One span that has ended. Times are seconds of the injected monotonic clock; `error` is "" where nothing failed.

    `parent` is None for the first of a trace. `is_call`: it is what a caller's span waited for.
    """

    name: str
    context: SpanContext
    parent: SpanContext | None
    start_s: float
    end_s: float
    attributes: Attributes = _NO_ATTRIBUTES
    links: tuple[SpanContext, ...] = ()
    is_call: bool = False
    error: str = ""
    trace_state: str = ""


class SpanSink(Protocol):
    """Called on the event loop; must not block, and tells of no failure."""

    def begin(self, parent: SpanContext | None) -> SpanContext:
        """Decide whether a call is sampled. The context of its span then, else its caller's."""
        ...

    def below(self, parent: SpanContext | None) -> SpanContext:
        """As `trace_ids.context_below`."""
        ...

    def put(self, span: Span) -> None: ...

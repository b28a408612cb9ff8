"""W3C trace contexts, for log lines and spans. Knows nothing of OpenTelemetry."""

import random
import re
from typing import NamedTuple

_TRACE_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
MAX_TRACE_PARENT_BYTES = 128
MAX_TRACE_STATE_BYTES = 512


class SpanContext(NamedTuple):
    """`is_sampled`: it is shown to somebody."""

    trace_id: int
    span_id: int
    is_sampled: bool


def read_trace_parent(trace_parent: str) -> SpanContext | None:
    """None for none and for a wrong one."""
    if not trace_parent or len(trace_parent) > MAX_TRACE_PARENT_BYTES:
        return None
    found = _TRACE_PARENT.fullmatch(trace_parent)
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest) or not (int(trace_id, 16) and int(span_id, 16)):
        return None
    return SpanContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))


def context_below(parent: SpanContext | None) -> SpanContext:
    """Another span of a sampled trace; None: of a new one."""
    trace_id = random.getrandbits(128) if parent is None else parent.trace_id
    return SpanContext(trace_id, random.getrandbits(64), True)


def write_trace_parent(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.is_sampled:02x}"


def trace_fields(trace_parent: str) -> dict[str, str]:
    """Return `trace_id` of a W3C traceparent; nothing without one."""
    context = read_trace_parent(trace_parent)
    return {} if context is None else {"trace_id": f"{context.trace_id:032x}"}

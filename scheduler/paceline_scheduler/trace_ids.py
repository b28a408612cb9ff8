"""The trace of a request, as log lines name it. Apart from those that write lines, in the edge and beside the core."""

_HEX = frozenset("0123456789abcdef")


def trace_fields(trace_parent: str) -> dict[str, str]:
    """Returns the `trace_id` of a W3C traceparent; nothing without one."""
    parts = trace_parent.split("-")
    is_one = list(map(len, parts[:4])) == [2, 32, 16, 2] and _HEX.issuperset("".join(parts[:4]))
    return {"trace_id": parts[1]} if is_one else {}

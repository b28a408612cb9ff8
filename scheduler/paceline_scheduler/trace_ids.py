"""The trace of a request, as log lines name it. Apart from those that write lines, in the edge and beside the core."""

import re

_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def trace_fields(trace_parent: str) -> dict[str, str]:
    """Return `trace_id` of a W3C traceparent; nothing without one."""
    found = _TRACE_PARENT.match(trace_parent)
    return {} if found is None else {"trace_id": found[1]}

"""Which requests are traced, as OpenTelemetry's SDK decides it.

Apart from the SDK, which is not there yet when the first requests come, and takes five times as long.
"""

from collections.abc import Mapping
from typing import NamedTuple

from paceline.process.trace_ids import SpanContext

_ALL = 1 << 64


class TraceSampler(NamedTuple):
    """Takes traces whose ids end below `bound`; `asks_parent`: of those that callers began what these sample."""

    bound: int = _ALL
    asks_parent: bool = True

    def takes(self, trace_id: int, parent: SpanContext | None) -> bool:
        if parent is not None and self.asks_parent:
            return parent.is_sampled
        return trace_id % _ALL < self.bound


UNSET = TraceSampler()


def trace_sampler(environ: Mapping[str, str]) -> TraceSampler:
    """What `OTEL_TRACES_SAMPLER` and its argument cannot say counts as unset, as with the SDK."""
    name = environ.get("OTEL_TRACES_SAMPLER", "").lower()
    root = name.removeprefix("parentbased_")
    bounds = {"always_on": _ALL, "always_off": 0, "traceidratio": _bound(environ.get("OTEL_TRACES_SAMPLER_ARG", ""))}
    return TraceSampler(bounds[root], root != name) if root in bounds else UNSET


def _bound(ratio: str) -> int:
    try:
        share = float(ratio)
    except ValueError:
        return _ALL
    return round(share * _ALL) if 0 <= share <= 1 else _ALL

"""The loads a benchmark puts on a server, one after the other. Values only; `load` runs them."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline_cli.bench.traces import Scale
from paceline_cli.bench.workload import PlannedRequest


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many requests at once: the next one is sent when one has ended."""

    max_concurrency: int

    @property
    def label(self) -> str:
        return f"concurrency {self.max_concurrency}"


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests come when they come, whether earlier ones have ended or not."""

    request_rate: float
    """Per second, on average."""
    burstiness: float

    @property
    def label(self) -> str:
        return f"{self.request_rate:g} requests/s"


@dataclass(frozen=True, slots=True)
class Replay:
    """An open loop with the times and lengths of a trace."""

    name: str
    scale: Scale

    @property
    def label(self) -> str:
        return f"trace {self.name}"


Load = ClosedLoop | OpenLoop | Replay


@dataclass(frozen=True, slots=True)
class Rung:
    load: Load
    requests: Sequence[PlannedRequest]

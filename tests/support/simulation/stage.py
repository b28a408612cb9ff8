"""Whom faults can hit, and what one is told when it happens. Knows hosts and the network, not what goes wrong."""

from dataclasses import dataclass
from random import Random
from typing import Protocol

from paceline.plan.values import Approach, RecordId
from simulation.clients import ClientHost
from simulation.executors import ExecutorHost
from simulation.loop import SimulationLoop
from simulation.mangling import PastPlans
from simulation.network import Network
from simulation.rogue import Rogue
from simulation.schedulers import SchedulerHost


class Stage(Protocol):
    """Whom faults can hit."""

    loop: SimulationLoop
    network: Network
    executors: list[ExecutorHost]
    schedulers: list[SchedulerHost]
    clients: list[ClientHost]
    rogue: Rogue
    past_plans: PastPlans
    failing: set[RecordId]

    def start_executor(self, host: ExecutorHost) -> None: ...

    def start_scheduler(self, host: SchedulerHost, approach: Approach) -> None: ...

    def client_died(self) -> None: ...

    def tell(self, what: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Hit:
    """A fault that happens: how long, and what decides the rest of it."""

    lasts_s: float
    random: Random

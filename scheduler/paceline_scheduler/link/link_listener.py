"""What the links tell whoever plans for executors, and where its plans go."""

from typing import Protocol

from paceline.plan.values import BatchPlan, Claim, Model
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.link.plan_stream import StepCallbacks


class PlanPort(Protocol):
    def send_plan(self, plan: BatchPlan) -> None:
        """Drops it after the stream's end."""
        ...


class LinkListener(Protocol):
    """Calls are made on the event loop and must not block."""

    def looked(self, addresses: tuple[str, ...]) -> None:
        """`expected` follows for each."""
        ...

    def expected(self, address: str) -> None: ...

    def removed(self, address: str) -> None: ...

    def require_alike(self, address: str, model: Model, tokenizer: TokenizerSource) -> None:
        """Raises LinkError if the executor cannot stand beside those that serve a model of the same name."""
        ...

    def is_expected_back(self, address: str, left_for_s: float) -> bool:
        """Of one that is not named any more: whether under another address it may still be."""
        ...

    def attached(
        self,
        model: Model,
        tokenizer: TokenizerSource,
        description: ExecutorDescription,
        snapshot: Snapshot,
        port: PlanPort,
    ) -> None: ...

    def steps_of(self, address: str) -> StepCallbacks: ...

    def draining(self, address: str) -> None: ...

    def in_line(self, address: str) -> None: ...

    def detached(self, address: str, reason: str) -> None: ...

    def lost(self, address: str) -> None: ...

    def displaced(self, active: Claim) -> None: ...

    def changed(self) -> None: ...

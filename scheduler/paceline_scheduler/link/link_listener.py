"""What the links tell whoever plans for executors, and where its plans go."""

from typing import Protocol

from paceline.plan.values import BatchPlan, Model, Welcome
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.holder import Holder
from paceline_scheduler.link.plan_stream import Steps


class PlanPort(Protocol):
    """Where the plans of one accepted stream go."""

    def send_plan(self, plan: BatchPlan) -> None:
        """Put a plan on its way; after the stream's end it is dropped."""
        ...


class LinkListener(Protocol):
    """What the links tell whoever plans. Calls are made on the event loop and must not block."""

    def looked(self, addresses: tuple[str, ...]) -> None:
        """These executors there are at the start; `expected` follows for each."""
        ...

    def expected(self, address: str) -> None: ...

    def removed(self, address: str) -> None: ...

    def require_alike(self, address: str, welcome: Welcome) -> None:
        """Raise LinkError for an executor that cannot stand beside those that serve a model of the same name."""
        ...

    def attached(
        self,
        model: Model,
        tokenizer: TokenizerSource,
        description: ExecutorDescription,
        snapshot: Snapshot,
        port: PlanPort,
    ) -> None: ...

    def steps_of(self, address: str) -> Steps:
        """Return where results of an executor go, and what is due of it."""
        ...

    def draining(self, address: str) -> None:
        """The executor is going away in good order."""
        ...

    def detached(self, address: str, reason: str) -> None:
        """The stream ended, or an attempt to open one failed."""
        ...

    def lost(self, address: str) -> None:
        """The executor is gone as far as known: its requests should run elsewhere."""
        ...

    def displaced(self, active: Holder) -> None: ...

    def changed(self) -> None: ...

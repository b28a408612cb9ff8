"""The seam to whatever carries a plan stream."""

from typing import Protocol

from paceline.plan.values import FromExecutor, StepResult, ToExecutor

NANOSECONDS = 1_000_000_000


class Transport(Protocol):
    """Carries one plan stream. A broken connection cancels whoever is using it."""

    async def receive(self) -> ToExecutor | None:
        """The next message, or None when the scheduler will send no more. Raises PlanError or AttachError."""
        ...

    async def send(self, message: FromExecutor, *more: StepResult) -> None:
        """Send a message, or several results as one; returns when the connection has taken it."""
        ...

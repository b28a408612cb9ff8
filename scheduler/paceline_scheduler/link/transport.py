"""What the link needs of a network. Production uses gRPC (`transport_grpc`); a simulation brings its own.

All methods raise LinkError: UnreachableError when nothing answers at the address, TermSupersededError when the executor
refuses for another scheduler, StreamEndedError for everything else that ends a call.
"""

from typing import Protocol

from paceline.plan.values import BatchPlan, ExecutorInfo, FromExecutor, ToExecutor
from paceline_scheduler.backend import TokenizerSource


class PlanStream(Protocol):
    """One plan stream. `read` and `write` may be under way at the same time, each once."""

    async def write(self, message: ToExecutor, *more: BatchPlan) -> None:
        """Send a message, or several plans as one; returns when the network took it."""
        ...

    async def read(self) -> FromExecutor: ...

    def cancel(self) -> None:
        """End the stream at once; a second time does nothing."""
        ...


class Connection(Protocol):
    """A connection to one executor."""

    async def get_info(self, timeout_s: float) -> ExecutorInfo: ...

    async def get_tokenizer(self, timeout_s: float) -> TokenizerSource:
        """Fetch the tokenizer, whole."""
        ...

    def attach(self) -> PlanStream: ...

    async def close(self) -> None: ...


class Transport(Protocol):
    """Makes connections."""

    def connect(self, address: str) -> Connection:
        """Return a connection; it dials when it is used."""
        ...

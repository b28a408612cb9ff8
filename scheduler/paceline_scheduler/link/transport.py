"""What the link needs of a network. Production uses gRPC (`transport_grpc`); a simulation brings its own.

All methods raise LinkError: UnreachableError when nothing answers at the address, TermSupersededError when the executor
refuses for another scheduler, StreamEndedError for everything else that ends a call.
"""

from typing import Protocol

from paceline.plan.values import BatchPlan, ExecutorInfo, FromExecutor, ToExecutor


class PlanCall(Protocol):
    """`read` and `write` may run at the same time, each once."""

    async def write(self, message: ToExecutor, *more: BatchPlan) -> None:
        """Several plans go as one message. Returns when the network took it."""
        ...

    async def read(self) -> FromExecutor: ...

    def cancel(self) -> None:
        """A second call does nothing."""
        ...


class ExecutorConnection(Protocol):
    async def get_info(self, timeout_s: float) -> ExecutorInfo: ...

    async def get_tokenizer(self, timeout_s: float) -> bytes:
        """Return the whole, as `codec.tokenizers` joins its parts."""
        ...

    def attach(self) -> PlanCall: ...

    async def close(self) -> None: ...


class Transport(Protocol):
    def connect(self, address: str) -> ExecutorConnection:
        """The connection dials when it is used."""
        ...

"""The link's transport over the simulated network."""

import asyncio

from paceline.plan.values import (
    BatchPlan,
    Drain,
    ExecutorInfo,
    FromExecutor,
    Heartbeat,
    SnapshotPart,
    StepResult,
    ToExecutor,
    WaitingInLine,
    Welcome,
)
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.errors import LinkError, StreamEndedError, UnreachableError
from paceline_scheduler.link.wire_contexts import with_contexts
from simulation.executors import ATTACH, GET_INFO, GET_TOKENIZER
from simulation.loop import Node
from simulation.network import Call, CallEndedError, End, Network

_FROM_EXECUTOR = (WaitingInLine, Welcome, SnapshotPart, StepResult, Heartbeat, Drain)


class SimulatedTransport:
    """Connections of one scheduler process."""

    def __init__(self, network: Network, node: Node) -> None:
        self._network = network
        self._node = node

    def connect(self, address: str) -> "SimulatedConnection":
        """Return a connection; it dials when it is used."""
        return SimulatedConnection(self._network, self._node, address.partition(":")[0])


class SimulatedConnection:
    """A connection to one executor."""

    def __init__(self, network: Network, node: Node, name: str) -> None:
        self._network = network
        self._node = node
        self._name = name

    async def get_info(self, timeout_s: float) -> ExecutorInfo:
        """Ask who the executor is."""
        answer = await self._ask(GET_INFO, timeout_s)
        assert isinstance(answer, ExecutorInfo), "that is its answer"
        return answer

    async def get_tokenizer(self, timeout_s: float) -> TokenizerSource:
        """Fetch the tokenizer."""
        answer = await self._ask(GET_TOKENIZER, timeout_s)
        assert isinstance(answer, TokenizerSource), "that is its answer"
        return answer

    def attach(self) -> "SimulatedPlanStream":
        """Open a plan stream."""
        return SimulatedPlanStream(self._network.call(self._node, self._name, ATTACH))

    async def close(self) -> None:
        """Nothing is held."""

    async def _ask(self, method: str, timeout_s: float) -> object:
        call = self._network.call(self._node, self._name, method)
        try:
            async with asyncio.timeout(timeout_s):
                return await call.answer()
        except CallEndedError as ended:
            if ended.end in (End.REFUSED, End.BROKEN):
                raise UnreachableError(f"the connection was {ended.end}") from None
            raise StreamEndedError(str(ended.end)) from None
        except TimeoutError:
            raise StreamEndedError("no answer in time") from None
        finally:
            call.cancel()


class SimulatedPlanStream:
    """A plan stream to one executor."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def write(self, message: ToExecutor, *more: BatchPlan) -> None:
        """Send messages."""
        try:
            for each in (message, *more):
                self._call.ask(with_contexts(each) if isinstance(each, BatchPlan) else each)
        except CallEndedError as ended:
            raise _typed(ended.end) from None

    async def read(self) -> FromExecutor:
        """Return the next message."""
        try:
            message = await self._call.answer()
        except CallEndedError as ended:
            raise _typed(ended.end) from None
        assert isinstance(message, _FROM_EXECUTOR), "what executors say"
        return message

    def cancel(self) -> None:
        """End the stream."""
        self._call.cancel()


def _typed(end: object) -> LinkError:
    return end if isinstance(end, LinkError) else StreamEndedError(f"the plan stream is {end}")

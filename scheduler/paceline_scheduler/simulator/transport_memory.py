"""The link's transport inside one process: connections to simulated executors, with the faults of a network.

Knows services by address. A frozen executor takes what is written and says nothing; a stopped one refuses connections.
"""

import asyncio
from enum import Enum

from paceline.plan.values import BatchPlan, ExecutorInfo, FromExecutor, Hello, ToExecutor
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.errors import StreamEndedError, UnreachableError
from paceline_scheduler.link.wire_contexts import with_contexts
from paceline_scheduler.simulator.dialogue import TOKENIZER_SOURCE, greet, info_of, messages_of
from paceline_scheduler.simulator.service import SimulatedService, Stream


class Reach(Enum):
    """How an executor answers."""

    UP = "up"
    STOPPED = "stopped"
    FROZEN = "frozen"


class MemoryNetwork:
    """Simulated executors by address: a Transport."""

    def __init__(self) -> None:
        self.services: dict[str, SimulatedService] = {}
        self.reach: dict[str, Reach] = {}
        self.num_tokenizer_calls = 0
        self._thawed: dict[str, asyncio.Event] = {}

    def add(self, address: str, service: SimulatedService) -> None:
        """Let an executor listen at an address."""
        self.services[address] = service
        self.reach[address] = Reach.UP
        self._thawed[address] = asyncio.Event()
        self._thawed[address].set()

    def stop(self, address: str) -> None:
        """Kill an executor: its streams break, connections are refused."""
        self.reach[address] = Reach.STOPPED
        self.services[address].restart()

    def start(self, address: str) -> None:
        """Let an executor that was stopped, or frozen, answer again."""
        self.reach[address] = Reach.UP
        self._thawed[address].set()

    def freeze(self, address: str) -> None:
        """Let an executor say nothing from now on; what is written to it is lost."""
        self.reach[address] = Reach.FROZEN
        self._thawed[address].clear()

    async def until_thawed(self, address: str) -> None:
        """Wait until an executor is not frozen."""
        await self._thawed[address].wait()

    def connect(self, address: str) -> "MemoryConnection":
        """Return a connection."""
        return MemoryConnection(self, address)


class MemoryConnection:
    """A connection to one simulated executor."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self._address = address

    async def get_info(self, timeout_s: float) -> ExecutorInfo:
        """Ask who the executor is."""
        service = await self._service(timeout_s)
        return info_of(service)

    async def get_tokenizer(self, timeout_s: float) -> TokenizerSource:
        """Fetch the tokenizer."""
        await self._service(timeout_s)
        self._network.num_tokenizer_calls += 1
        return TOKENIZER_SOURCE

    def attach(self) -> "MemoryPlanStream":
        """Open a plan stream."""
        return MemoryPlanStream(self._network, self._address)

    async def close(self) -> None:
        """Nothing is held."""

    async def _service(self, timeout_s: float) -> SimulatedService:
        match self._network.reach.get(self._address, Reach.STOPPED):
            case Reach.STOPPED:
                raise UnreachableError("connection refused")
            case Reach.FROZEN:
                await asyncio.sleep(timeout_s)
                raise StreamEndedError("no answer in time")
            case Reach.UP:
                return self._network.services[self._address]


class MemoryPlanStream:
    """A plan stream to one simulated executor."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self._address = address
        self._stream: Stream | None = None
        self._greeted = asyncio.Event()
        self._unread: list[FromExecutor] = []
        self._is_cancelled = False

    async def write(self, message: ToExecutor, *more: BatchPlan) -> None:
        """Give messages to the executor, or to nobody if it is frozen."""
        if self._is_cancelled:
            raise StreamEndedError("the plan stream was cancelled")
        if self._network.reach[self._address] is Reach.FROZEN:
            return
        service = self._network.services[self._address]
        if isinstance(message, Hello):
            self._stream = greet(service, message)
            self._greeted.set()
        elif self._stream is not None:
            for each in (message, *more):
                service.hear(self._stream, with_contexts(each) if isinstance(each, BatchPlan) else None)

    async def read(self) -> FromExecutor:
        """Return the next message."""
        await self._greeted.wait()
        while not self._unread:
            self._unread = await self._next_messages()
            await self._network.until_thawed(self._address)
        return self._unread.pop(0)

    def cancel(self) -> None:
        """End the stream."""
        if self._stream is not None and not self._is_cancelled:
            self._network.services[self._address].leave(self._stream)
        self._is_cancelled = True

    async def _next_messages(self) -> list[FromExecutor]:
        assert self._stream is not None, "reading begins after hello"
        service = self._network.services[self._address]
        return messages_of(service, await self._stream.outbox.get())

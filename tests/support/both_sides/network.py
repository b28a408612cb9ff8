"""The link's transport inside one process: connections to executors on the running loop, with a network's faults.

Knows executors by address. A frozen executor takes what is written and says nothing; a stopped one refuses connections.
"""

import asyncio
from enum import Enum

from both_sides.served import MemoryCall, ServedExecutor
from paceline.plan.values import BatchPlan, ExecutorInfo, FromExecutor, ToExecutor
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.errors import StreamEndedError, UnreachableError


class Reach(Enum):
    """How an executor answers."""

    UP = "up"
    STOPPED = "stopped"
    FROZEN = "frozen"


class MemoryNetwork:
    """Executors by address: a Transport."""

    def __init__(self) -> None:
        self.executors: dict[str, ServedExecutor] = {}
        self.num_tokenizer_calls = 0
        self._reach: dict[str, Reach] = {}
        self._thawed: dict[str, asyncio.Event] = {}

    def add(self, address: str, executor: ServedExecutor) -> None:
        """Let an executor listen at an address."""
        self.executors[address] = executor
        self._reach[address] = Reach.UP
        self._thawed[address] = asyncio.Event()
        self._thawed[address].set()

    def stop(self, address: str) -> None:
        """Kill an executor: its streams break, connections are refused."""
        self._reach[address] = Reach.STOPPED
        self.executors[address].restart()

    def start(self, address: str) -> None:
        """Let an executor that was stopped, or frozen, answer again."""
        self._reach[address] = Reach.UP
        self._thawed[address].set()

    def freeze(self, address: str) -> None:
        """Let an executor say nothing from now on; what is written to it is lost."""
        self._reach[address] = Reach.FROZEN
        self._thawed[address].clear()

    def is_frozen(self, address: str) -> bool:
        """Whether an executor says nothing."""
        return self._reach[address] is Reach.FROZEN

    async def until_thawed(self, address: str) -> None:
        """Wait until an executor is not frozen."""
        await self._thawed[address].wait()

    async def reach(self, address: str, timeout_s: float) -> ServedExecutor:
        """Return the executor at an address, if it answers."""
        match self._reach.get(address, Reach.STOPPED):
            case Reach.STOPPED:
                raise UnreachableError("connection refused")
            case Reach.FROZEN:
                await asyncio.sleep(timeout_s)
                raise StreamEndedError("no answer in time")
            case Reach.UP:
                return self.executors[address]

    def connect(self, address: str) -> "MemoryConnection":
        """Return a connection."""
        return MemoryConnection(self, address)


class MemoryConnection:
    """A connection to one executor."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self._address = address

    async def get_info(self, timeout_s: float) -> ExecutorInfo:
        """Ask who the executor is."""
        return await (await self._network.reach(self._address, timeout_s)).get_info()

    async def get_tokenizer(self, timeout_s: float) -> TokenizerSource:
        """Fetch the tokenizer."""
        executor = await self._network.reach(self._address, timeout_s)
        self._network.num_tokenizer_calls += 1
        return await executor.get_tokenizer()

    def attach(self) -> "MemoryPlanStream":
        """Open a plan stream."""
        return MemoryPlanStream(self._network, self._address)

    async def close(self) -> None:
        """Nothing is held."""


class MemoryPlanStream(MemoryCall):
    """A plan stream over the network: what is frozen neither hears nor is heard."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        super().__init__(network.executors[address])
        self._network = network
        self._address = address

    async def write(self, message: ToExecutor, *more: BatchPlan) -> None:
        """Give messages to the executor, or to nobody if it is frozen."""
        if not self._network.is_frozen(self._address):
            await super().write(message, *more)

    async def read(self) -> FromExecutor:
        """Return the next message."""
        message = await super().read()
        await self._network.until_thawed(self._address)
        return message

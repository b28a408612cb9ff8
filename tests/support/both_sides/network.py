"""The link's transport inside one process: connections to executors on the running loop, with a network's faults.

Knows executors by address. A frozen executor takes what is written and says nothing; a stopped one refuses connections.
"""

import asyncio

from both_sides.served import MemoryCall, ServedExecutor
from paceline.plan.values import ExecutorInfo
from paceline_scheduler.errors import StreamEndedError, UnreachableError


class MemoryNetwork:
    """Executors by address: a Transport."""

    def __init__(self) -> None:
        self.executors: dict[str, ServedExecutor] = {}
        self.num_tokenizer_calls = 0
        self._stopped: set[str] = set()  # addresses where nobody listens

    def add(self, address: str, executor: ServedExecutor) -> None:
        self.executors[address] = executor

    def stop(self, address: str) -> None:
        """Kill an executor: its streams break, connections are refused."""
        self._stopped.add(address)
        self.executors[address].restart()

    def start(self, address: str) -> None:
        """Let an executor that was stopped, or frozen, answer again."""
        self._stopped.discard(address)
        self.executors[address].thawed.set()

    def freeze(self, address: str) -> None:
        """Let an executor say nothing from now on; what is written to it is lost."""
        self.executors[address].thawed.clear()

    async def reach(self, address: str, timeout_s: float) -> ServedExecutor:
        """Return the executor at an address, if it answers."""
        executor = self.executors.get(address)
        if executor is None or address in self._stopped:
            raise UnreachableError("connection refused")
        if not executor.thawed.is_set():
            await asyncio.sleep(timeout_s)
            raise StreamEndedError("no answer in time")
        return executor

    def connect(self, address: str) -> "MemoryConnection":
        return MemoryConnection(self, address)


class MemoryConnection:
    """A connection to one executor."""

    def __init__(self, network: MemoryNetwork, address: str) -> None:
        self._network = network
        self._address = address

    async def get_info(self, timeout_s: float) -> ExecutorInfo:
        return await (await self._network.reach(self._address, timeout_s)).get_info()

    async def get_tokenizer(self, timeout_s: float) -> bytes:
        executor = await self._network.reach(self._address, timeout_s)
        self._network.num_tokenizer_calls += 1
        return await executor.get_tokenizer()

    def attach(self) -> MemoryCall:
        return MemoryCall(self._network.executors[self._address])

    async def close(self) -> None:
        """Nothing is held."""

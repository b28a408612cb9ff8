"""How rank 0 starts its followers, and makes one runner of all ranks. Refuses to know devices."""

from dataclasses import replace

from paceline_executor.config import Config, RunnerKind
from paceline_executor.limits import RowLimits
from paceline_executor.ranks.group import OnLost, RankGroup
from paceline_executor.ranks.guard import DrawGuard
from paceline_executor.ranks.memory import GroupMemory
from paceline_executor.ranks.messages import encode
from paceline_executor.ranks.order import Order, identity_of
from paceline_executor.ranks.ranked_runner import RankedRunner
from paceline_executor.ranks.ring import BatchRingWriter
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.start.opening import Opened
from paceline_executor.weights import Checkpoint
from paceline_executor.weights.sharded import ShardedCheckpoint


class RankStart:
    """Rank 0's, of one start."""

    def __init__(self, config: Config, kind: RunnerKind, opened: Opened, on_lost: OnLost) -> None:
        """Starts the followers."""
        self._whole = opened.checkpoint
        order = Order(config.arguments, str(opened.path), kind.value, config.tensor_parallel_size)
        self._group = RankGroup(order, on_lost)

    @property
    def memory(self) -> GroupMemory:
        return self._group.memory

    def agree(self, device: str, num_blocks: int) -> int:
        """See `RankGroup.agree`."""
        return self._group.agree(identity_of(self._whole, device), num_blocks)

    def begin(self, limits: RowLimits) -> None:
        """Kernels are compiled: the followers load, each its part."""
        self._group.begin(limits)

    def runner(self, own: DeviceRunner) -> RankedRunner:
        """Once all have loaded. Raises RankError."""
        self._group.until_ready()
        memory, geometry = self.memory, own.kv_geometry
        writer = BatchRingWriter(memory)
        whole = replace(
            geometry,
            num_kv_heads=self._whole.config.num_kv_heads,
            bytes_per_block=geometry.bytes_per_block * memory.degree,
        )
        return RankedRunner(own, whole, lambda message: writer.write(encode(message)), DrawGuard(memory))

    def has_warmed_up(self) -> None:
        self._group.has_warmed_up()


def part_of(whole: Checkpoint, memory: GroupMemory | None) -> Checkpoint:
    """A rank's; all of it where there is one rank."""
    return whole if memory is None else ShardedCheckpoint(whole, memory.rank, memory.degree)

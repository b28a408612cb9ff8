"""How rank 0 meets other nodes, starts its followers, and makes one runner of all ranks. Refuses to know devices."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from paceline_executor.config import Config, RunnerKind
from paceline_executor.limits import RowLimits
from paceline_executor.ranks.group import OnLost, RankGroup
from paceline_executor.ranks.guard import DrawGuard
from paceline_executor.ranks.link import Link, LinkMessage
from paceline_executor.ranks.meeting import Meeting, listen
from paceline_executor.ranks.memory import GroupMemory
from paceline_executor.ranks.messages import Message, encode
from paceline_executor.ranks.order import Order, identity_of
from paceline_executor.ranks.ranked_runner import RankedRunner
from paceline_executor.ranks.ring import BatchRingWriter
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.start.opening import Opened
from paceline_executor.weights import Checkpoint
from paceline_executor.weights.sharded import ShardedCheckpoint


class RankStart:
    """Rank 0's, of one start."""

    def __init__(
        self,
        config: Config,
        kind: RunnerKind,
        meeting: Meeting | None,
        on_lost: OnLost,
        on_leaving: Callable[[], None],
    ) -> None:
        """meeting: of nodes; None where there is one. on_leaving: a node is to stop, told again and again."""
        self._config, self._kind, self._on_lost, self._on_leaving = config, kind, on_lost, on_leaving
        self._meeting = meeting

    def start(self, opened: Opened) -> None:
        """The followers, once all nodes are here. Raises RankError, PortError."""
        config = self._config
        self._whole = opened.checkpoint
        order = Order(config.arguments, str(opened.path), self._kind.value, config.share)
        links: Mapping[int, Link] = {}
        listening = None
        if self._meeting is not None and config.node is not None:
            links = self._meeting.links()
            listener = listen(config.host, 0)
            order = replace(order, store_at=(config.node.host, listener.getsockname()[1]))
            listening = listener.detach()
        self._group = RankGroup(order, self._on_lost, links, on_leaving=self._on_leaving, listening=listening)

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
        group, memory, geometry = self._group, self.memory, own.kv_geometry
        writer = BatchRingWriter(memory)

        def tell(message: Message) -> None:
            data = encode(message)
            group.tell_nodes(LinkMessage.BATCH, data)  # which are further away
            writer.write(data)

        whole = replace(
            geometry,
            num_kv_heads=self._whole.config.num_kv_heads,
            bytes_per_block=geometry.bytes_per_block * memory.degree,
        )
        return RankedRunner(own, whole, tell, DrawGuard(memory))

    def has_warmed_up(self) -> None:
        self._group.has_warmed_up()


def part_of(whole: Checkpoint, rank: int, degree: int) -> Checkpoint:
    """A rank's; all of it where there is one rank."""
    return whole if degree == 1 else ShardedCheckpoint(whole, rank, degree)

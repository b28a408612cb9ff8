"""Ranks in one process: each computes on a thread of its own, one at a time, and they meet at every sum and draw.

Batches go from the first to the others as bytes, as they do between processes.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from executor_rig.cpu import MAX_TOKENS, NUM_ROWS
from kernel_rig.turns import Turns
from paceline_executor.limits import RowLimits
from paceline_executor.numerics import FLOAT32_NUMERICS
from paceline_executor.ranks.messages import Message, decode, encode
from paceline_executor.ranks.ranked_runner import FollowingRank, RankedRunner
from paceline_executor.runner.cpu import CpuModel
from paceline_executor.runner.device.device import CudaDevice
from paceline_executor.runner.device.host_device import HostDevice
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.runner.interface import StepOutput
from paceline_executor.weights import Checkpoint
from paceline_executor.weights.sharded import ShardedCheckpoint
from paceline_kernels.linear import sum_of_slices


class JoinedCollectives:
    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns, self.rank = turns, rank

    @property
    def degree(self) -> int:
        return self._turns.degree

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return self._turns.gather(self.rank, part)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return sum_of_slices(self.gather(part))


class TurnDevice(HostDevice):
    def __init__(self, turns: Turns) -> None:
        super().__init__(1)
        self._turns = turns

    def launch(self, work: Callable[[], object]) -> None:
        super().launch(partial(_in_turn, self._turns, work))


class TurnGpu(CudaDevice):
    """Ranks share its one stream, so what a rank adds up has been computed."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def launch(self, work: Callable[[], object]) -> None:
        self._last = self._thread.submit(_in_turn, self._turns, work)

    def poll(self) -> None:
        if self._last is not None and self._last.done():
            self._last.result()
        super().poll()

    def synchronize(self) -> None:
        if self._last is not None:
            self._last.result()
        super().synchronize()


def _in_turn(turns: Turns, work: Callable[[], object]) -> None:
    with turns.turn():
        work()


class _Compared:
    """What each rank drew, step by step."""

    def __init__(self) -> None:
        self.drawn: dict[int, list[list[int]]] = {}

    def landed(self, step: int, output: StepOutput) -> None:
        self.drawn.setdefault(step, []).append(output.token_ids.tolist())


def joined_ranks(
    checkpoint: Checkpoint, degree: int, *, num_blocks: int = 128, block_size: int = 16, max_drafts: int = 0
) -> tuple[RankedRunner, Callable[[], Sequence[list[list[int]]]]]:
    """And what the ranks have drawn in each step, all of which then has landed."""
    longest = min(num_blocks * block_size, checkpoint.config.max_model_len)
    vocab_size = checkpoint.config.vocab_size
    limits = RowLimits(NUM_ROWS, longest, MAX_TOKENS, num_blocks, block_size, vocab_size, max_drafts)
    turns = Turns(degree)

    def of_rank(rank: int) -> DeviceRunner:
        part, collectives = ShardedCheckpoint(checkpoint, rank, degree), JoinedCollectives(turns, rank)
        model = CpuModel.read(TurnDevice(turns), part, FLOAT32_NUMERICS, longest, collectives)
        return model.runner(limits)

    return joined([of_rank(rank) for rank in range(degree)])


def joined(ranks: Sequence[DeviceRunner]) -> tuple[RankedRunner, Callable[[], Sequence[list[list[int]]]]]:
    """What these have drawn, too."""
    (own, *others), compared = ranks, _Compared()
    followers = [FollowingRank(other, compared) for other in others]

    def tell(message: Message) -> None:
        data = encode(message)
        for follower in followers:
            follower.take(decode(bytearray(data)))

    def drawn() -> Sequence[list[list[int]]]:
        for follower in followers:
            for _ in range(follower.num_in_flight):
                follower.land()
        return list(compared.drawn.values())

    return RankedRunner(own, own.kv_geometry, tell, compared), drawn

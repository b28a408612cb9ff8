"""Drafters for tests: one that errs as often as wanted, one of no use, and draft models without a model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import numpy as np

from paceline_executor.limits import RowLimits
from paceline_executor.models.eagle3 import read_head
from paceline_executor.numerics import MatrixKind
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.runner.drafter import WantedDrafts, WantingRow
from paceline_executor.runner.interface import Int32Array, SamplingColumns
from paceline_executor.runner.simulated import SimulatedRunner
from paceline_executor.speculation.draft_model import CatchUpTime, DraftModel
from paceline_executor.speculation.eagle3 import Eagle3Drafter
from paceline_executor.testing.plans import int32
from paceline_executor.weights import ModelConfig
from paceline_executor.weights.hf.eagle3 import eagle3_from_folder


def wanted_drafts(
    rows: Sequence[tuple[int, Sequence[int], int]], block_ids: Sequence[Sequence[int]] = ()
) -> WantedDrafts:
    """rows: number, prompt, how many are wanted."""
    zero = np.zeros(len(rows), dtype=np.int32)
    floats = zero.astype(np.float32)
    greedy = SamplingColumns(floats, zero, floats + 1, floats, zero.astype(np.uint64), zero, zero - 1)
    tables = block_ids or [()] * len(rows)
    wanting = [
        WantingRow(row, int32(tokens), num_wanted, int32(table), len(tokens))
        for (row, tokens, num_wanted), table in zip(rows, tables, strict=True)
    ]
    return WantedDrafts(wanting, greedy)


class UpTo(CatchUpTime):
    """So many tokens, however long they take."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__([(1, 1)], num_tokens)
        self._num_tokens = num_tokens

    def tokens_within(self, spare_ns: int) -> int:
        """See CatchUpTime."""
        del spare_ns
        return self._num_tokens


def simulated_draft_model(
    limits: RowLimits, vocab_size: int, *, max_model_len: int = 0, max_catch_up: int
) -> DraftModel:
    """Draws as simulated runners do: with their vocabulary it is right as long as its own blocks are."""
    runner = SimulatedRunner(limits.num_blocks, limits.block_size, vocab_size)
    longest = max_model_len or limits.max_model_len
    return DraftModel(runner, max_model_len=longest, vocab_size=vocab_size, catch_up=UpTo(max_catch_up))


def head_drafter(
    runner: CpuRunner, folder: Path, target: ModelConfig, weights: MatrixKind, limits: RowLimits
) -> Eagle3Drafter:
    """The EAGLE-3 head in this folder, which sees the runner's steps from now on."""
    checkpoint = eagle3_from_folder(folder, target)
    drafter = Eagle3Drafter(
        read_head(checkpoint, runner.embed, limits.max_model_len, weights),
        checkpoint,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        num_threads=1,
    )
    runner.observe_by(drafter)
    return drafter


class KnowingDrafter:
    """`answers` are prompts with outputs. num_right: how many drafts are right, of so many."""

    def __init__(self, answers: Sequence[Sequence[int]], num_right: Callable[[int], int]) -> None:
        self._answers = [list(answer) for answer in answers]
        self._num_right = num_right
        self.forgotten: list[int] = []

    def draft(self, wanted: WantedDrafts) -> Sequence[Int32Array]:
        return [self._draft(of_row.token_ids.tolist(), of_row.num_wanted) for of_row in wanted.rows]

    def forget(self, row: int) -> None:
        self.forgotten.append(row)

    def _draft(self, known: list[int], num_wanted: int) -> Int32Array:
        answer = next((answer for answer in self._answers if answer[: len(known)] == known), known)
        right = answer[len(known) :][: self._num_right(num_wanted)]
        following = answer[len(known) + len(right)] if len(known) + len(right) < len(answer) else 0
        return int32(right + [following + 1] * (num_wanted - len(right)))


class UselessDrafter:
    """The same token again and again, more than wanted, or no token."""

    def __init__(self, random: Random, vocab_size: int) -> None:
        self._random = random
        self._answers = [[0] * 20, [vocab_size - 1] * 3, [], [1, vocab_size, 2], [-1], [3, 2**31 - 1]]

    def draft(self, wanted: WantedDrafts) -> Sequence[Int32Array]:
        return [np.array(self._random.choice(self._answers), dtype=np.int32) for _ in wanted.rows]

    def forget(self, row: int) -> None:
        """See Drafter."""

"""Drives a runner without a scheduler: grants blocks, cuts prompts into chunks, feeds every drawn token back.

Refuses to know plans and rows tables: one `Driver` is one small batch.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline_executor.runner.interface import (
    BlockCells,
    HostTokenLists,
    Int32Array,
    RowDescriptions,
    Runner,
    SamplingColumns,
    StepBatch,
    StepOutput,
)

_MORE = 64  # tokens that a row may still draw


@dataclass(frozen=True, slots=True)
class Draw:
    """The default is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    num_logprobs: int = -1


@dataclass(frozen=True, slots=True)
class DrawnLogprobs:
    """Its numbers compare."""

    chosen: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(slots=True)
class DrivenRow:
    token_ids: list[int]  # prompt and output
    num_prompt: int
    draw: Draw
    blocks: list[int]
    max_chunk: int
    num_computed: int = 0
    logprobs: list[DrawnLogprobs] = field(default_factory=list)
    fault: str | None = None

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt :]


class Driver:
    """Blocks are granted in an order drawn from `seed` and given back by `drop`."""

    def __init__(self, runner: Runner, seed: int = 0) -> None:
        self._runner = runner
        self._block_size = runner.kv_geometry.block_size
        self._free = list(range(runner.kv_geometry.num_blocks))
        random.Random(seed).shuffle(self._free)  # noqa: S311, an order for tests is no secret

    def add(
        self,
        prompt: Sequence[int],
        draw: Draw | None = None,
        *,
        max_chunk: int = 512,
        shares: DrivenRow | None = None,
    ) -> DrivenRow:
        """Computes up to `max_chunk` tokens of its prompt in one step.

        With `shares`, the full blocks that row has computed of this prompt's beginning are used. The last token of the
        prompt is always computed: its logits are needed.
        """
        row = DrivenRow(list(prompt), len(prompt), draw or Draw(), [], max_chunk)
        if shares is not None:
            common = _common_length(prompt, shares.token_ids[: shares.num_computed])
            num_shared = min(common, len(prompt) - 1) // self._block_size
            row.blocks = shares.blocks[:num_shared]
            row.num_computed = num_shared * self._block_size
        return row

    def drop(self, row: DrivenRow) -> None:
        self._free += row.blocks
        row.blocks = []

    def step(self, rows: Sequence[DrivenRow]) -> StepOutput:
        """Draws for rows whose known tokens are then all computed."""
        counts = [min(row.max_chunk, len(row.token_ids) - row.num_computed) for row in rows]
        for row, count in zip(rows, counts, strict=True):
            while len(row.blocks) * self._block_size < row.num_computed + count:
                row.blocks.append(self._free.pop())
        sampled = [i for i, row in enumerate(rows) if row.num_computed + counts[i] == len(row.token_ids)]
        output = self._runner.wait(self._runner.launch(step_batch(rows, counts, sampled)))
        for row, count in zip(rows, counts, strict=True):
            row.num_computed += count
        for i, problem in output.problems.items():
            rows[i].fault = problem.value
        drawn = [rows[i] for i in sampled if i not in output.problems]
        for place, row in enumerate(drawn):
            row.token_ids.append(int(output.token_ids[place]))
            if row.draw.num_logprobs >= 0:
                row.logprobs.append(drawn_logprobs(output, place, row.draw.num_logprobs))
        return output

    def run(self, rows: Sequence[DrivenRow], num_tokens: int) -> list[list[int]]:
        """Until every row that has no fault has `num_tokens` tokens of output; returns the outputs."""
        while going := [row for row in rows if len(row.output) < num_tokens and row.fault is None]:
            self.step(going)
        return [row.output for row in rows]


def drawn_logprobs(output: StepOutput, place: int, num_top: int) -> DrawnLogprobs:
    """Raises LookupError when the runner left them out."""
    if output.logprobs is None:
        raise LookupError("no row of this step asked for log-probabilities")
    values = output.logprobs.of(slice(place, place + 1), num_top)
    top = (tuple(values.top_token_ids[0].tolist()), tuple(values.top_logprobs[0].tolist()))
    return DrawnLogprobs(float(values.logprobs[0]), *top)


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def step_batch(rows: Sequence[DrivenRow], counts: Sequence[int], sampled: Sequence[int]) -> StepBatch:
    """The next `counts[i]` tokens of row i, described anew; draws for the rows at `sampled`."""
    draws = [row.draw for row in rows]
    known = [np.array(row.token_ids, dtype=np.int32) for row in rows]
    described = RowDescriptions(
        rows=_int32(range(len(rows))),
        num_prompt=_int32(row.num_prompt for row in rows),
        num_computed=_int32(row.num_computed for row in rows),
        max_known=_int32(len(row.token_ids) + _MORE for row in rows),
        end_token_ids=np.full((len(rows), 1), -1, dtype=np.int32),
        sampling=SamplingColumns(
            temperature=np.array([draw.temperature for draw in draws], dtype=np.float32),
            top_k=_int32(draw.top_k for draw in draws),
            top_p=np.array([draw.top_p for draw in draws], dtype=np.float32),
            min_p=np.array([draw.min_p for draw in draws], dtype=np.float32),
            seeds=np.array([draw.seed for draw in draws], dtype=np.uint64),
            offsets=_int32([0] * len(rows)),
            num_logprobs=_int32(draw.num_logprobs for draw in draws),
        ),
        rules=(None,) * len(rows),
        known=HostTokenLists.of(known),
    )
    cells = [(number, index, block) for number, row in enumerate(rows) for index, block in enumerate(row.blocks)]
    return StepBatch(
        rows=described.rows,
        num_tokens=_int32(counts),
        context_lens=_int32(row.num_computed + count for row, count in zip(rows, counts, strict=True)),
        sampled=_int32(sampled),
        described=described,
        cells=BlockCells(*(_int32(column) for column in zip(*cells, strict=True))),
    )


def _int32(values: Iterable[int]) -> Int32Array:
    return np.array([*values], dtype=np.int32)

"""What drafts would have brought: `python -m speculation.replay`, the same on a busy machine as on a quiet one.

Records what the default model answers to the prompts, and the CPU time of steps by rows and drafts. Then plays the
answers back through the production's drafter and choice, in as much time as those steps took. No host but the drafter's
14 microseconds a row is in it.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer

from paceline.plan.values import StepPoint
from paceline_executor.limits import RowLimits
from paceline_executor.link.engine import Engine
from paceline_executor.numerics import Quantization, choose_numerics
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.runner.interface import Int32Array
from paceline_executor.speculation.drafter import MAX_NUM_DRAFT_TOKENS, WantedDrafts
from paceline_executor.speculation.prompt_lookup import PromptLookup
from paceline_executor.testing.drafters import wanted_drafts
from paceline_executor.testing.driving import Driver
from paceline_executor.testing.models import default_model_path
from paceline_executor.testing.plans import int32, placement, plan
from paceline_executor.weights import load_checkpoint, load_tokenizer
from paceline_scheduler.api.chat_template import ChatTemplate
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.planning.drafts import best_drafts
from paceline_scheduler.core.planning.speculation import Speculation
from paceline_scheduler.core.planning.step_budget import StepBudget
from paceline_scheduler.core.planning.step_time import StepTimeModel
from speculation.prompts import PROMPTS

_NUM_ROWS, _BLOCK_SIZE, _BLOCKS_PER_ROW, _NUM_TOKENS = (1, 4, 32), 16, 24, 160
_NUMS = (0, 1, 2, 3, 4, 6, 8)  # of drafts
_LOOKUP_MS = 0.014  # of a row that is asked: what 32 rows add to a step of the rows table
_NUM_REPEATS = 6


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model made of a prompt: both, and where the answer begins."""

    token_ids: Int32Array
    start: int


def main() -> None:
    """Print the table: tokens per time with drafts, by that without, and drafts right of verified."""
    path = default_model_path(os.environ)
    checkpoint, tokenizer = load_checkpoint(path), load_tokenizer(path)
    runner = CpuRunner(
        checkpoint,
        num_blocks=max(_NUM_ROWS) * _BLOCKS_PER_ROW,
        block_size=_BLOCK_SIZE,
        numerics=choose_numerics(Quantization.AUTO, None, checkpoint.config, _BLOCK_SIZE),
        num_threads=1,
    )
    template, encode = ChatTemplate(tokenizer.chat_template or "", {}), Tokenizer.from_buffer(tokenizer.tokenizer_json)
    costs = {num_rows: _costs(runner, num_rows) for num_rows in _NUM_ROWS}
    for num_rows, of_rows in costs.items():
        print(f"{num_rows} rows, ms with {_NUMS} drafts each:", *(f"{cost:.2f}" for cost in of_rows))
    points = [StepPoint(num_rows, int(of_rows[0] * 1e6)) for num_rows, of_rows in costs.items()]
    print("| prompts | rows | chosen | right | best fixed |\n|---|---|---|---|---|")
    for kind, prompts in PROMPTS.items():
        rendered = [
            template.render([{"role": "user", "content": prompt}], datetime.now(UTC), 1 << 16) for prompt in prompts
        ]
        ids = [encode.encode(text, add_special_tokens=False).ids for text in rendered]
        answers = _answers(runner, ids, set(tokenizer.end_token_ids))
        for num_rows, of_rows in costs.items():
            _print_line(f"{kind} | {num_rows}", answers * -(-num_rows // len(answers)), num_rows, of_rows, points)


def _print_line(
    name: str, answers: Sequence[Answer], num_rows: int, costs: Sequence[float], points: Sequence[StepPoint]
) -> None:
    plain, _, _ = _play(answers, num_rows, costs, _Fixed(0))
    chosen, num_right, num_verified = _play(answers, num_rows, costs, _Chosen(num_rows, points))
    fixed = {number: _play(answers, num_rows, costs, _Fixed(number))[0] for number in _NUMS[1:]}
    best = max(fixed, key=lambda number: fixed[number])
    print(f"| {name} | {chosen / plain:.2f} | {num_right} of {num_verified} | {fixed[best] / plain:.2f} with {best} |")


class _Fixed:
    """As many for every row, whatever they are worth."""

    def __init__(self, number: int) -> None:
        self._number = number

    def begin(self, row: int) -> None:
        """A row has another answer."""

    def choose(self, _: Int32Array, __: Int32Array, most: Int32Array) -> tuple[Int32Array, float]:
        """Drafts of each row, and how likely one has to be right."""
        return np.minimum(most, self._number), 0.0

    def observe(
        self, rows: Int32Array, positions: Int32Array, verified: Int32Array, right: Int32Array, ms: float
    ) -> None:
        """A step is over."""


class _Chosen(_Fixed):
    """The scheduler's choice, with all that it learns from."""

    def __init__(self, num_rows: int, points: Sequence[StepPoint]) -> None:
        self._model = StepTimeModel(points)
        self._speculation = Speculation(num_rows, MAX_NUM_DRAFT_TOKENS)
        self._limits = CoreLimits()

    def begin(self, row: int) -> None:
        """See above."""
        self._speculation.acceptance.begin(row)

    def choose(self, rows: Int32Array, positions: Int32Array, most: Int32Array) -> tuple[Int32Array, float]:
        """See above."""
        budget = StepBudget(self._model, self._limits, 1 << 16)
        budget.add_decodes(positions, len(rows))
        by_row = np.zeros(int(rows.max()) + 1, dtype=np.int32)
        by_row[rows] = positions
        view = SimpleNamespace(rows=SimpleNamespace(num_scheduled=by_row), speculation=self._speculation)
        drafts, min_chance = best_drafts(cast("Any", view), rows.astype(np.intp), most, budget)
        self._speculation.planned(int(drafts.sum()))
        return drafts, min_chance

    def observe(
        self, rows: Int32Array, positions: Int32Array, verified: Int32Array, right: Int32Array, ms: float
    ) -> None:
        """See above."""
        self._speculation.acceptance.observe(rows.astype(np.intp), verified, right)
        num_tokens, num_pairs = len(rows) + int(verified.sum()), int(((positions + 1) * (verified + 1)).sum())
        self._model.observe(num_tokens, num_pairs, int(ms * 1e6), int(verified.sum()))


def _play(answers: Sequence[Answer], num_rows: int, costs: Sequence[float], choice: _Fixed) -> tuple[float, int, int]:
    """Returns tokens per millisecond, and how many drafts were right and verified."""
    drafter, waiting, known = PromptLookup(), list(answers), dict[int, tuple[Answer, int]]()
    num_tokens = num_right = num_verified = 0
    spent_ms = 0.0
    while waiting or known:
        for row in range(num_rows):
            if row not in known and waiting:
                known[row] = (waiting[0], waiting.pop(0).start + 1)
                choice.begin(row)
        rows, positions = int32(list(known)), int32([size - 1 for _, size in known.values()])
        most = int32([answer.token_ids.size - size - 1 for answer, size in known.values()])
        wanted, min_chance = choice.choose(rows, positions, most.clip(0, MAX_NUM_DRAFT_TOKENS))
        verified, right = np.zeros_like(rows), np.zeros_like(rows)
        for place, (row, (answer, size)) in enumerate(list(known.items())):
            of_row = wanted_drafts([(row, answer.token_ids[:size].tolist(), int(wanted[place]))])
            drafts = drafter.draft(WantedDrafts(of_row.rows, of_row.sampling, min_chance))[0] if wanted[place] else ()
            came = answer.token_ids[size : size + len(drafts)]
            verified[place] = len(drafts)
            right[place] = np.cumprod(came == drafts).sum() if len(drafts) else 0
            known[row] = (answer, size + int(right[place]) + 1)
            if known[row][1] >= answer.token_ids.size:
                drafter.forget(row)
                del known[row]
        step_ms = float(np.interp(verified.sum() / len(rows), _NUMS, costs)) * _share(len(rows), num_rows)
        choice.observe(rows, positions, verified, right, step_ms)
        spent_ms += step_ms + _LOOKUP_MS * np.count_nonzero(wanted)
        num_tokens += len(rows) + int(right.sum())
        num_right, num_verified = num_right + int(right.sum()), num_verified + int(verified.sum())
    return num_tokens / spent_ms, num_right, num_verified


def _share(num_rows: int, most: int) -> float:
    """Of a full step's time that one of fewer rows takes: a fifth is for the weights."""
    return 0.2 + 0.8 * num_rows / most


def _answers(runner: CpuRunner, prompts: Sequence[Sequence[int]], ends: set[int]) -> list[Answer]:
    driver = Driver(runner)
    rows = [driver.add(prompt) for prompt in prompts]
    driver.run(rows, _NUM_TOKENS)
    found = []
    for row in rows:
        size = next((number + 1 for number, token_id in enumerate(row.output) if token_id in ends), _NUM_TOKENS)
        found.append(Answer(int32(row.token_ids[: row.num_prompt + size]), row.num_prompt))
    return found


def _costs(runner: CpuRunner, num_rows: int) -> list[float]:
    """Milliseconds of a step of rows at contexts of about 100, with each number of drafts; the best of some."""

    class Guesses:
        def draft(self, wanted: WantedDrafts) -> Sequence[Int32Array]:
            return [int32([7] * row.num_wanted) for row in wanted.rows]

        def forget(self, row: int) -> None:
            pass

    limits = RowLimits(
        num_rows=num_rows,
        max_model_len=_BLOCKS_PER_ROW * _BLOCK_SIZE,
        max_num_batched_tokens=4096,
        num_blocks=num_rows * _BLOCKS_PER_ROW,
        block_size=_BLOCK_SIZE,
        vocab_size=49152,
        max_num_draft_tokens=MAX_NUM_DRAFT_TOKENS,
    )
    engine, chance = Engine(RowTable(limits, Guesses()), runner), np.random.default_rng(0)
    requests = [placement(row, chance.integers(1000, 20000, 100).tolist(), max_tokens=250) for row in range(num_rows)]
    cells = [(row, i, row * _BLOCKS_PER_ROW + i) for row in range(num_rows) for i in range(_BLOCKS_PER_ROW)]
    first = plan([(row, 100) for row in range(num_rows)], step_id=1, place=requests, grants=cells)
    engine.collect(engine.launch(first))
    took_ms: dict[int, list[float]] = {number: [] for number in _NUMS}
    for step in range(_NUM_REPEATS * len(_NUMS)):
        number = _NUMS[step % len(_NUMS)]
        drafts = [number] * num_rows if number else ()
        each = plan([(row, 1 + number) for row in range(num_rows)], step_id=2 + step, drafts=drafts)
        start_ns = time.process_time_ns()
        engine.collect(engine.launch(each))
        took_ms[number].append((time.process_time_ns() - start_ns) / 1e6)
    return [min(times) for times in took_ms.values()]


if __name__ == "__main__":
    main()

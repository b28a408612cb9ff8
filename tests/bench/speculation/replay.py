"""What drafts would have brought: `python -m speculation.replay`, the same on a busy machine as on a quiet one.

Records what the default model answers to the prompts, and the CPU time of steps by rows and drafts, and plays it back.
"""

import os
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
from tokenizers import Tokenizer

from paceline_executor.limits import RowLimits
from paceline_executor.link.engine import Engine
from paceline_executor.numerics import Quantization, choose_numerics
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.runner.interface import Int32Array
from paceline_executor.speculation.drafter import MAX_NUM_DRAFT_TOKENS, WantedDrafts
from paceline_executor.testing.driving import Driver
from paceline_executor.testing.models import default_model_path
from paceline_executor.testing.plans import int32, placement, plan
from paceline_executor.weights import load_checkpoint, load_tokenizer
from paceline_scheduler.api.text.chat_template import ChatTemplate
from speculation.playback import MAX_TOKENS, Answer, Costs, Disturbance, play
from speculation.prompts import PROMPTS

_NUM_ROWS, _MEASURED_ROWS, _BLOCK_SIZE, _BLOCKS_PER_ROW = (1, 4, 32), (1, 2, 4, 8, 16, 32), 16, 24
_NUMS = (0, 1, 2, 3, 4, 6, 8)  # of drafts
_NUM_REPEATS = 6
_DEVIATION, _NUM_DISTURBED = (
    0.35,
    5,
)  # steps of 4 rows took 5.3 to 12.7 ms, from the tenth to the ninetieth of a hundred


def main() -> None:
    """Print the table: tokens per time with drafts, by that without, and drafts right of verified, chosen from
    undisturbed and disturbed times, and the best number for all."""
    path = default_model_path(os.environ)
    checkpoint, tokenizer = load_checkpoint(path), load_tokenizer(path)
    runner = CpuRunner(
        checkpoint,
        num_blocks=max(_MEASURED_ROWS) * _BLOCKS_PER_ROW,
        block_size=_BLOCK_SIZE,
        numerics=choose_numerics(Quantization.AUTO, None, checkpoint.config, _BLOCK_SIZE),
        num_threads=1,
    )
    template, encode = ChatTemplate(tokenizer.chat_template or "", {}), Tokenizer.from_buffer(tokenizer.tokenizer_json)
    # More drafts never take less.
    table = np.maximum.accumulate([_costs(runner, num_rows) for num_rows in _MEASURED_ROWS], axis=1)
    costs = Costs(_MEASURED_ROWS, _NUMS, table)
    for num_rows, of_rows in zip(_MEASURED_ROWS, table, strict=True):
        print(f"{num_rows} rows, ms with {_NUMS} drafts each:", *(f"{cost:.2f}" for cost in of_rows))
    print("| prompts | rows | chosen | right | disturbed | best fixed |\n|---|---|---|---|---|---|")
    for kind, prompts in PROMPTS.items():
        rendered = [
            template.render([{"role": "user", "content": prompt}], datetime.now(UTC), 1 << 16) for prompt in prompts
        ]
        ids = [encode.encode(text, add_special_tokens=False).ids for text in rendered]
        answers = _answers(runner, ids, set(tokenizer.end_token_ids))
        for num_rows in _NUM_ROWS:
            _print_line(f"{kind} | {num_rows}", answers * -(-num_rows // len(answers)), num_rows, costs)


def _print_line(name: str, answers: Sequence[Answer], num_rows: int, costs: Costs) -> None:
    plain = play(answers, num_rows, costs, 0).tokens_per_ms
    chosen = play(answers, num_rows, costs, None)
    disturbed = sorted(
        play(answers, num_rows, costs, None, Disturbance(_DEVIATION, seed)).tokens_per_ms / plain
        for seed in range(_NUM_DISTURBED)
    )
    fixed = {number: play(answers, num_rows, costs, number).tokens_per_ms for number in _NUMS[1:]}
    best = max(fixed, key=lambda number: fixed[number])
    print(
        f"| {name} | {chosen.tokens_per_ms / plain:.2f} | {chosen.num_right} of {chosen.num_verified}"
        f" | {statistics.median(disturbed):.2f} ({disturbed[0]:.2f} to {disturbed[-1]:.2f})"
        f" | {fixed[best] / plain:.2f} with {best} |",
        flush=True,
    )


def _answers(runner: CpuRunner, prompts: Sequence[Sequence[int]], ends: set[int]) -> list[Answer]:
    driver = Driver(runner)
    rows = [driver.add(prompt) for prompt in prompts]
    driver.run(rows, MAX_TOKENS)
    found = []
    for row in rows:
        size = next((number + 1 for number, token_id in enumerate(row.output) if token_id in ends), MAX_TOKENS)
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

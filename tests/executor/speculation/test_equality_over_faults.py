"""Drafts change no token where rows are preempted and come back, blocks are shared and copied, and steps fail.

Plans are drawn at random (`random_plans`); the drafters are those of production, on the CPU's own runner.
"""

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from paceline_executor.errors import StepFailedError
from paceline_executor.link.engine import Engine
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, Numerics, WeightKind
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.speculation.draft_model import DraftModel
from paceline_executor.speculation.prompt_lookup import PromptLookup
from paceline_executor.testing.drafters import UpTo, head_drafter
from paceline_executor.testing.eagle3 import random_head
from paceline_executor.testing.models import tiny_checkpoint
from paceline_executor.testing.random_plans import LIMITS, Request, Scheduler
from random_requests import FEW, Outcome, asking, outcome_alone

MAX_DRAFTS, VOCAB_SIZE, MAX_LEN = 8, LIMITS.vocab_size, LIMITS.max_model_len
SIZES = {"num_blocks": LIMITS.num_blocks, "block_size": LIMITS.block_size}
SHAPE = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 32, "intermediate_size": 96}
SMALLER = tiny_checkpoint(num_layers=1, **SHAPE, vocab_size=VOCAB_SIZE - 3, max_model_len=20, seed=1)
MODEL = tiny_checkpoint(num_layers=3, **SHAPE, vocab_size=VOCAB_SIZE, max_model_len=MAX_LEN)
NUMERICS = {"float32": FLOAT32_NUMERICS, "packed": Numerics(WeightKind.PACKED, KvDtype.FLOAT16)}


class Breaking(CpuRunner):
    """Its next step is lost when it has been computed."""

    breaks = False

    def launch(self, batch):
        output = super().launch(batch)
        if self.breaks:
            self.breaks = False
            raise RuntimeError("of the test")
        return output


def drawn_requests(random):
    """As often as they are asked for: the scheduler changes them."""
    wanted = [
        (random.choices(FEW, k=random.randint(1, 12)), random.randint(1, 20), random.randrange(VOCAB_SIZE))
        for _ in range(random.randint(2, 6))
    ]
    return lambda: [Request(f"r{index}", list(each[0]), *each[1:]) for index, each in enumerate(wanted)]


def together(runner, drafter, requests, numbers, random, counts):
    """What comes of all requests in plans drawn at random."""
    engine = Engine(RowTable(replace(LIMITS, max_num_draft_tokens=MAX_DRAFTS), drafter), runner)
    scheduler, outcomes = Scheduler(random, requests, MAX_DRAFTS), {request.name: Outcome() for request in requests}
    while not scheduler.is_done:
        planned = scheduler.plan()
        placed = tuple(asking(each, numbers[each.record_id.request_id]) for each in planned.new_requests)
        runner.breaks = random.random() < 0.08
        try:
            result = engine.collect(engine.launch(replace(planned, new_requests=placed)))
        except StepFailedError as error:
            if not isinstance(error.__cause__, RuntimeError):
                raise
            scheduler.rebuild(engine.table.states())
            counts["failed"] += 1
            continue
        finally:
            runner.breaks = False
        tokens = iter(result.token_ids.tolist())
        for row, count in zip(result.rows.tolist(), result.num_accepted.tolist(), strict=True):
            outcome = outcomes[{**scheduler.running, **scheduler.leaving}[row].name]
            mine = [next(tokens) for _ in range(count)]
            if not outcome.finish:
                outcome.take(result, row, mine)
        counts["verified"] += int(result.num_draft_tokens.sum())
        counts["accepted"] += int(np.maximum(result.num_accepted - 1, 0).sum())
        counts["left"] += len(planned.releases)
        scheduler.take(planned, result)
    return {name: vars(outcome) for name, outcome in outcomes.items()}


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS)
@pytest.mark.parametrize("kind", ["lookup", "twin", "model", "head"])
def test_tokens_are_those_of_plain_decoding_whatever_becomes_of_rows(kind, numerics, tmp_path):
    runner = Breaking(MODEL, **SIZES, numerics=numerics, num_threads=1)
    drafter = drafter_on(runner, kind, numerics, tmp_path)
    plain = CpuRunner(MODEL, **SIZES, numerics=numerics, num_threads=1)
    counts = Counter()
    for seed in range(12):
        random = Random(seed)  # noqa: S311  # reproducible on purpose
        requests = drawn_requests(random)
        numbers = {request.name: random.randrange(60) for request in requests()}
        expected = {request.name: vars(outcome_alone(plain, request, numbers[request.name])) for request in requests()}
        assert together(runner, drafter, requests(), numbers, random, counts) == expected, seed
    assert min(counts["failed"], counts["left"]) >= 5, counts
    assert counts["accepted"] >= (5 if kind == "head" else 20), counts
    assert counts["accepted"] < counts["verified"] or kind == "twin", counts


def drafter_on(runner, kind, numerics, folder):
    """One for all runs: what it keeps of earlier ones must do no harm."""
    if kind == "lookup":
        return PromptLookup()
    if kind == "head":
        folder = random_head(MODEL.config, draft_vocab_size=30).write(folder)
        return head_drafter(runner, folder, MODEL.config, numerics.weights, LIMITS)
    checkpoint, vocab_size = (MODEL, VOCAB_SIZE) if kind == "twin" else (SMALLER, VOCAB_SIZE - 3)
    of_drafter = CpuRunner(checkpoint, **SIZES, numerics=numerics, num_threads=1)
    longest = checkpoint.config.max_model_len
    return DraftModel(of_drafter, max_model_len=longest, vocab_size=vocab_size, catch_up=UpTo(3))

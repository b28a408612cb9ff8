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
from paceline_executor.models.eagle3 import Eagle3Head
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, Numerics, WeightKind
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.speculation.draft_model import DraftModel
from paceline_executor.speculation.eagle3 import Eagle3Drafter
from paceline_executor.speculation.prompt_lookup import PromptLookup
from paceline_executor.testing.drafters import UpTo
from paceline_executor.testing.eagle3 import random_head
from paceline_executor.testing.models import tiny_checkpoint
from paceline_executor.testing.plans import GREEDY, placement, plan
from paceline_executor.testing.random_plans import LIMITS, Request, Scheduler
from paceline_executor.weights.hf.eagle3 import eagle3_from_folder

MAX_DRAFTS, VOCAB_SIZE, MAX_LEN = 8, 50, 24
FEW = (1, 2, 3, 4, 5)
SIZES = {"num_blocks": LIMITS.num_blocks, "block_size": LIMITS.block_size}
SAMPLINGS = (
    GREEDY,
    replace(GREEDY, temperature=0.7, top_k=7, top_p=0.9, min_p=0.01, seed=2**63 + 1),
    replace(GREEDY, temperature=1.0, seed=4, allowed_token_ids=FEW),
    replace(GREEDY, temperature=1.0, seed=5, repetition_penalty=1.6, allowed_token_ids=FEW),
    replace(GREEDY, temperature=0.7, seed=9, presence_penalty=0.5, frequency_penalty=-0.4, logit_bias=((3, 4.0),)),
)
SMALLER = tiny_checkpoint(
    num_layers=1,
    num_heads=9,
    num_kv_heads=3,
    head_dim=32,
    intermediate_size=96,
    vocab_size=VOCAB_SIZE - 3,
    max_model_len=20,
    seed=1,
)
MODEL = tiny_checkpoint(
    num_layers=3,
    num_heads=9,
    num_kv_heads=3,
    head_dim=32,
    intermediate_size=96,
    vocab_size=VOCAB_SIZE,
    max_model_len=MAX_LEN,
)
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


class Outcome:
    """What came of a request."""

    def __init__(self):
        self.tokens, self.logprobs, self.finish, self.error = [], [], 0, ""

    def take(self, result, row, tokens):
        self.tokens += tokens
        self.finish = int(result.finishes[result.rows.tolist().index(row)])
        self.error = next((error.reason for error in result.errors if error.row == row), "")
        for told in result.logprobs:
            if told.row == row:
                self.logprobs += zip(told.token_ids.tolist(), told.columns.logprobs.tolist(), strict=True)


def asking(placed, number):
    """The same placement with what request `number` asks for."""
    return replace(
        placed,
        sampling=SAMPLINGS[number % len(SAMPLINGS)],
        num_logprobs=None if number % 3 else number % 4,
        bad_word_token_ids=((2, 3), (4,), (VOCAB_SIZE - 1,)) if number % 2 else (),
        min_tokens=2 if number % 3 == 1 else 0,
    )


def alone(runner, request, number):
    """What comes of a request alone, without drafts."""
    engine, outcome = Engine(RowTable(LIMITS), runner), Outcome()
    placed = placement(0, request.prompt, max_tokens=request.max_tokens, end_token_ids=[request.end_token])
    cells = [(0, index, index) for index in range(LIMITS.max_blocks_per_row)]
    contents, num_tokens = {"place": [asking(placed, number)], "grants": cells}, len(request.prompt)
    while not outcome.finish:
        result = engine.collect(engine.launch(plan([(0, num_tokens)], **contents)))
        outcome.take(result, 0, result.token_ids.tolist())
        contents, num_tokens = {}, 1
    return vars(outcome)


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
    """With log-probabilities, greedy and seeded, under rules; drafters lack what was computed elsewhere or lost."""
    runner = Breaking(MODEL, **SIZES, numerics=numerics, num_threads=1)
    drafter = drafter_on(runner, kind, numerics, tmp_path)
    plain = CpuRunner(MODEL, **SIZES, numerics=numerics, num_threads=1)
    counts = Counter()
    for seed in range(12):
        random = Random(seed)  # noqa: S311  # reproducible on purpose
        requests = drawn_requests(random)
        numbers = {request.name: random.randrange(60) for request in requests()}
        expected = {request.name: alone(plain, request, numbers[request.name]) for request in requests()}
        assert together(runner, drafter, requests(), numbers, random, counts) == expected, seed
    assert min(counts["failed"], counts["left"]) >= 5, counts
    assert counts["accepted"] >= (5 if kind == "head" else 20), counts
    assert counts["accepted"] < counts["verified"] or kind == "twin", counts


def drafter_on(runner, kind, numerics, folder):
    """One for all runs: what it keeps of earlier ones must do no harm."""
    if kind == "lookup":
        return PromptLookup()
    if kind == "head":
        checkpoint = eagle3_from_folder(random_head(MODEL.config, draft_vocab_size=30).write(folder), MODEL.config)
        head = Eagle3Head(checkpoint, runner.embed, MAX_LEN, numerics.weights)
        drafter = Eagle3Drafter(head, checkpoint, **SIZES, max_model_len=MAX_LEN, num_threads=1)
        runner.observe_by(drafter)
        return drafter
    checkpoint, vocab_size = (MODEL, VOCAB_SIZE) if kind == "twin" else (SMALLER, VOCAB_SIZE - 3)
    of_drafter = CpuRunner(checkpoint, **SIZES, numerics=numerics, num_threads=1)
    longest = checkpoint.config.max_model_len
    return DraftModel(of_drafter, max_model_len=longest, vocab_size=vocab_size, catch_up=UpTo(3))

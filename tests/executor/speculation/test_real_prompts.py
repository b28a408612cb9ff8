"""The default model and fifty prompts: each row's tokens are those of plain decoding, with 1 to 8 drafts a step.

Row i of a run has up to 1 + (i + first) % 8 drafts, and rows differ in how they draw; in the long variants every prompt
has every number.
"""

from random import Random

import numpy as np
import pytest

from paceline.plan.values import SamplingParams
from paceline_executor.limits import RowLimits
from paceline_executor.link.engine import Engine
from paceline_executor.numerics import KvDtype, Numerics, WeightKind
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.speculation.draft_model import DraftModel
from paceline_executor.speculation.prompt_lookup import PromptLookup
from paceline_executor.testing.drafters import KnowingDrafter, UpTo, UselessDrafter
from paceline_executor.testing.plans import placement, plan
from paceline_executor.weights import load_checkpoint

NUM_TOKENS, MAX_DRAFTS, BLOCK_SIZE = 16, 8, 16
SAMPLINGS = [
    SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1),
    SamplingParams(temperature=0.7, top_k=0, top_p=0.95, min_p=0.0, seed=2),
    SamplingParams(temperature=1.0, top_k=50, top_p=1.0, min_p=0.02, seed=3),
]
DRAFTERS = ("lookup", "erring", "useless", "twin")


@pytest.fixture(scope="module")
def requests(fifty_prompts):
    """A request for each prompt, in three ways of drawing."""
    return [
        placement(row, prompt, max_tokens=NUM_TOKENS, sampling=SAMPLINGS[row % 3])
        for row, prompt in enumerate(fifty_prompts)
    ]


@pytest.fixture(scope="module")
def limits(requests):
    """Room for all prompts at once."""
    longest = max(request.prompt_token_ids.size for request in requests) + NUM_TOKENS
    per_row = -(-longest // BLOCK_SIZE)
    return RowLimits(
        num_rows=len(requests),
        max_model_len=per_row * BLOCK_SIZE,
        max_num_batched_tokens=8192,
        num_blocks=per_row * len(requests),
        block_size=BLOCK_SIZE,
        vocab_size=49152,
        max_num_draft_tokens=MAX_DRAFTS,
    )


@pytest.fixture(scope="module")
def new_runner(default_model, limits):
    """Makes runners of the model as it is served."""
    numerics, checkpoint = Numerics(WeightKind.PACKED, KvDtype.INT8), load_checkpoint(default_model)
    return lambda: CpuRunner(
        checkpoint, num_blocks=limits.num_blocks, block_size=BLOCK_SIZE, numerics=numerics, num_threads=1
    )


@pytest.fixture(scope="module")
def runner(new_runner):
    """The one that serves."""
    return new_runner()


@pytest.fixture(scope="module")
def plain(runner, limits, requests):
    """What comes of the requests without drafts."""
    return served(runner, limits, requests, None, 0)[0]


def served(runner, limits, requests, drafter, first):
    """The output of each request, and how many drafts were verified and right in all."""
    engine = Engine(RowTable(limits, drafter), runner)
    per_row = limits.num_blocks // limits.num_rows
    cells = [(request.row, index, request.row * per_row + index) for request in requests for index in range(per_row)]
    known = [request.prompt_token_ids.size for request in requests]
    ends = [num + NUM_TOKENS for num in known]
    outputs, step_id, num_verified, num_right = [[] for _ in requests], 0, 0, 0
    while going := [row for row in range(len(requests)) if known[row] < ends[row]]:
        step_id += 1
        chunks = [known[row] if step_id == 1 else 1 for row in going]
        drafts = [min(1 + (row + first) % MAX_DRAFTS, ends[row] - known[row] - 1) if drafter else 0 for row in going]
        scheduled = [(row, sum(each)) for row, *each in zip(going, chunks, drafts, strict=True)]
        contents = {"place": requests, "grants": cells} if step_id == 1 else {}
        step = plan(scheduled, step_id=step_id, drafts=drafts if drafter else (), **contents)
        result = engine.collect(engine.launch(step))
        tokens = iter(result.token_ids.tolist())
        for row, num_accepted in zip(going, result.num_accepted.tolist(), strict=True):
            outputs[row] += [next(tokens) for _ in range(num_accepted)]
            known[row] += num_accepted
        num_verified += int(result.num_draft_tokens.sum())
        num_right += int(np.maximum(result.num_accepted - 1, 0).sum())
    return outputs, num_verified, num_right


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("lookup", 0),
        *(pytest.param(kind, first, marks=pytest.mark.soak) for kind in DRAFTERS for first in range(MAX_DRAFTS)),
    ],
)
def test_fifty_prompts_get_the_tokens_of_plain_decoding(kind, first, runner, new_runner, limits, requests, plain):
    """Greedy and at two temperatures, in one batch: one to eight drafts of every kind of drafter."""
    chance = Random(first)  # noqa: S311  # reproducible on purpose
    answers = [[*request.prompt_token_ids.tolist(), *output] for request, output in zip(requests, plain, strict=True)]
    drafter = {
        "lookup": PromptLookup,
        "erring": lambda: KnowingDrafter(answers, lambda num_wanted: chance.randint(0, num_wanted)),
        "useless": lambda: UselessDrafter(chance, limits.vocab_size),
        "twin": lambda: DraftModel(
            new_runner(), max_model_len=limits.max_model_len, vocab_size=limits.vocab_size, catch_up=UpTo(4096)
        ),
    }[kind]()
    outputs, num_verified, num_right = served(runner, limits, requests, drafter, first)
    assert outputs == plain
    assert num_verified >= 100
    assert (num_right > 20) == (kind != "useless")

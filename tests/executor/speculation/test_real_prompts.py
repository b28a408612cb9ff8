"""The default model and fifty prompts: each row's tokens are those of plain decoding, with 1 to 8 drafts a step.

Row i of a run has up to 1 + (i + first) % 8 drafts, and rows differ in how they draw and in their rules; in the long
variants every prompt has every number.
"""

from dataclasses import replace
from random import Random

import pytest

from drafting.serving import serve
from paceline.plan.values import SamplingParams
from paceline_executor.limits import RowLimits
from paceline_executor.link.engine import Engine
from paceline_executor.numerics import KvDtype, MatrixKind, Numerics
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.speculation.draft_model import DraftModel
from paceline_executor.speculation.prompt_lookup import PromptLookup
from paceline_executor.testing.drafters import KnowingDrafter, UpTo, UselessDrafter, head_drafter
from paceline_executor.testing.eagle3 import random_head
from paceline_executor.testing.models import FirstLayers
from paceline_executor.testing.plans import placement
from paceline_executor.weights import load_checkpoint

pytestmark = pytest.mark.slow  # tiny models show the same in `test_drafts_change_no_token`

NUM_TOKENS, MAX_DRAFTS, BLOCK_SIZE = 16, 8, 16
NUMERICS = Numerics(MatrixKind.PACKED, KvDtype.INT8)
SAMPLINGS = [
    SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=1),
    SamplingParams(temperature=0.7, top_k=0, top_p=0.95, min_p=0.0, seed=2),
    SamplingParams(temperature=1.0, top_k=50, top_p=1.0, min_p=0.02, seed=3),
]
PENALISED = {"presence_penalty": 0.4, "frequency_penalty": 0.2}
ASKED = [
    {"sampling": SAMPLINGS[0]},
    {"sampling": SAMPLINGS[1]},
    {"sampling": SAMPLINGS[2]},
    {"sampling": replace(SAMPLINGS[0], repetition_penalty=1.2), "num_logprobs": 2},
    {"sampling": replace(SAMPLINGS[1], **PENALISED), "bad_words": [(28,), (284, 260)], "num_logprobs": 0},
    {"sampling": replace(SAMPLINGS[2], logit_bias=((198, 2.0),)), "min_tokens": 12, "end_token_ids": [198, 30, 2]},
]
DRAFTERS = ("lookup", "erring", "wrong", "useless", "twin", "layers", "head")


@pytest.fixture(scope="module")
def requests(fifty_prompts):
    """A request for each prompt, in six ways."""
    return [
        placement(row, prompt, max_tokens=NUM_TOKENS, **ASKED[row % len(ASKED)])
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
def checkpoint(default_model):
    return load_checkpoint(default_model)


@pytest.fixture(scope="module")
def new_runner(checkpoint, limits):
    """Makes runners of the model as it is served, or of so many of its layers."""
    return lambda num_layers=30: CpuRunner(
        FirstLayers(checkpoint, num_layers),
        num_blocks=limits.num_blocks,
        block_size=BLOCK_SIZE,
        numerics=NUMERICS,
        num_threads=1,
    )


@pytest.fixture(scope="module")
def runner(new_runner):
    """The one that serves."""
    return new_runner()


@pytest.fixture(scope="module")
def plain(runner, limits, requests):
    """What comes of the requests without drafts."""
    return serve(Engine(RowTable(limits), runner), requests)[0]


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        *((kind, number) for number, kind in enumerate(DRAFTERS)),
        *(pytest.param(kind, first, marks=pytest.mark.soak) for kind in DRAFTERS for first in range(MAX_DRAFTS)),
    ],
)
def test_fifty_prompts_get_the_tokens_of_plain_decoding(
    kind, first, runner, new_runner, limits, requests, plain, checkpoint, tmp_path
):
    """Greedy and at two temperatures, with rules and without, in one batch: one to eight drafts of every drafter."""
    chance = Random(first)  # noqa: S311  # reproducible on purpose
    answers = [
        [*request.prompt_token_ids.tolist(), *outcome.tokens] for request, outcome in zip(requests, plain, strict=True)
    ]
    drafter = {
        "lookup": PromptLookup,
        "erring": lambda: KnowingDrafter(answers, lambda num_wanted: chance.randint(0, num_wanted)),
        "wrong": lambda: KnowingDrafter(answers, lambda _: 0),
        "useless": lambda: UselessDrafter(chance, limits.vocab_size),
        "twin": lambda: draft_model(new_runner(), limits),
        "layers": lambda: draft_model(new_runner(28), limits),
        "head": lambda: random_head_drafter(runner, checkpoint.config, limits, tmp_path),
    }[kind]()
    runner.draft_by(drafter)
    engine = Engine(RowTable(limits), runner)
    outcomes, steps = serve(engine, requests, lambda row, _: 1 + (row + first) % MAX_DRAFTS)
    runner.observe_by(None)
    assert outcomes == plain
    assert sum(step.verified for step in steps) >= 100
    assert (sum(step.accepted for step in steps) > 20) == (kind not in ("useless", "wrong", "head"))


def draft_model(runner, limits):
    """It knows all tokens, and catches up at once."""
    return DraftModel(runner, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size, catch_up=UpTo(1 << 14))


def random_head_drafter(runner, target, limits, folder):
    """EAGLE-3 with random weights: it is hardly ever right."""
    folder = random_head(target, draft_vocab_size=32000).write(folder)
    return head_drafter(runner, folder, target, NUMERICS.matrices, limits)

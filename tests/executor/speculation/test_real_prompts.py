"""The default model and fifty prompts: each row's tokens are those of plain decoding, with 1 to 8 drafts a step.

Row i of a run has up to 1 + (i + first) % 8 drafts, and rows differ in how they draw and in their rules; in the long
variants every prompt has every number.
"""

from dataclasses import replace
from random import Random

import pytest

from drafting.drafters import KnowingDrafter, UselessDrafter
from drafting.serving import serve
from executor_rig.cpu import shared_device
from executor_rig.plans import placement
from hash_twin import HostDrafter
from paceline.plan.sampling import SamplingParams
from paceline_executor.limits import RowLimits
from paceline_executor.link.engine import Engine
from paceline_executor.numerics import KvDtype, MatrixKind, Numerics
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuModel
from paceline_executor.runner.device.drafts import launching
from paceline_executor.start.drafter_choice import OpenedDrafter, OpenedHead
from paceline_executor.start.opening import ProgressLog
from paceline_executor.weights import load_checkpoint
from paceline_executor.weights.hf.eagle3 import eagle3_from_folder
from random_models import FirstLayers
from random_models.eagle3 import random_head

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
def model(checkpoint, limits):
    """As it is served."""
    return CpuModel.read(shared_device(), checkpoint, NUMERICS, limits.max_model_len)


@pytest.fixture(scope="module")
def plain(model, limits, requests):
    """What comes of the requests without drafts."""
    return serve(Engine(RowTable(limits), model.runner(limits)), requests)[0]


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        *((kind, number) for number, kind in enumerate(DRAFTERS)),
        *(pytest.param(kind, first, marks=pytest.mark.soak) for kind in DRAFTERS for first in range(MAX_DRAFTS)),
    ],
)
def test_fifty_prompts_get_the_tokens_of_plain_decoding(
    kind, first, model, limits, requests, plain, checkpoint, tmp_path
):
    """Greedy and at two temperatures, with rules and without, in one batch: one to eight drafts of every drafter."""
    chance = Random(first)  # noqa: S311  # reproducible on purpose
    answers = [
        [*request.prompt_token_ids.tolist(), *outcome.tokens] for request, outcome in zip(requests, plain, strict=True)
    ]

    def launched(drafter):
        return launching(HostDrafter(drafter, limits.vocab_size), MAX_DRAFTS)

    def opened(drafter):
        return drafter.drafting(model, limits, ProgressLog())

    drafting = {
        "lookup": lambda: None,
        "erring": lambda: launched(KnowingDrafter(answers, lambda num_wanted: chance.randint(0, num_wanted))),
        "wrong": lambda: launched(KnowingDrafter(answers, lambda _: 0)),
        "useless": lambda: launched(UselessDrafter(chance, limits.vocab_size)),
        "twin": lambda: opened(OpenedDrafter(checkpoint, NUMERICS)),
        "layers": lambda: opened(OpenedDrafter(FirstLayers(checkpoint, 28), NUMERICS)),
        "head": lambda: opened(OpenedHead(head_in(tmp_path, checkpoint.config), NUMERICS)),
    }[kind]()
    engine = Engine(RowTable(limits), model.runner(limits, drafting))
    outcomes, steps = serve(engine, requests, lambda row, _: 1 + (row + first) % MAX_DRAFTS)
    assert outcomes == plain
    assert sum(step.verified for step in steps) >= 100
    assert (sum(step.accepted for step in steps) > 20) == (kind not in ("useless", "wrong", "head"))


def head_in(folder, target):
    """EAGLE-3 with random weights: it is hardly ever right."""
    return eagle3_from_folder(random_head(target, draft_vocab_size=32000).write(folder), target)

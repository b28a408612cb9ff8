"""Drafts change no token: a row gets, bit for bit, what plain decoding gives it, whoever drafts."""

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from paceline.plan.values import RowFinish, SamplingParams
from paceline_executor.limits import RowLimits
from paceline_executor.link.engine import Engine
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, Numerics, WeightKind
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.speculation.draft_model import DraftModel
from paceline_executor.speculation.prompt_lookup import PromptLookup
from paceline_executor.testing.drafters import KnowingDrafter, UpTo, UselessDrafter, head_drafter
from paceline_executor.testing.eagle3 import Dialect, random_head
from paceline_executor.testing.models import tiny_checkpoint
from paceline_executor.testing.plans import GREEDY, placement, plan
from paceline_kernels.testing import poisoned

BLOCK_SIZE, BLOCKS_PER_ROW, NUM_ROWS, VOCAB_SIZE = 16, 4, 3, 512
LIMITS = RowLimits(
    num_rows=NUM_ROWS,
    max_model_len=BLOCK_SIZE * BLOCKS_PER_ROW,
    max_num_batched_tokens=128,
    num_blocks=NUM_ROWS * BLOCKS_PER_ROW,
    block_size=BLOCK_SIZE,
    vocab_size=VOCAB_SIZE,
    max_num_draft_tokens=8,
)
NUMERICS = {
    "float32": FLOAT32_NUMERICS,
    "packed-float16": Numerics(WeightKind.PACKED, KvDtype.FLOAT16),
    "packed-int8": Numerics(WeightKind.PACKED, KvDtype.INT8),
}


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Memory that is read before it is written is NaN."""
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))


MODEL = tiny_checkpoint(num_heads=9, num_kv_heads=3, head_dim=32, intermediate_size=96)
OTHER_MODEL = tiny_checkpoint(num_layers=1, num_heads=4, vocab_size=VOCAB_SIZE - 9, max_model_len=40, seed=1)


def runner_of(checkpoint, numerics):
    """Its cache holds NaN wherever nothing was written."""
    runner = CpuRunner(
        checkpoint, numerics=numerics, num_blocks=LIMITS.num_blocks, block_size=BLOCK_SIZE, num_threads=1
    )
    for cache in (runner._kv_cache.keys, runner._kv_cache.values):
        cache.fill_(-1 if cache.dtype == torch.int8 else float("nan"))  # four bytes of -1 are a NaN
    return runner


@pytest.fixture(scope="module", params=list(NUMERICS))
def numerics(request):
    """All that a target is computed in."""
    return NUMERICS[request.param]


@pytest.fixture(scope="module")
def runner(numerics):
    """All tests write over what is in its cache, as requests do."""
    return runner_of(MODEL, numerics)


@pytest.fixture(scope="module")
def models(numerics, runner, tmp_path_factory):
    """The target again; in other numbers than it; a smaller one that knows fewer tokens and shorter rows; and a head of
    random weights that knows 300 tokens and sees what the runner computes, whoever drafts.
    """
    smallest = NUMERICS["packed-int8"]
    head = head_on(runner, numerics, tmp_path_factory.mktemp("head"))
    return {
        "twin": DraftModelOf(runner_of(MODEL, numerics), VOCAB_SIZE, LIMITS.max_model_len),
        "copy": DraftModelOf(runner_of(MODEL, smallest), VOCAB_SIZE, LIMITS.max_model_len),
        "model": DraftModelOf(runner_of(OTHER_MODEL, FLOAT32_NUMERICS), VOCAB_SIZE - 9, 40),
        "head": lambda: head,
    }


def head_on(runner, numerics, folder):
    """A drafter with a head."""
    parts = random_head(MODEL.config, aux_layers=(1,), draft_vocab_size=300)
    folder = parts.write(folder, Dialect.SPECULATORS)
    return head_drafter(runner, folder, MODEL.config, numerics.weights, LIMITS)


@dataclass(frozen=True)
class DraftModelOf:
    """A runner, and draft models on it, each of which knows nothing of what the one before computed."""

    runner: CpuRunner
    vocab_size: int
    max_model_len: int

    def __call__(self):
        """A draft model that catches up slowly, so that drafts come with and without a row being far behind."""
        return DraftModel(self.runner, max_model_len=self.max_model_len, vocab_size=self.vocab_size, catch_up=UpTo(8))


@dataclass
class Served:
    """All that came of a request."""

    tokens: list
    logprobs: list
    prompt_logprobs: list
    finish: int = RowFinish.GOES_ON
    error: str = ""


class Drafting:
    """Requests served in steps drawn from a seed: chunks, and up to `most` drafts of rows that decode."""

    def __init__(self, runner, drafter, most, seed=0):
        self.table = RowTable(LIMITS, drafter)
        self.engine = Engine(self.table, runner)
        self.most = most
        self.random = Random(seed)  # noqa: S311  # reproducible on purpose
        self.counts = Counter()
        self.step_id = 0

    def serve(self, requests):
        """The requests, each on its row, until all have ended."""
        outcomes = [Served([], [], []) for _ in requests]
        known = [request.prompt_token_ids.size for request in requests]
        computed = [0] * len(requests)
        cells = [
            (request.row, index, request.row * BLOCKS_PER_ROW + index)
            for request in requests
            for index in range(BLOCKS_PER_ROW)
        ]
        contents = {"place": requests, "grants": cells}
        while going := [row for row, served in enumerate(outcomes) if not served.finish]:
            scheduled, drafts = [], []
            for row in going:
                num_left = known[row] - computed[row]
                num_tokens = num_left if num_left == 1 else self.random.randint(1, num_left)
                room = requests[row].prompt_token_ids.size + requests[row].max_tokens
                room = min(room, LIMITS.max_model_len) - known[row] - 1
                num_drafts = self.random.randint(0, min(self.most, room)) if num_tokens == num_left else 0
                scheduled.append((row, num_tokens + num_drafts))
                drafts.append(num_drafts)
                computed[row] += num_tokens
            result = self.step(scheduled, drafts if self.most else (), contents)
            contents, tokens = {}, iter(result.token_ids.tolist())
            for place, row in enumerate(going):
                served, num_accepted = outcomes[row], int(result.num_accepted[place])
                served.tokens += [next(tokens) for _ in range(num_accepted)]
                served.finish = int(result.finishes[place])
                known[row] += num_accepted
                computed[row] += max(0, num_accepted - 1)
            note(result, outcomes)
        return outcomes

    def step(self, scheduled, drafts, contents):
        """Execute a plan; rows are as far as the result says."""
        self.step_id += 1
        planned = plan(scheduled, step_id=self.step_id, drafts=drafts, **contents)
        result = self.engine.collect(self.engine.launch(planned))
        if drafts:
            verified = int(result.num_draft_tokens.sum())
            accepted = int(np.maximum(result.num_accepted - 1, 0).sum())
            self.counts.update(steps=1, granted=sum(drafts), verified=verified, accepted=accepted)
            assert (result.num_draft_tokens <= drafts).all()
        return result


def note(result, outcomes):
    """Take in what else a result tells of rows."""
    for told in result.logprobs:
        columns = told.columns
        lines = zip(told.token_ids, columns.logprobs, columns.top_token_ids, columns.top_logprobs, strict=True)
        outcomes[told.row].logprobs += [(int(a), float(b), c.tolist(), d.tolist()) for a, b, c, d in lines]
    for told in result.prompt_logprobs:
        outcomes[told.row].prompt_logprobs += told.columns.logprobs.tolist()
    for error in result.errors:
        outcomes[error.row].error = error.reason


def drafter_of(kind, requests, plain, seed, models):
    """One that knows the answers and errs at times, always or never; one that is of no use; the production's."""
    chance = Random(seed)  # noqa: S311  # reproducible on purpose
    answers = [
        request.prompt_token_ids.tolist() + served.tokens for request, served in zip(requests, plain, strict=True)
    ]
    return {
        "right": lambda: KnowingDrafter(answers, lambda num_wanted: num_wanted),
        "erring": lambda: KnowingDrafter(answers, lambda num_wanted: chance.randint(0, num_wanted)),
        "wrong": lambda: KnowingDrafter(answers, lambda _: 0),
        "useless": lambda: UselessDrafter(chance, VOCAB_SIZE),
        "lookup": PromptLookup,
        **models,
    }[kind]()


DRAFTERS = ("right", "erring", "wrong", "useless", "lookup", "twin", "copy", "model", "head")
# Few tokens may be drawn, so that words, penalties and end tokens are met, and lookups find something.
FEW = tuple(range(8))
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 0, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (5, -2.0)), ((3, 2.0), (VOCAB_SIZE - 2, -2.0))]),
    allowed_token_ids=st.sampled_from([(), FEW, FEW, (*FEW, VOCAB_SIZE - 2)]),
)
SOME_OF_FEW = replace(GREEDY, allowed_token_ids=FEW)
HIGH = VOCAB_SIZE - 2  # a token that the smaller model does not know
words = st.lists(st.lists(st.sampled_from((*FEW, HIGH)), min_size=1, max_size=3), max_size=4)


@st.composite
def requests_of_rows(draw):
    """A request for each row."""
    return [
        placement(
            row,
            [100 + row, *draw(st.lists(st.sampled_from(FEW), max_size=11))],  # so who knows answers tells rows apart
            max_tokens=draw(st.sampled_from([1, 5, 24, 64])),
            end_token_ids=draw(st.sampled_from([(), (7,), (6, 7), (7, HIGH)])),
            ignored_end_token_ids=draw(st.sampled_from([(), (5,)])),
            min_tokens=draw(st.sampled_from([0, 9])),
            bad_words=draw(words),
            num_logprobs=draw(st.sampled_from([None, 0, 3])),
            num_prompt_logprobs=draw(st.sampled_from([None, 2])),
            sampling=draw(samplings),
        )
        for row in range(NUM_ROWS)
    ]


@pytest.mark.hypothesis
def test_tokens_and_logprobs_are_those_of_plain_decoding(runner, models):
    reached = Counter()

    @settings(max_examples=settings.default.max_examples // 12)
    @given(requests_of_rows(), st.integers(1, 8), st.integers(0, 2**32))
    def drafts_change_nothing(requests, most, seed):
        plain = Drafting(runner, None, 0).serve(requests)
        reached.update(RowFinish(served.finish).name for served in plain)
        for kind in DRAFTERS:
            drafting = Drafting(runner, drafter_of(kind, requests, plain, seed, models), most, seed)
            assert drafting.serve(requests) == plain, kind
            reached.update({(kind, count): number for count, number in drafting.counts.items()})

    drafts_change_nothing()
    for reason in ("END_TOKEN", "LENGTH", "CONTEXT_FULL"):
        assert reached[reason] >= 1, reached
    assert reached["right", "accepted"] == reached["right", "verified"] >= 50, reached
    assert 20 <= reached["erring", "accepted"] < reached["erring", "verified"], reached
    assert reached["wrong", "accepted"] == 0 < reached["wrong", "verified"], reached
    assert 2 <= reached["lookup", "accepted"] < reached["lookup", "verified"], reached
    # It draws as the target does: by the same logits, noise and rules.
    assert reached["twin", "accepted"] == reached["twin", "verified"] >= 50, reached
    assert 50 <= reached["copy", "accepted"] <= reached["copy", "verified"], reached
    assert 20 <= reached["model", "accepted"] < reached["model", "verified"], reached
    assert 20 <= reached["head", "accepted"] < reached["head", "verified"], reached


def test_a_drafter_that_fails_costs_its_drafts_and_no_step(runner, failing_drafters):
    class Failing(PromptLookup):
        def draft(self, wanted):
            self.num_asked = getattr(self, "num_asked", 0) + 1
            if self.num_asked % 2:
                raise MemoryError("of the test")
            return super().draft(wanted)

    failing_drafters.allowed()
    requests = [placement(row, [3, 4, 3, 4], max_tokens=40, sampling=SOME_OF_FEW) for row in range(2)]
    plain = Drafting(runner, None, 0).serve(requests)
    drafter = Failing()
    drafting = Drafting(runner, drafter, 4)
    with capture_logs() as lines:
        assert drafting.serve(requests) == plain
    assert drafting.counts["verified"] > 0
    assert [line["event"] for line in lines] == ["draft_failed"] * -(-drafter.num_asked // 2)


RULES_OF_ONE = {
    "bad word": {"bad_words": [(HIGH,)]},
    "longer bad word": {"bad_words": [(5, HIGH)]},
    "bias": {"sampling": replace(GREEDY, logit_bias=((HIGH, -1.0),))},
    "one of the allowed": {"sampling": replace(GREEDY, allowed_token_ids=(1, 2, HIGH), repetition_penalty=1.5)},
    "all of the allowed": {"sampling": replace(GREEDY, allowed_token_ids=(HIGH,))},
    "withheld end token": {"end_token_ids": [HIGH], "min_tokens": 12},
}


@pytest.mark.parametrize("rules", RULES_OF_ONE.values(), ids=RULES_OF_ONE)
def test_rules_may_name_tokens_that_the_drafter_does_not_know(runner, models, rules):
    """They fail no step: a base model drafts for one with more special tokens."""
    requests = [placement(0, [1, 2, 3], max_tokens=16, **rules), placement(1, [4, 5], max_tokens=16)]
    plain = Drafting(runner, None, 0).serve(requests)
    drafting = Drafting(runner, models["model"](), 4)
    assert drafting.serve(requests) == plain
    assert drafting.counts["verified"] > 0


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("num_drafts", range(1, 9))
def test_a_right_drafter_brings_all_its_drafts_and_a_token_more(runner, temperature, num_drafts):
    sampling = replace(GREEDY, temperature=temperature, top_p=0.95, seed=17)
    requests = [placement(0, [1, 2, 3, 4], max_tokens=2 + 4 * (num_drafts + 1), sampling=sampling)]
    plain = Drafting(runner, None, 0).serve(requests)
    drafting = Drafting(runner, drafter_of("right", requests, plain, 0, {}), num_drafts)
    drafting.random.randint = lambda _, high: high

    assert drafting.serve(requests) == plain
    assert drafting.counts["accepted"] == drafting.counts["granted"]
    assert drafting.counts["steps"] == 5


def test_a_row_fails_at_the_token_at_which_it_fails_without_drafts(runner):
    """Nothing is left after 3, which is drafted and right; what is drawn behind it does not count."""
    words = [(3, token) for token in FEW]
    sampling = replace(GREEDY, allowed_token_ids=FEW, logit_bias=((3, 1.5),), repetition_penalty=1.5)
    requests = [placement(0, [1, 2], max_tokens=20, sampling=sampling, bad_words=words)]
    (plain,) = Drafting(runner, None, 0).serve(requests)
    assert (plain.error, plain.tokens[-1]) == ("NO_TOKEN_LEFT", 3)

    drafting = Drafting(runner, KnowingDrafter([[1, 2, *plain.tokens, 0, 0, 0]], lambda num_wanted: num_wanted), 8)
    assert drafting.serve(requests) == [plain]


def test_a_drafted_end_token_ends_nothing(runner):
    """It is not drawn: the row goes on, and ends where it does without drafts."""
    sampling = replace(GREEDY, logit_bias=((9, -100.0),))
    requests = [placement(0, [1, 2, 3], max_tokens=12, end_token_ids=[9], sampling=sampling)]
    plain = Drafting(runner, None, 0).serve(requests)
    drafting = Drafting(runner, KnowingDrafter([[1, 2, 3, *plain[0].tokens[:3], 9, 9]], lambda _: 2), 5)
    assert drafting.serve(requests) == plain

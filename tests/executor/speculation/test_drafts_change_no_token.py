"""Drafts change no token: a request gets, bit for bit, what plain decoding gives it alone, whoever drafts.

On a CPU and on the twin of a GPU, whose steps in flight may both verify drafts; among chunks, shared and copied blocks,
preemptions and failed steps. Drafters know the answers and err at times, always or never, are of no use, or are those
of production.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from drafting.drafters import KnowingDrafter, UselessDrafter
from drafting.serving import RandomRun, serve
from drafting.targets import HIGH, HOSTS, KINDS, LIMITS, TWINS, Target
from executor_rig.forms import choice, regex
from executor_rig.plans import GREEDY, placement
from kernel_rig import poisoned
from paceline.plan.sampling import SamplingParams
from paceline.plan.values import RowFinish
from paceline_executor.runner.drafter import PromptLookup

MOST = LIMITS.max_num_draft_tokens
DRAFTERS = ("right", "erring", "wrong", "useless", "lookup", "itself", "copy", "model", "head", "large head")
# In `make test` on a CPU and a twin; what the former makes of some the latter does, too.
QUICK = {
    "packed-float16": DRAFTERS,
    "captured": ("erring", "lookup", "itself", "model", "head"),
}
QUICK_WITH_FORMS = [("packed-float16", "erring"), ("packed-float16", "model"), ("captured", "lookup")]
CASES = [
    pytest.param(name, kind, marks=[] if kind in QUICK.get(name, ()) else pytest.mark.slow)
    for name in KINDS
    for kind in DRAFTERS
    if name in HOSTS or kind != "copy"  # twins have no other numbers
]
CASES_WITH_FORMS = [
    pytest.param(name, kind, marks=[] if (name, kind) in QUICK_WITH_FORMS else pytest.mark.slow)
    for name in KINDS
    for kind in ("erring", "lookup", "model", "head")
]


def repeated(name, *others):
    """A case of `make test`, and its repetition on others."""
    return [name, *(pytest.param(other, marks=pytest.mark.slow) for other in others)]


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Memory that is read before it is written is NaN."""
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))


@pytest.fixture(scope="module")
def new_target(tmp_path_factory):
    """Each is made once: what stays in its caches must do no harm."""
    return cache(lambda name: Target(KINDS[name], tmp_path_factory.mktemp("heads")))


@pytest.fixture(scope="module", params=repeated(*HOSTS))
def host(request, new_target):
    return new_target(request.param)


@pytest.fixture(scope="module", params=[*repeated(*HOSTS), *repeated(*TWINS)])
def target(request, new_target):
    return new_target(request.param)


# Few tokens may be drawn, so that words, penalties and end tokens are met, and lookups find something.
FEW = tuple(range(8))
OWN = 10  # and more: a token of each request's own, by which drafters that know answers tell requests apart
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
    logit_bias=st.sampled_from([(), ((3, 2.0), (5, -2.0)), ((3, 2.0), (HIGH, -2.0))]),
    allowed_token_ids=st.sampled_from([(), FEW, FEW, (*FEW, HIGH)]),
)
words = st.lists(st.lists(st.sampled_from((*FEW, HIGH)), min_size=1, max_size=3), max_size=4)


NO_FORM = st.just(b"")
FORMS_OF_FEW = st.sampled_from([b"", regex("[a-f]{3,30}"), regex("(abc|de){1,9}f?"), choice("ab", "abcdef", "cccc")])


@st.composite
def wanted_requests(draw, forms=NO_FORM):
    """Several, which may begin alike: those who want log-probabilities of their prompts share no blocks."""
    common = draw(st.lists(st.sampled_from(FEW), max_size=9))
    requests = []
    for index in range(draw(st.integers(2, 5))):
        num_prompt_logprobs = draw(st.sampled_from([None, None, 2]))
        begin = common[: draw(st.integers(0, 9))] + draw(st.lists(st.sampled_from(FEW), max_size=2))
        own = [OWN + index]
        request = placement(
            0,
            own + begin if num_prompt_logprobs else begin + own,
            max_tokens=draw(st.sampled_from([1, 5, 12, 64])),
            end_token_ids=draw(st.sampled_from([(), (7,), (6, 7), (7, HIGH)])),
            structured=draw(forms),
            ignored_end_token_ids=draw(st.sampled_from([(), (5,)])),
            min_tokens=draw(st.sampled_from([0, 9])),
            bad_words=draw(words),
            num_logprobs=draw(st.sampled_from([None, 0, 3])),
            num_prompt_logprobs=num_prompt_logprobs,
            sampling=draw(samplings),
        )
        requests.append(request)
    return requests


def drafter_of(kind, requests, outcomes, seed):
    """One that knows the answers, one of no use, or the name of one of production's."""
    chance = Random(seed)  # noqa: S311  # reproducible on purpose
    answers = [
        request.prompt_token_ids.tolist() + outcome.tokens for request, outcome in zip(requests, outcomes, strict=True)
    ]
    return {
        "right": KnowingDrafter(answers, lambda num_wanted: num_wanted),
        "erring": KnowingDrafter(answers, lambda num_wanted: chance.randint(0, num_wanted)),
        "wrong": KnowingDrafter(answers, lambda _: 0),
        "useless": UselessDrafter(chance, LIMITS.vocab_size),
    }.get(kind, kind)


def compare_with_plain_decoding(target, kind, forms=NO_FORM):
    """Serve requests drawn at random with drafts and without; returns what was reached."""
    reached, finishes = Counter(), Counter()

    @settings(max_examples=settings.default.max_examples // 4)
    @given(wanted_requests(forms), st.integers(0, 2**32), st.integers(1, MOST))
    def outcomes_are_those_of_plain_decoding(wanted, seed, most):
        expected = [target.plain.outcome(request) for request in wanted]
        engine = target.engine(drafter_of(kind, wanted, expected, seed))
        run = RandomRun(engine, wanted, seed, most, target.device)
        assert run.run() == expected
        reached.update(run.reached)
        finishes.update(RowFinish(outcome.finish).name for outcome in expected)

    outcomes_are_those_of_plain_decoding()
    for branch in ("failed", "released", "copied", "chunks beside drafts"):
        assert reached[branch] >= 5, reached
    for reason in ("END_TOKEN", "LENGTH", *(("CONTEXT_FULL",) if forms is NO_FORM else ())):
        assert finishes[reason] >= 1, finishes
    return reached


def assert_as_right_as(kind, verified, accepted):
    """How many drafts came, and how many were right, is as it should be of this drafter."""
    match kind:
        case "itself":  # it draws as the target does: by the same logits, noise and rules
            assert accepted == verified >= 20
        case "wrong":
            assert accepted == 0
            assert verified >= 20
        case "right" | "copy":
            assert 20 <= accepted <= verified
        case "useless":
            assert accepted <= verified
        case _:
            assert 5 <= accepted < verified


@pytest.mark.hypothesis
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_whoever_drafts_requests_get_what_plain_decoding_says(new_target, name, kind):
    reached = compare_with_plain_decoding(new_target(name), kind)
    assert_as_right_as(kind, reached["verified"], reached["accepted"])
    assert reached["drafts behind drafts"] >= 5, reached


@pytest.mark.hypothesis
@pytest.mark.parametrize(("name", "kind"), CASES_WITH_FORMS)
def test_outputs_with_forms_are_those_of_plain_decoding_too(new_target, name, kind):
    reached = compare_with_plain_decoding(new_target(name), kind, FORMS_OF_FEW)
    assert reached["verified"] > reached["accepted"] >= 5, reached


def test_a_drafter_that_fails_costs_its_drafts_and_no_step(host, failing_drafters):
    class Failing(PromptLookup):
        num_asked = 0

        def draft(self, *asked):
            self.num_asked += 1
            if self.num_asked % 2:
                raise MemoryError("of the test")
            return super().draft(*asked)

    failing_drafters.allowed()
    sampling = replace(GREEDY, allowed_token_ids=FEW)
    requests = [placement(row, [3, 4, 3, 4], max_tokens=18, sampling=sampling) for row in range(2)]
    plain, _ = serve(host.engine(None), requests)
    drafter = Failing()
    with capture_logs() as lines:
        outcomes, steps = serve(host.engine(drafter), requests, lambda *_: 4)
    assert outcomes == plain
    assert sum(step.verified for step in steps) > 0
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
def test_rules_may_name_tokens_that_the_drafter_does_not_know(target, rules):
    """They fail no step: a base model drafts for one with more special tokens."""
    requests = [placement(0, [1, 2, 3], max_tokens=16, **rules), placement(1, [4, 5], max_tokens=16)]
    plain, _ = serve(target.engine(None), requests)
    outcomes, steps = serve(target.engine("model"), requests, lambda *_: 4)
    assert outcomes == plain
    assert sum(step.verified for step in steps) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    "num_drafts", [1, MOST, *(pytest.param(num, marks=pytest.mark.slow) for num in range(2, MOST))]
)
def test_a_right_drafter_brings_all_its_drafts_and_a_token_more(host, temperature, num_drafts):
    sampling = replace(GREEDY, temperature=temperature, top_p=0.95, seed=17)
    requests = [placement(0, [1, 2, 3, 4], max_tokens=2 + 2 * (num_drafts + 1), sampling=sampling)]
    plain, _ = serve(host.engine(None), requests)
    outcomes, steps = serve(host.engine(drafter_of("right", requests, plain, 0)), requests, lambda *_: num_drafts)
    assert outcomes == plain
    brought = [(num_drafts, num_drafts), (num_drafts, num_drafts), (1, 1)]
    assert [(step.granted, step.accepted) for step in steps] == brought


def test_a_row_fails_at_the_token_at_which_it_fails_without_drafts(target):
    """Nothing is left after 3, which is drafted and right; what is drawn behind it does not count."""
    words = [(3, token) for token in FEW]
    sampling = replace(GREEDY, allowed_token_ids=FEW, logit_bias=((3, 1.5),), repetition_penalty=1.5)
    requests = [placement(0, [1, 2], max_tokens=20, sampling=sampling, bad_words=words)]
    (plain,), _ = serve(target.engine(None), requests)
    assert (plain.error, plain.tokens[-1]) == ("NO_TOKEN_LEFT", 3)

    drafter = KnowingDrafter([[1, 2, *plain.tokens, 0, 0, 0]], lambda num_wanted: num_wanted)
    (outcome,), steps = serve(target.engine(drafter), requests, lambda *_: 5)
    assert outcome == plain
    assert sum(step.accepted for step in steps) > 0


def test_a_drafted_end_token_ends_nothing(target):
    """It is not drawn: the row goes on, and ends where it does without drafts."""
    sampling = replace(GREEDY, logit_bias=((9, -100.0),))
    requests = [placement(0, [1, 2, 3], max_tokens=12, end_token_ids=[9], sampling=sampling)]
    plain, _ = serve(target.engine(None), requests)
    drafter = KnowingDrafter([[1, 2, 3, *plain[0].tokens[:3], 9, 9]], lambda _: 2)
    outcomes, _ = serve(target.engine(drafter), requests, lambda *_: 5)
    assert outcomes == plain

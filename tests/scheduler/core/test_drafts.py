"""How many drafts rows get: as many as bring the most tokens per time, and none at anybody else's expense."""

from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from both_sides.audited import drawn_acceptance, make_executor
from both_sides.harness import CoreHarness
from paceline.plan.values import StepPoint, StepTimings
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.outputs import DraftCounts
from paceline_scheduler.core.planning.drafts import best_drafts, most_per_time
from paceline_scheduler.core.planning.speculation import Acceptance, Speculation
from paceline_scheduler.core.planning.step_budget import StepBudget
from paceline_scheduler.core.planning.step_time import StepTimeModel
from scheduler_rig.requests import make_request

FIRST = "executor-0"
MS = 1e6
NO_BOUNDS = CoreLimits(target_step_s=1e6, itl_budget_s=1e6, max_step_s=1e6)


def make_budget(num_rows, base_ms=4.0, token_ms=1.0, *, max_num_tokens=1 << 20, limits=NO_BOUNDS):
    """The budget of a step that decodes so many rows, on a device that takes so long."""
    model = StepTimeModel([])
    model._weights = [base_ms * MS, token_ms * MS * 64, 0.0]
    budget = StepBudget(model, limits, max_num_tokens)
    budget.add_decodes(np.zeros(num_rows, dtype=np.int32), num_rows)
    return budget


def columns(gains, cost_ms):
    """Gains as an array, and a cost for each of them."""
    gains = np.array(gains, dtype=np.float64)
    return gains, np.full_like(gains, cost_ms * MS)


# What is best


@given(
    shares=st.lists(st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3), min_size=1, max_size=4),
    base_ms=st.floats(0.1, 50),
    token_ms=st.floats(0.01, 5),
    cost_ms=st.floats(0.01, 5),
    round_ms=st.sampled_from((0.0, 0.3, 3.0)),
    room=st.integers(0, 12),
    target_ms=st.floats(1.0, 100.0),
)
def test_no_other_choice_within_the_bounds_brings_more_tokens_per_time(
    shares, base_ms, token_ms, cost_ms, round_ms, room, target_ms
):
    num_rows = len(shares)
    gains, costs = columns(np.cumprod(np.array(shares), axis=1), cost_ms)
    limits = CoreLimits(target_step_s=target_ms / 4e3, itl_budget_s=1e6)
    budget = make_budget(num_rows, base_ms, token_ms, max_num_tokens=num_rows + room, limits=limits)
    plain_ms, target_ns = base_ms + token_ms * num_rows, budget.target_ns

    def rate(drafts):
        time_ms = plain_ms + round_ms * max(drafts) + cost_ms * sum(drafts)
        return (num_rows + sum(gains[row, :num].sum() for row, num in enumerate(drafts))) / time_ms

    def is_allowed(drafts):
        time_ms = plain_ms + round_ms * max(drafts) + cost_ms * sum(drafts)
        is_short = all(drafts) or time_ms <= 2 * plain_ms
        return not any(drafts) or (sum(drafts) <= room and time_ms * MS <= target_ns and is_short)

    chosen = most_per_time(gains, costs, round_ms * MS, budget).tolist()
    assert is_allowed(chosen)
    # Among whole choices; bounds may leave a better one that skips a row's dearer draft for another's.
    prefixes = [drafts for drafts in product(range(4), repeat=num_rows) if is_allowed(drafts)]
    is_bound = len(prefixes) < 4**num_rows
    best = max(map(rate, prefixes))
    assert rate(chosen) >= best * (1 - 1e-9) or (is_bound and rate(chosen) >= rate([0] * num_rows))


def test_who_drafts_well_gets_more():
    gains, costs = columns([[0.9, 0.8, 0.7, 0.6], [0.5, 0.2, 0.1, 0.0], [0.1, 0.0, 0.0, 0.0]], 0.4)
    assert most_per_time(gains, costs, 0.0, make_budget(3)).tolist() == [4, 1, 0]


def test_a_row_without_drafts_waits_at_most_twice_as_long_for_its_token():
    """Were all rows to draft, they would take more."""
    gains, costs = columns([[0.999**place for place in range(40)], [0.0] * 40], 0.5)
    assert most_per_time(gains, costs, 0.0, make_budget(2)).tolist() == [12, 0]
    assert most_per_time(gains[:1], costs[:1], 0.0, make_budget(1)).tolist() == [40]


@pytest.mark.parametrize("round_ms", [0.2, 5.0, 60.0])
def test_what_a_round_of_drafts_takes_is_learned_in_a_few_steps(round_ms):
    """Of a lookup, of a model and of a slow one, although now and then a row far behind is caught up beside it."""
    speculation = Speculation(1, 4)
    for step in range(24):
        catching_up_ms = 50.0 if step % 8 == 3 else 0.0
        speculation.observe_drafting(4, int((4 * round_ms + catching_up_ms) * MS))
        if step >= 12:
            assert 0.7 * round_ms <= speculation.round_ns / MS <= 1.5 * round_ms
    before = speculation.round_ns
    speculation.observe_drafting(1, int(1000 * MS))
    assert speculation.round_ns <= 1.05 * before


def test_catching_up_says_nothing_of_what_a_round_takes():
    speculation = Speculation(1, 4)
    speculation.observe_drafting(4, int(8 * MS))
    before = speculation.round_ns
    speculation.observe_drafting(0, int(50 * MS))
    assert speculation.round_ns == before > 0


def test_a_drafter_that_was_slow_is_tried_again_some_time():
    speculation, (gains, costs) = Speculation(1, 4), columns([[0.9, 0.8, 0.7, 0.6]], 0.1)
    for _ in range(100):
        speculation.observe_drafting(4, int(4 * 30 * MS))
    tries = 0
    while not most_per_time(gains, costs, speculation.round_ns, make_budget(1)).any():
        speculation.planned(0)
        tries += 1
    assert 300 <= tries <= 3000


# In plans


def drafting(*requests, max_num_drafts=4, limits=None, **options):
    """A harness with rows whose drafts are all right, past their prompts and first tokens."""
    executor = make_executor(max_num_drafts=max_num_drafts, acceptance=lambda num_drafts: num_drafts + 1, **options)
    harness = CoreHarness(executor, limits=limits)
    harness.submit(*requests)
    harness.step()
    return harness


def drafts_of(plan):
    """The drafts of each row of a plan."""
    return plan.num_draft_tokens.tolist() or [0] * len(plan.rows)


def test_rows_draft_where_the_executor_can():
    """As many as it can: they are all right, and cost little."""
    request = make_request(3, 40)
    harness = drafting(request)
    assert [drafts_of(harness.step()) for _ in range(3)] == [[4], [4], [4]]
    harness.finish()
    harness.assert_whole(request)


@pytest.mark.parametrize("options", [{"max_num_drafts": 0}, {"limits": CoreLimits(max_num_draft_tokens=0)}])
def test_nobody_drafts_where_the_executor_cannot_or_the_operator_forbids_it(options):
    harness = drafting(make_request(3, 40), **options)
    assert len(harness.step().num_draft_tokens) == 0


def test_a_request_may_bound_its_drafts_or_switch_them_off():
    requests = [make_request(3, 40, max_num_draft_tokens=most) for most in (None, 2, 0)]
    harness = drafting(*requests)
    assert drafts_of(harness.step()) == [4, 2, 0]


def test_drafters_may_catch_up_for_as_long_as_a_step_takes_without_drafts():
    points = [StepPoint(1, int(5 * MS)), StepPoint(33, int(21 * MS))]
    spares = []
    for most, limits in ((None, CoreLimits()), (None, CoreLimits(target_step_s=0.0075 / 4)), (0, CoreLimits())):
        requests = [make_request(3, 40), make_request(3, 40, max_num_draft_tokens=most)]
        plan = drafting(*requests, step_points=points, limits=limits).step()
        spares.append((plan.predicted_ns / MS, plan.draft_spare_ns / MS))
    plain_ms = 5.5
    (_, of_all), (bounded_ms, of_bounded), (beside_ms, of_one) = spares
    assert of_all == pytest.approx(plain_ms, rel=0.1)
    assert bounded_ms + of_bounded == pytest.approx(7.5, rel=0.1)
    assert beside_ms + of_one == pytest.approx(2 * plain_ms, rel=0.1)
    none = drafting(make_request(3, 40, max_num_draft_tokens=0)).step()
    assert (none.predicted_ns > 0, none.draft_spare_ns, none.min_draft_chance) == (True, 0, 0.0)


def test_the_more_rows_the_likelier_a_draft_must_be_right():
    """Each of them waits for it: what it costs is counted in the tokens that all get in that time."""
    points = [StepPoint(1, int(5 * MS)), StepPoint(33, int(21 * MS))]  # half a millisecond for each token
    chances = []
    for num_rows in (1, 2, 4):
        harness = drafting(*[make_request(3, 40) for _ in range(num_rows)], step_points=points)
        chances.append(harness.step().min_draft_chance)
    assert chances == sorted(chances)
    assert chances[0] == pytest.approx(0.1, abs=0.01)  # until steps were seen that take other times
    assert chances[-1] >= 0.3


def test_under_load_nobody_drafts_and_with_few_rows_everybody_does():
    """A third of the drafts are right, and a token costs an eighth of a small step: eight rows have no use for them."""
    points = [StepPoint(1, int(8 * MS)), StepPoint(33, int(40 * MS))]
    shares = []
    for num_rows in (1, 8):
        random = np.random.default_rng(0)
        executor = make_executor(
            num_blocks=512,
            max_num_drafts=4,
            acceptance=lambda num_drafts, random=random: int(random.choice((1, 1, num_drafts + 1))),
            step_points=points,
        )
        harness = CoreHarness(executor)
        harness.submit(*[make_request(3, 240) for _ in range(num_rows)])
        drafted = [sum(drafts_of(harness.step())) for _ in range(32)]
        shares.append(sum(num > 0 for num in drafted[16:]))
    assert shares[0] >= 8
    assert shares[1] <= 3


def test_now_and_then_a_step_has_no_drafts():
    """So that what steps take without them stays known."""
    harness = drafting(make_request(3, 200), max_num_drafts=1)
    assert [drafts_of(harness.step()) for _ in range(40)] == [[1]] * 32 + [[0]] + [[1]] * 7


def test_steps_whose_drafters_found_nothing_are_such_steps_too():
    speculation = Speculation(1, 4)
    for step in range(100):
        speculation.planned(4)
        speculation.observe_drafting(0 if step % 20 == 0 else 4, 0)
        assert not speculation.is_plain_due


def test_a_draft_must_be_worth_the_tokens_that_its_time_brings_with_drafts():
    chances = []
    for speedup in (1.0, 3.0):
        harness = drafting(make_request(3, 40))
        harness.views.executor(FIRST).speculation.speedup = speedup
        chances.append(harness.step().min_draft_chance)
    assert chances[1] == pytest.approx(3 * chances[0], abs=0.02)


def test_a_request_knows_its_drafts_at_its_end_and_before():
    """Nine tokens: one with the prompt, two steps of four drafts, of which the last has room for two."""
    request = make_request(3, 9)
    harness = drafting(request)
    harness.step()
    assert harness.explain(request).drafts == DraftCounts(4, 4)
    harness.finish()
    assert harness.client.finishes[request.handle].drafts == DraftCounts(6, 6)


def test_what_a_request_has_drafted_goes_with_it_to_the_next_executor_and_the_next_scheduler():
    request = make_request(3, 60, is_resumable=True)
    harness = drafting(request)
    harness.step()
    harness.die()
    harness.step()
    harness.succeed()
    assert harness.explain(request).drafts == DraftCounts(4, 4)


def test_an_estimate_knows_what_drafts_bring():
    harness = drafting(make_request(3, 200))
    assert harness.views.counts(FIRST).draft_speedup == 1.0
    before = harness.views.estimate(make_request(3, 20), 0.0).inter_token_s
    for _ in range(38):
        harness.run_ahead()
        result = harness.results[FIRST][0]
        harness.results[FIRST][0] = replace(result, timings=StepTimings(forward_ns=1_000_000))
        harness.complete()
    assert harness.views.estimate(make_request(3, 20), 0.0).inter_token_s < before / 2
    counts = harness.views.counts(FIRST)
    assert counts.draft_speedup > 2
    # 38 steps of a millisecond; without drafts 4 of 5 tokens would have taken as many more.
    assert counts.draft_saved_ns == pytest.approx(37 * 4 * MS, rel=0.5)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 24)), min_size=1, max_size=8),
    most=st.lists(st.sampled_from((None, 0, 1, 3)), min_size=8, max_size=8),
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(10, 40),
    max_num_tokens=st.integers(6, 24),
    token_ns=st.sampled_from((10_000, 1_000_000, 20_000_000)),
    operators_most=st.sampled_from((2, 7)),
)
@settings(max_examples=settings.default.max_examples // 4)
def test_drafts_never_go_beyond_a_step_and_never_take_from_others(
    shapes, most, seed, num_blocks, max_num_tokens, token_ns, operators_most
):
    """Whatever runs, wherever it ends: all that can decode does, prompts come first, and outputs are as ever."""
    requests = [
        make_request(*shape, max_num_draft_tokens=at_most) for shape, at_most in zip(shapes, most, strict=False)
    ]
    most_of = {
        request.handle: operators_most if at_most is None else min(at_most, operators_most)
        for request, at_most in zip(requests, most, strict=False)
    }
    points = (StepPoint(1, token_ns + 1_000_000), StepPoint(64, 64 * token_ns + 1_000_000))
    harness = CoreHarness(
        make_executor(
            num_blocks=num_blocks,
            max_num_rows=4,
            max_num_batched_tokens=max_num_tokens,
            max_num_drafts=7,
            acceptance=drawn_acceptance(seed),
            step_points=points,
        ),
        limits=CoreLimits(max_num_draft_tokens=operators_most),
    )
    harness.expect_short_outputs()
    harness.submit(*requests)
    while harness.views.num_unfinished():
        rows = harness.views.executor(FIRST).ledger.rows
        decoding, prefilling = (set(index.tolist()) for index in rows.decoding_and_prefilling())
        plan = harness.plan()
        if plan is not None and len(plan.num_draft_tokens):
            assert plan.num_tokens <= max_num_tokens
            assert plan.predicted_ns <= 100e6
            assert (plan.num_scheduled_tokens == 1 + plan.num_draft_tokens).all(), "no prompt is computed beside them"
            assert not prefilling
            assert decoding - {release.row for release in plan.releases} == set(plan.rows.tolist())
            for row, num_drafts in zip(plan.rows.tolist(), plan.num_draft_tokens.tolist(), strict=True):
                assert num_drafts <= most_of[int(rows.handle[row])]
        harness.run()
        harness.complete()
    harness.assert_whole(*requests)


# What rows were worth


def observed(*steps, max_drafts=4):
    """The survival of row 0 after steps that verified so many drafts, so many of them right."""
    acceptance = Acceptance(2, max_drafts)
    for num_verified, num_right in steps:
        acceptance.observe(np.array([0]), np.array([num_verified]), np.array([num_right]))
    return acceptance.survival(np.array([0]), max_drafts)[0]


def test_shares_are_learned_by_place():
    """The first two are always right, the third never is, and of the fourth nothing is known."""
    survival = observed(*[(4, 2)] * 200)
    assert survival[:2].tolist() == pytest.approx([1.0, 1.0], abs=0.03)
    assert survival[2:].tolist() == pytest.approx([0.0, 0.0], abs=0.1)


def test_a_text_that_changes_is_followed():
    assert observed(*[(1, 1)] * 500, *[(1, 0)] * 50)[0] < 0.3
    assert observed(*[(1, 0)] * 500, *[(1, 1)] * 50)[0] > 0.7


def test_who_does_not_draft_is_tried_again_some_time():
    assert observed(*[(4, 0)] * 50)[0] < 0.1
    assert observed(*[(4, 0)] * 50, *[(0, 0)] * 1000)[0] > 0.8


def test_the_next_request_of_a_row_begins_anew():
    acceptance = Acceptance(1, 1)
    before = acceptance.survival(np.array([0]), 1)[0, 0]
    acceptance.observe(np.array([0]), np.array([1]), np.array([0]))
    acceptance.begin(0)
    assert acceptance.survival(np.array([0]), 1)[0, 0] == before


# Against the best fixed number

MAX_DRAFTS = 8


@dataclass(frozen=True)
class Device:
    """What steps take, in milliseconds: `round_ms` for each draft of the row that has the most."""

    base_ms: float
    row_ms: float
    draft_ms: float
    round_ms: float = 0.0
    warm_up_ms: float | None = None  # of a token; as a draft, unless given

    def points(self):
        """What it says of itself when it has warmed up."""
        token_ms = self.draft_ms if self.warm_up_ms is None else self.warm_up_ms
        return [StepPoint(count, int((self.base_ms + token_ms * count) * MS)) for count in (1, 64, 512)]

    def forward_ms(self, num_rows, num_drafts):
        return self.base_ms + self.row_ms * num_rows + self.draft_ms * num_drafts


DEVICES = {
    "CPU": Device(4.0, 1.0, 1.0),
    "CPU whose rows read long contexts": Device(4.0, 1.5, 1.0),
    "verifying takes longer than it seemed": Device(4.0, 1.0, 1.5, warm_up_ms=1.0),
    "GPU": Device(10.0, 0.05, 0.05),
    "GPU with a draft model": Device(10.0, 0.05, 0.05, round_ms=1.0),
    "slow drafter": Device(8.0, 0.1, 0.1, round_ms=4.0),
}
SHARES = {
    "hopeless": np.full(MAX_DRAFTS, 0.05),
    "usual": np.full(MAX_DRAFTS, 0.7),
    "good": np.full(MAX_DRAFTS, 0.9),
    "copies": np.full(MAX_DRAFTS, 0.98),
    "worse by place": 0.9 * 0.8 ** np.arange(MAX_DRAFTS),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_each_with_each", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_policy_is_within_a_twentieth_of_the_best_fixed_number_of_drafts(device, is_each_with_each):
    """By what it has learned itself, of any acceptance, from one row to many: tokens per time, in expectation."""
    rows = (1, 8, 64, 256)
    for place, (name, shares) in enumerate(SHARES.items()):
        for num_rows in rows if is_each_with_each else (rows[place % len(rows)],):
            reached, best = compare(DEVICES[device], np.tile(shares, (num_rows, 1)))
            assert reached >= 0.95 * best, f"{name} drafts of {num_rows} rows: {reached / best:.3f}"


@pytest.mark.parametrize("device", DEVICES)
def test_where_rows_differ_it_beats_every_number_that_is_the_same_for_all(device):
    for num_rows in (2, 16, 64):
        halves = np.where(np.arange(num_rows) % 2, 0.05, 0.95)
        reached, best = compare(DEVICES[device], np.tile(halves[:, np.newaxis], (1, MAX_DRAFTS)))
        assert reached >= 0.97 * best, f"{num_rows} rows: {reached / best:.3f}"


def compare(device, shares):
    """Return tokens per millisecond of the policy, once it has seen some steps, and of the best fixed number.

    `shares`, [num_rows, MAX_DRAFTS]: how likely each draft is right if those before it are.
    """
    random = np.random.default_rng(1)
    num_rows, num_steps = len(shares), 400 if len(shares) < 256 else 200
    rows, positions = np.arange(num_rows), np.full(num_rows, 300, dtype=np.int32)
    most, survival = np.full(num_rows, MAX_DRAFTS, dtype=np.int32), np.cumprod(shares, axis=1)
    model, speculation = StepTimeModel(device.points()), Speculation(num_rows, MAX_DRAFTS)
    view = SimpleNamespace(rows=SimpleNamespace(num_scheduled=positions), speculation=speculation)
    num_tokens = time_ms = 0.0
    for step in range(num_steps):
        budget = StepBudget(model, NO_BOUNDS, 1 << 20)
        budget.add_decodes(positions, num_rows)
        drafts, _ = best_drafts(view, rows, most, budget)
        num_drafts, depth = int(drafts.sum()), int(drafts.max())
        speculation.planned(num_drafts)
        forward_ms, drafting_ms = device.forward_ms(num_rows, num_drafts), device.round_ms * depth
        if step >= num_steps // 2:
            num_tokens += num_rows + (survival * (np.arange(MAX_DRAFTS) < drafts[:, np.newaxis])).sum()
            time_ms += forward_ms + drafting_ms
        right = np.cumprod(random.random(shares.shape) < shares, axis=1).sum(axis=1)
        speculation.acceptance.observe(rows, drafts, np.minimum(right, drafts))
        took_ns = int(forward_ms * MS * random.normal(1.0, 0.03))
        model.observe(num_rows + num_drafts, 301 * (num_rows + num_drafts), took_ns, num_drafts)
        if num_drafts:
            speculation.observe_drafting(depth, int(drafting_ms * MS))
    fixed = [
        (num_rows + survival[:, :number].sum())
        / (device.forward_ms(num_rows, num_rows * number) + device.round_ms * number)
        for number in range(MAX_DRAFTS + 1)
    ]
    return num_tokens / time_ms, max(fixed)

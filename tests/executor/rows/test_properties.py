"""Rows under random plans: sound ones give every request the tokens it would have alone, others change nothing."""

from collections import Counter, deque
from copy import deepcopy
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafting.drafters import KnowingDrafter, UselessDrafter
from executor_rig.plans import int32
from executor_rig.random_plans import LIMITS, FragileRunner, Request, Scheduler
from executor_rig.spoilt_plans import Spoiler
from executor_rig.stepping import SteppingEngine, are_seen
from paceline_executor.errors import PlanError, PlanFault, StepFailedError
from paceline_executor.rows.table import RowTable


@pytest.fixture(scope="module", autouse=True)
def not_on_the_twin(seen_or_hidden):
    """Its random plans are elsewhere: here a run has a runner each."""
    if seen_or_hidden == "twin":
        pytest.skip("random plans on the twin are test_device_runner's and test_drafts_change_no_token's")


COMMON_START = list(range(12))
MAX_PLANS = 2000
MAX_DRAFTS = 5


class Run:
    """A scheduler and an engine until all requests are done, with a number of plans in between."""

    def __init__(self, wanted, num_ahead, drafting, seed):
        self.random = Random(seed)  # noqa: S311  # reproducible on purpose
        self.runner = FragileRunner(LIMITS.num_blocks, LIMITS.block_size, LIMITS.vocab_size)
        self.everyone = [
            Request(f"request-{i}", COMMON_START[:num_common] + own, max_tokens, end_token)
            for i, (num_common, own, max_tokens, end_token) in enumerate(wanted)
        ]
        self.drafting = drafting = drafting if can_draft() else "nobody"
        self.limits = replace(LIMITS, max_num_draft_tokens=0 if drafting == "nobody" else MAX_DRAFTS)
        if drafter := self.drafter(drafting):
            self.runner.draft_by(drafter)
        self.engine = SteppingEngine(RowTable(self.limits), self.runner)
        self.scheduler = Scheduler(self.random, self.everyone, self.limits.max_num_draft_tokens)
        self.num_ahead = num_ahead
        self.in_flight = deque()

    def drafter(self, kind):
        """One that is always right, errs at times or always, or is of no use; or the production's."""
        answers = [request.prompt + request.reference() for request in self.everyone]
        chance = deepcopy(self.random)
        match kind:
            case "right":
                return KnowingDrafter(answers, lambda num_wanted: num_wanted)
            case "erring":
                return KnowingDrafter(answers, lambda num_wanted: chance.randint(0, num_wanted))
            case "wrong":
                return KnowingDrafter(answers, lambda _: 0)
            case "useless":
                return UselessDrafter(chance, LIMITS.vocab_size)
        return None

    def plans(self):
        """One sound plan after another, each to be executed, or to be followed by `recover`."""
        for _ in range(MAX_PLANS):
            if self.scheduler.is_done:
                return
            while len(self.in_flight) < self.num_ahead:
                self.in_flight.append(self.scheduler.plan())
            yield self.in_flight.popleft()

    def execute(self, planned):
        """Execute a plan and let the scheduler know."""
        result = self.engine.execute(planned)
        self.scheduler.take(planned, result)
        return result

    def recover(self):
        """Begin anew from the snapshot."""
        self.in_flight.clear()
        self.scheduler.rebuild(self.engine.table.states())

    def assert_everyone_was_served(self):
        """Every request has the tokens it would have alone, and nothing is left."""
        assert [request.output for request in self.everyone] == [request.reference() for request in self.everyone]
        assert self.engine.table.num_rows_in_use == 0
        assert self.engine.table.num_granted_blocks == 0


wanted = st.tuples(
    st.integers(0, 11), st.lists(st.integers(0, 49), min_size=1, max_size=5), st.integers(1, 8), st.integers(0, 49)
)
drafters = st.sampled_from(("nobody", "right", "erring", "erring", "wrong", "useless", "lookup"))
runs = st.builds(Run, st.lists(wanted, min_size=2, max_size=6), st.integers(1, 4), drafters, st.integers(0, 2**32))


@pytest.mark.hypothesis
def test_any_sound_schedule_gives_every_request_its_own_tokens():
    reached = Counter()

    @given(runs)
    def everyone_is_served(run):
        for planned in run.plans():
            result = run.execute(planned)
            granted, verified = int(planned.num_draft_tokens.sum()), int(result.num_draft_tokens.sum())
            accepted = int(np.maximum(result.num_accepted - 1, 0).sum())
            reached.update({"not found": granted - verified, "wrong": verified - accepted, "accepted": accepted})
        run.assert_everyone_was_served()

    everyone_is_served()
    for outcome in ("not found", "wrong", "accepted") if can_draft() else ():
        assert reached[outcome] >= settings.default.max_examples, reached


@pytest.mark.hypothesis
def test_a_failed_step_leaves_no_trace_but_what_it_may_have_overwritten():
    """Wherever it fails: rows stand as before, cut where a block was granted, and go on from there."""
    reached = Counter()

    @settings(max_examples=settings.default.max_examples // 2)
    @given(runs)
    def every_failed_step_is_taken_back(run):
        for planned in run.plans():
            if run.random.random() < 0.3:
                run.runner.fails_in = run.random.choice(["copy", "forward pass", "output"])
            place, table = run.runner.fails_in, run.engine.table
            before, tags, num_shared = table.states(), _tags(table), table._columns.num_shared.copy()
            try:
                run.execute(planned)
            except StepFailedError:
                granted = set(planned.grants.block_ids.tolist())
                expected = [_cut(state, granted) for state in before]
                assert sorted(map(repr, table.states())) == sorted(map(repr, expected))
                assert all(table._columns.num_shared == np.minimum(num_shared, table._columns.num_blocks))
                assert _tags(table) == {block: key for block, key in tags.items() if block not in granted}
                reached[place] += 1
                reached["released"] += bool(planned.releases)
                reached["placed"] += bool(planned.new_requests)
                reached["cut"] += list(map(repr, before)) != list(map(repr, expected))
                run.recover()
        run.assert_everyone_was_served()

    every_failed_step_is_taken_back()
    for branch in ("copy", "forward pass", "output", "released", "placed", "cut"):
        assert reached[branch] >= 3, reached


@pytest.mark.hypothesis
def test_a_plan_is_applied_wholly_or_not_at_all():
    """Sound plans with a mistake or two, at any time: refused without a trace, or applied to the last cell."""
    reached = Counter()

    @given(runs)
    def every_spoilt_plan_is_applied_wholly_or_not_at_all(run):
        for planned in run.plans():
            if run.random.random() < 0.75:
                spoilt = Spoiler(run.limits, run.random).spoil(planned)
                trial = SteppingEngine(deepcopy(run.engine.table), run.runner.twin())
                try:
                    trial.execute(spoilt)
                except PlanError as error:
                    assert _picture(trial.table) == _picture(run.engine.table)
                    reached[error.fault] += 1
                    run.engine = SteppingEngine(trial.table, run.runner)  # must do for the rest of the run
                else:
                    _assert_applied(trial.table, spoilt)
                    reached["applied, rows ran"] += bool(spoilt.rows.size)
            run.execute(planned)
        run.assert_everyone_was_served()

    every_spoilt_plan_is_applied_wholly_or_not_at_all()
    of_rows = set(PlanFault) - {PlanFault.OUT_OF_BOUNDS}  # which the codec refuses, before rows see it
    if not can_draft():
        of_rows -= {PlanFault.DRAFTS}
    assert {"applied, rows ran", *of_rows} - set(+reached) == set(), reached


def can_draft():
    """Whether engines verify drafts: those of devices that keep rows do not."""
    return are_seen()


def _tags(table):
    tags = table.tags()
    return {block: tags.keys[16 * i : 16 * i + 16] for i, block in enumerate(tags.block_ids.tolist())}


def _cut(state, lost):
    """A state without its blocks from the first lost one on, and without what is computed in them."""
    blocks = state.block_ids.tolist()
    num_left = next((i for i, block in enumerate(blocks) if block in lost), len(blocks))
    num_computed = min(state.num_computed_tokens, num_left * LIMITS.block_size)
    return replace(state, block_ids=int32(blocks[:num_left]), num_computed_tokens=num_computed)


def _picture(table):
    """Everything a table knows, what it shows to nobody included."""
    columns = [array.tolist() for array in table._columns._state()]
    counts = table._block_tables._num_holders.tolist(), table._records.num_bytes
    return sorted(map(repr, table.states())), _tags(table), columns, counts, table._grant_hash, table._occupants._rows


def _assert_applied(table, applied):
    """All parts of a plan took effect, and no block can be written by two rows."""
    columns = table._columns
    on_rows = {state.row: state.record_id for state in table.states() if state.row is not None}
    records = {state.record_id for state in table.states() if state.row is None}
    assert all(release.row not in on_rows for release in applied.releases)
    assert records.isdisjoint(applied.forget)
    assert {p.row: p.record_id for p in applied.new_requests}.items() <= on_rows.items()
    given = _cells(applied.grants) | _cells(applied.shared)
    assert {cell: columns.block_table[cell] for cell in given} == given
    tables = {row: table._block_tables.blocks_of(row).tolist() for row in on_rows}
    writable = [block for row, blocks in tables.items() for block in blocks[columns.num_shared[row] :]]
    assert len(writable) == len(set(writable))
    assert table.num_granted_blocks == len({block for blocks in tables.values() for block in blocks})


def _cells(grants):
    places = zip(grants.rows.tolist(), grants.indices.tolist(), strict=True)
    return dict(zip(places, grants.block_ids.tolist(), strict=True))

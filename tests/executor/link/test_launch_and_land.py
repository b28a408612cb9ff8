"""Steps launched before those before them have landed: everything ends as if they had been executed one by one."""

from collections import Counter, deque
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from executor_rig.hash_runner import HashRunner, continuation
from executor_rig.hiding_runner import MAX_IN_FLIGHT, HidingRunner
from executor_rig.plans import int32, placement, plan
from executor_rig.random_plans import LIMITS, FragileRunner, Request, Scheduler
from executor_rig.stepping import SteppingEngine, outcome_of
from paceline_executor.errors import PlanError, PlanFault, StepFailedError
from paceline_executor.limits import RowLimits
from paceline_executor.link.engine import Engine
from paceline_executor.rows.table import RowTable

WIDE = RowLimits(num_rows=4, max_model_len=24, max_num_batched_tokens=32, num_blocks=24, block_size=4, vocab_size=1000)
KEY = bytes(range(16))


def picture(table):
    """Everything a table knows, what it shows to nobody included."""
    columns = [array.tolist() for array in table._columns._state()]
    counts = table._block_tables._num_holders.tolist(), table._records.num_bytes
    rows = dict(table._occupants._rows)
    return list(map(repr, table.states())), repr(table.tags()), columns, counts, table._grant_hash, rows


def assert_bounds_hold(table):
    """Never below the truth, and the truth itself when nothing is in flight."""
    columns = table._columns
    assert (columns.known_bound >= columns.num_known).all()
    assert (columns.computed_bound >= columns.num_computed).all()
    if not table._in_flight:
        assert columns.known_bound.tolist() == columns.num_known.tolist()
        assert columns.computed_bound.tolist() == columns.num_computed.tolist()
        assert not columns.is_closed.any()


class Pair:
    """The same plans on two executors: one launches ahead of a device that hides, the other executes one by one."""

    def __init__(self, wanted, num_ahead, seed):
        self.random = Random(seed)  # noqa: S311  # reproducible on purpose
        self.runners = [FragileRunner(LIMITS.num_blocks, LIMITS.block_size, LIMITS.vocab_size) for _ in range(2)]
        self.hiding = HidingRunner(self.runners[0], seed)
        self.ahead = Engine(RowTable(LIMITS), self.hiding)
        self.one_by_one = SteppingEngine(RowTable(LIMITS), self.runners[1])
        requests = [Request(f"request-{i}", *request) for i, request in enumerate(wanted)]
        self.scheduler = Scheduler(self.random, requests)
        self.num_ahead = num_ahead
        self.in_flight = deque()  # plan, ticket, where it fails

    @property
    def table(self):
        """The rows of the executor that launches ahead."""
        return self.ahead.table

    def run(self, *, failing=0.0, reached):
        """Plan, launch and land at random until every request is done, with failures at launch."""
        for _ in range(2000):
            if self.scheduler.is_done and not self.in_flight:
                return
            if len(self.in_flight) < self.num_ahead and self.random.random() < 0.75:
                self.launch(self.scheduler.plan(), failing, reached)
            elif self.in_flight:
                self.land(reached)
            assert_bounds_hold(self.table)

    def launch(self, planned, failing, reached):
        """Launch a plan; where it needs what has not landed, that lands first."""
        while not self.ahead.can_launch(planned):
            reached["waited"] += 1
            if not self.land(reached):
                return  # the plan is of an epoch that is over
        self.runners[0].fails_in = fails_in = (
            self.random.choice(["copy", "forward pass"]) if self.random.random() < failing else ""
        )
        self.in_flight.append((planned, self.ahead.launch(planned), fails_in))
        self.runners[0].fails_in = ""
        reached["in flight", len(self.in_flight)] += 1

    def land(self, reached):
        """Land the oldest step here and execute it there; says whether it did not fail."""
        planned, ticket, self.runners[1].fails_in = self.in_flight.popleft()
        result = outcome_of(lambda: self.ahead.collect(ticket))
        expected = outcome_of(lambda: self.one_by_one.execute(planned))
        self.runners[1].fails_in = ""
        assert repr(result) == repr(expected)
        if result is None:
            reached["failed", len(self.in_flight)] += 1
            self.in_flight.clear()
        else:
            self.scheduler.take(planned, result)
        if not self.in_flight:
            assert picture(self.table) == picture(self.one_by_one.table)
        if result is None:
            self.scheduler.rebuild(self.table.states())
        return result is not None


wanted = st.tuples(st.lists(st.integers(0, 49), min_size=1, max_size=10), st.integers(1, 8), st.integers(0, 49))
pairs = st.builds(Pair, st.lists(wanted, min_size=2, max_size=6), st.sampled_from([4, 4, 3, 2]), st.integers(0, 2**32))


@pytest.mark.hypothesis
@pytest.mark.parametrize("failing", [0.0, 0.15])
def test_steps_launched_ahead_end_as_if_executed_one_by_one(failing):
    reached = Counter()

    @settings(max_examples=settings.default.max_examples // 2)
    @given(pairs)
    @example(Pair([([0] * 3, 7, 0), ([0] * 2, 5, 0), ([0] * 10, 3, 0), ([39, 36, 16, 38, 41, 11, 27], 6, 31)], 4, 0))
    def both_executors_end_alike(pair):
        pair.run(failing=failing, reached=reached)
        assert pair.scheduler.is_done
        assert [request.output for request in pair.scheduler.requests.values()] == [
            request.reference() for request in pair.scheduler.requests.values()
        ]

    both_executors_end_alike()
    assert reached["in flight", MAX_IN_FLIGHT] >= 20, reached
    assert not failing or reached["failed", 0] >= 5, reached


@pytest.mark.hypothesis
def test_what_is_launched_and_taken_back_was_never_there():
    reached = Counter()

    @settings(max_examples=settings.default.max_examples // 2)
    @given(pairs)
    def taking_back_leaves_no_trace(pair):
        for _ in range(40):
            while pair.in_flight:
                pair.land(reached)
            if pair.scheduler.is_done:
                return
            before = picture(pair.table)
            launched = []
            while len(launched) < pair.num_ahead:
                planned = pair.scheduler.plan()
                if not pair.table.can_launch(planned):
                    break
                launched.append(planned)
                pair.table.launch(planned, 0)
            undone = [step.undo for step in pair.table._in_flight]
            for undo in reversed(undone):
                undo.roll_back()
            pair.table._in_flight.clear()
            assert picture(pair.table) == before
            reached[len(launched)] += 1
            for planned in launched:
                pair.launch(planned, 0.0, reached)

    taking_back_leaves_no_trace()
    assert reached[MAX_IN_FLIGHT] >= 20, reached


@dataclass
class Ahead:
    """An engine whose device hides what it computes, and the runner inside."""

    engine: Engine
    runner: HashRunner
    hiding: HidingRunner

    def launch(self, *arguments, **contents):
        """Launch a plan."""
        return self.engine.launch(plan(*arguments, **contents))


@pytest.fixture
def ahead():
    """Four free rows, and room for four steps in flight."""
    runner = HashRunner(WIDE.num_blocks, WIDE.block_size, WIDE.vocab_size)
    hiding = HidingRunner(runner)
    return Ahead(Engine(RowTable(WIDE), hiding), runner, hiding)


def reference(prompt, num_tokens):
    """The output a prompt must give."""
    return continuation(prompt, num_tokens, WIDE.vocab_size)


def tokens_of(engine, tickets):
    """The tokens of steps that land now, one after another."""
    return [engine.collect(ticket).token_ids.tolist() for ticket in tickets]


def test_a_row_at_its_last_token_is_left_out_of_later_steps(ahead):
    """It ends there, or has ended before: nothing is launched for it."""
    place = [placement(0, [5, 6], max_tokens=2)]
    tickets = [ahead.launch([(0, 2)], place=place, grants=[(0, 0, 2), (0, 1, 3)])]
    tickets += [ahead.launch([(0, 1)], step_id=step_id) for step_id in (2, 3)]
    assert tickets[2].handle is None
    assert tokens_of(ahead.engine, tickets) == [[token] for token in reference([5, 6], 2)] + [[]]


def test_a_record_holds_the_tokens_of_steps_that_landed_after_the_release_was_launched(ahead):
    tickets = [ahead.launch([(0, 2)], place=[placement(0, [5, 6])], grants=[(0, 0, 2)])]
    tickets += [ahead.launch([(0, 1)], step_id=2), ahead.launch(step_id=3, preempt=[0])]
    with pytest.raises(PlanError) as refusal:
        ahead.launch([(0, 1)], step_id=4)
    assert refusal.value.fault is PlanFault.ROW_NOT_IN_USE
    assert ahead.engine.table.num_granted_blocks == 0
    tokens_of(ahead.engine, tickets)

    (record,) = ahead.engine.table.states()
    assert (record.row, record.output_token_ids.tolist()) == (None, reference([5, 6], 2))


def test_a_plan_that_goes_beyond_what_can_be_known_is_refused(ahead):
    """By the bound: one more than all steps in flight may bring."""
    tickets = [ahead.launch([(0, 2)], place=[placement(0, [5, 6])], grants=[(0, 0, 2)])]
    with pytest.raises(PlanError) as refusal:
        ahead.launch([(0, 2)], step_id=2)
    assert refusal.value.fault is PlanFault.TOKENS_UNKNOWN
    tickets.append(ahead.launch([(0, 1)], step_id=2))
    assert tokens_of(ahead.engine, tickets) == [[token] for token in reference([5, 6], 2)]


WAITING = {
    "a row that is being released": {"place": [placement(0, [1], name="b")]},
    "a request that is being released": {"place": [placement(2, [1], name="request-0")]},
    "more tokens than have landed": {"finish": [(1, 1)]},
}


@pytest.mark.parametrize("needed", WAITING)
def test_a_plan_waits_for_what_only_a_landing_can_tell(ahead, needed):
    place = [placement(row, [row + 1]) for row in (0, 1)]
    tickets = [ahead.launch([(0, 1), (1, 1)], place=place, grants=[(row, 0, row) for row in (0, 1)])]
    tickets.append(ahead.launch(step_id=2, preempt=[0]))
    waiting = plan(step_id=3, **WAITING[needed])
    assert not ahead.engine.can_launch(waiting)
    tokens_of(ahead.engine, tickets)
    assert ahead.engine.can_launch(waiting)
    ahead.engine.collect(ahead.engine.launch(waiting))


def test_rules_that_count_tokens_nobody_here_knows_hold_at_each_of_them(ahead):
    """The device keeps them: a row that may not draw a token twice in a row is launched ahead as any other."""
    sampling = replace(placement(0, [5]).sampling, allowed_token_ids=(11, 12))
    place = [placement(0, [5, 6], sampling=sampling, bad_words=((11, 11), (12, 12)))]
    tickets = [ahead.launch([(0, 2)], place=place, grants=[(0, 0, 2), (0, 1, 3)])]
    tickets += [ahead.launch([(0, 1)], step_id=step_id) for step_id in (2, 3, 4)]
    drawn = [token for (token,) in tokens_of(ahead.engine, tickets)]
    assert drawn in ([11, 12, 11, 12], [12, 11, 12, 11])


def test_a_step_that_cannot_land_takes_those_behind_it_with_it(ahead, monkeypatch):
    """In reverse: rows stand as before the first of them."""
    table = ahead.engine.table
    ahead.engine.collect(ahead.launch([(0, 2)], place=[placement(0, [5, 6])], grants=[(0, 0, 2), (0, 1, 3)]))
    before = picture(table)
    tickets = [ahead.launch([(0, 1)], step_id=2)]
    tickets.append(ahead.launch([(0, 1), (1, 1)], step_id=3, place=[placement(1, [7])], grants=[(1, 0, 4)]))
    tickets.append(ahead.launch(step_id=4, preempt=[0], tags=[(9, KEY)]))
    wait = ahead.hiding.wait
    monkeypatch.setattr(ahead.hiding, "wait", lambda handle: replace(wait(handle), num_accepted=int32([])))
    with pytest.raises(StepFailedError):
        ahead.engine.collect(tickets[0])

    assert picture(table) == before
    monkeypatch.undo()
    assert tokens_of(ahead.engine, [ahead.launch([(0, 1)], step_id=2)]) == [[reference([5, 6], 2)[1]]]

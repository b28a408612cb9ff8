"""Rows under random plans: sound ones give every request the tokens it would have alone, others change nothing."""

from collections import deque
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_executor.errors import PlanError, StepFailedError
from paceline_executor.link.engine import Engine
from paceline_executor.rows.limits import RowLimits
from paceline_executor.rows.plan import RowFinish
from paceline_executor.rows.table import RowTable
from paceline_executor.testing.hash_runner import HashRunner, next_token
from paceline_executor.testing.plans import placement, plan

LIMITS = RowLimits(num_rows=3, max_model_len=24, max_num_batched_tokens=16, num_blocks=14, block_size=4, vocab_size=50)


@dataclass
class Request:
    """What a scheduler knows of a request, and what it assumes while results are on their way."""

    name: str
    prompt: list[int]
    max_tokens: int
    end_token: int
    output: list[int] = field(default_factory=list)
    finish: int = RowFinish.GOES_ON
    num_computed: int = 0  # once all planned steps are done
    num_expected: int = 0  # output tokens once all planned steps are done
    blocks: list[int] = field(default_factory=list)

    def reference(self):
        """Its output, computed without rows and blocks."""
        tokens = list(self.prompt)
        while True:
            offset = len(tokens) - len(self.prompt)
            tokens.append(next_token(tokens, 0, offset, LIMITS.vocab_size))
            if tokens[-1] == self.end_token or offset + 1 == self.max_tokens or len(tokens) == LIMITS.max_model_len:
                return tokens[len(self.prompt) :]

    @property
    def num_ahead(self):
        """How many known tokens no planned step computes yet."""
        return len(self.prompt) + self.num_expected - self.num_computed


class Scheduler:
    """A scheduler that plans ahead of results at random, within the rules; it also preempts at random."""

    def __init__(self, random: Random, requests: list[Request]) -> None:
        self.random = random
        self.requests = {request.name: request for request in requests}
        self.waiting = list(requests)
        self.running: dict[int, Request] = {}
        self.leaving: dict[int, Request] = {}
        self.free_blocks = list(range(LIMITS.num_blocks))
        self.step_id = 0
        self.epoch = 1

    @property
    def is_done(self):
        """Whether every request has finished and left."""
        return not (self.waiting or self.running or self.leaving)

    def plan(self):
        """The next plan."""
        self.step_id += 1
        finish, preempt = self._release()
        free_rows = [row for row in range(LIMITS.num_rows) if row not in {**self.running, **self.leaving}]
        place = [self._place(row) for row in free_rows if self.waiting]
        grants, scheduled = self._schedule()
        return plan(
            scheduled,
            step_id=self.step_id,
            epoch=self.epoch,
            place=place,
            grants=grants,
            preempt=preempt,
            finish=finish,
        )

    def take(self, planned, result):
        """A result: tokens of rows, and the confirmation that rows have left."""
        tokens = iter(result.token_ids.tolist())
        for row, count, finish in zip(result.rows.tolist(), result.num_accepted, result.finishes, strict=True):
            request = {**self.running, **self.leaving}[row]
            request.output += [next(tokens) for _ in range(count)]
            request.finish = int(finish)
        for release in planned.releases:
            request = self.leaving.pop(release.row)
            if not request.finish:
                self.waiting.append(request)

    def rebuild(self, states):
        """What a successor does: everything from the snapshot."""
        self.running, self.leaving, self.step_id, self.epoch = {}, {}, 0, self.epoch + 1
        used = {block for state in states for block in state.block_ids.tolist()}
        self.free_blocks = [block for block in range(LIMITS.num_blocks) if block not in used]
        for state in states:
            request = self.requests[state.record_id.request_id]
            request.output, request.blocks = state.output_token_ids.tolist(), state.block_ids.tolist()
            request.num_expected, request.num_computed = len(request.output), state.num_computed_tokens
            request.finish = int(state.finish)
            if state.row is not None:
                self.running[state.row] = request
        running = [request.name for request in self.running.values()]
        self.waiting = [r for r in self.requests.values() if r.name not in running and not r.finish]

    def _release(self):
        finish, preempt = [], []
        for row, request in list(self.running.items()):
            if request.finish:
                finish.append((row, len(request.output)))
            elif self.random.random() < 0.05:
                preempt.append(row)
            else:
                continue
            self.leaving[row] = self.running.pop(row)
            self.free_blocks += request.blocks
            request.blocks = []
        return finish, preempt

    def _place(self, row):
        request = self.waiting.pop(0)
        request.num_computed, request.num_expected, request.blocks = 0, len(request.output), []
        self.running[row] = request
        return placement(
            row,
            request.prompt,
            name=request.name,
            output=request.output,
            max_tokens=request.max_tokens,
            end_token_ids=[request.end_token],
        )

    def _schedule(self):
        grants, scheduled, budget = [], [], LIMITS.max_num_batched_tokens
        for row, request in self.running.items():
            is_over = request.num_expected >= request.max_tokens or request.num_ahead == 0
            num_tokens = self.random.randint(0, min(request.num_ahead, budget))
            needed = -(-(request.num_computed + num_tokens) // LIMITS.block_size) - len(request.blocks)
            if is_over or num_tokens == 0 or needed > len(self.free_blocks):
                continue
            for _ in range(needed):
                grants.append((row, len(request.blocks), self.free_blocks[0]))
                request.blocks.append(self.free_blocks.pop(0))
            request.num_expected += num_tokens == request.num_ahead
            request.num_computed += num_tokens
            budget -= num_tokens
            scheduled.append((row, num_tokens))
        return grants, scheduled


requests = st.tuples(
    st.lists(st.integers(0, 49), min_size=1, max_size=14),
    st.integers(1, 8),
    st.integers(0, 49),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(requests, min_size=1, max_size=6), st.integers(1, 4), st.booleans(), st.integers(0, 2**32))
def test_any_sound_schedule_gives_every_request_its_own_tokens(wanted, num_ahead, has_faults, seed):
    """Chunks, batches, plans ahead of results, preemptions, failed steps and recovery from the snapshot."""
    everyone = [Request(f"request-{i}", *fields) for i, fields in enumerate(wanted)]
    random = Random(seed)  # noqa: S311  # reproducible on purpose
    runner = HashRunner(LIMITS.num_blocks, LIMITS.block_size, LIMITS.vocab_size)
    engine = Engine(RowTable(LIMITS), runner)
    scheduler = Scheduler(random, everyone)
    in_flight = deque()
    for _ in range(2000):
        if scheduler.is_done:
            break
        while len(in_flight) < num_ahead:
            in_flight.append(scheduler.plan())
        if has_faults and random.random() < 0.1:
            runner.fail_next = RuntimeError("device lost")
        planned = in_flight.popleft()
        try:
            scheduler.take(planned, engine.execute(planned).result)
        except StepFailedError:
            in_flight.clear()
            scheduler.rebuild(engine.table.states())

    assert [request.output for request in everyone] == [request.reference() for request in everyone]
    assert engine.table.num_rows_in_use == 0
    assert engine.table.num_granted_blocks == 0


small = st.integers(-1, 4)
block = st.integers(-1, 14)
columns = st.lists(st.tuples(small, st.integers(-1, 6), block), max_size=3)
placements = st.builds(
    lambda row, length, name, cached: placement(row, [1] * length, name=name, num_cached_tokens=cached),
    st.integers(0, 3),
    st.integers(0, 10),
    st.sampled_from("abc"),
    st.integers(0, 9),
)
any_plans = st.builds(
    lambda scheduled, place, grants, shared, copies, tags, preempt, finish, forget: plan(
        scheduled,
        place=place,
        grants=grants,
        shared=shared,
        copies=copies,
        tags=[(block, bytes([key]) * 16) for block, key in tags],
        preempt=preempt,
        finish=finish,
        forget=forget,
    ),
    st.lists(st.tuples(small, st.integers(-1, 10)), max_size=3),
    st.lists(placements, max_size=2),
    columns,
    columns,
    st.lists(st.tuples(block, block), max_size=1),
    st.lists(st.tuples(block, st.integers(0, 2)), max_size=2),
    st.lists(st.integers(0, 3), max_size=1),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=1),
    st.lists(st.sampled_from("abc"), max_size=1),
)


def _picture(table):
    tags = table.tags()
    states = sorted(repr(state) for state in table.states())
    return states, tags.block_ids.tolist(), tags.keys, table.num_granted_blocks, table.num_records


@settings(max_examples=150, deadline=None)
@given(st.lists(any_plans, max_size=12))
def test_a_plan_is_applied_wholly_or_not_at_all(plans):
    """Whatever comes: a refused plan leaves no trace, and no block is ever written by two rows."""
    engine = Engine(RowTable(LIMITS), HashRunner(LIMITS.num_blocks, LIMITS.block_size, LIMITS.vocab_size))
    for wanted in plans:
        before = _picture(engine.table)
        try:
            engine.execute(wanted)
        except PlanError:
            assert _picture(engine.table) == before
        tables = [state.block_ids.tolist() for state in engine.table.states()]
        assert engine.table.num_granted_blocks == len({block for blocks in tables for block in blocks})


@settings(max_examples=60, deadline=None)
@given(st.lists(any_plans, max_size=8), any_plans)
def test_a_failed_step_can_be_taken_back_at_any_time(plans, failing):
    """All that may be missing afterwards is what the failed step could have overwritten."""
    runner = HashRunner(LIMITS.num_blocks, LIMITS.block_size, LIMITS.vocab_size)
    engine = Engine(RowTable(LIMITS), runner)
    for wanted in plans:
        try:
            engine.execute(wanted)
        except PlanError:
            continue
    before = {state.record_id: state for state in engine.table.states()}
    runner.fail_next = RuntimeError("device lost")
    try:
        engine.execute(failing)
    except PlanError:
        return
    except StepFailedError:
        after = {state.record_id: state for state in engine.table.states()}
    else:
        return

    granted = set(failing.grants.block_ids.tolist())
    assert before.keys() == after.keys()
    for record_id, state in before.items():
        blocks = after[record_id].block_ids.tolist()
        assert not granted & set(blocks)
        assert blocks == state.block_ids.tolist()[: len(blocks)]
        is_whole = not granted & set(state.block_ids.tolist())
        if is_whole:
            assert repr(after[record_id]) == repr(state)
    assert not granted & set(engine.table.tags().block_ids.tolist())

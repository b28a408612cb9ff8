"""Rows under random plans: sound ones give every request the tokens it would have alone, others change nothing."""

from collections import Counter, deque
from copy import deepcopy
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan.hashes import HASH_START, grant_hash
from paceline.plan.values import RowFinish
from paceline_executor.errors import PlanError, PlanFault, StepFailedError
from paceline_executor.link.engine import Engine
from paceline_executor.rows.limits import RowLimits
from paceline_executor.rows.table import RowTable
from paceline_executor.testing.hash_runner import HashRunner, next_token
from paceline_executor.testing.plans import int32, placement, plan
from paceline_executor.testing.spoilt_plans import Spoiler

LIMITS = RowLimits(num_rows=3, max_model_len=24, max_num_batched_tokens=16, num_blocks=14, block_size=4, vocab_size=50)
COMMON_START = list(range(12))
MAX_PLANS = 2000


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
    is_last_block_shared: bool = False  # it must be copied before this request writes to it

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

    def num_in_common(self, other):
        """How many tokens of this prompt are computed in the other's blocks; one must be left to compute."""
        computed = other.prompt[: other.num_computed]
        num_equal = next((i for i, (a, b) in enumerate(zip(self.prompt, computed, strict=False)) if a != b), 99)
        return min(num_equal, len(computed), len(self.prompt) - 1)


class Scheduler:
    """A scheduler that plans ahead of results at random, within the rules; it also shares, tags and preempts."""

    def __init__(self, random: Random, requests: list[Request]) -> None:
        self.random = random
        self.requests = {request.name: request for request in requests}
        self.waiting = list(requests)
        self.running: dict[int, Request] = {}
        self.leaving: dict[int, Request] = {}
        self.remembered: set[str] = set()  # finished requests whose records the executor keeps
        self.step_id = 0
        self.epoch = 1
        self.grant_hash = HASH_START

    @property
    def is_done(self):
        """Whether every request has finished and left."""
        return not (self.waiting or self.running or self.leaving)

    @property
    def free_blocks(self):
        """Blocks in no request's table."""
        held = {block for request in self.running.values() for block in request.blocks}
        return [block for block in range(LIMITS.num_blocks) if block not in held]

    def plan(self):
        """The next plan."""
        self.step_id += 1
        finish, preempt = self._release()
        free_rows = [row for row in range(LIMITS.num_rows) if row not in {**self.running, **self.leaving}]
        sources = list(self.running.values())
        cells = {"grants": [], "shared": [], "copies": []}
        place = [self._place(row, sources, **cells) for row in free_rows if self.waiting]
        tagged = [block for block in range(LIMITS.num_blocks) if self.random.random() < 0.05]
        forget = [name for name in sorted(self.remembered) if self.random.random() < 0.1]
        self.remembered -= set(forget)
        return plan(
            self._schedule(cells["grants"], cells["copies"], place),
            step_id=self.step_id,
            epoch=self.epoch,
            place=place,
            tags=[(block, self.random.randbytes(16)) for block in tagged],
            preempt=preempt,
            finish=finish,
            forget=forget,
            **cells,
        )

    def take(self, planned, result):
        """A result: tokens of rows, and the confirmation that rows have left."""
        self.grant_hash = grant_hash(grant_hash(self.grant_hash, planned.grants), planned.shared)
        assert result.grant_hash == self.grant_hash
        tokens = iter(result.token_ids.tolist())
        for row, count, finish in zip(result.rows.tolist(), result.num_accepted, result.finishes, strict=True):
            request = {**self.running, **self.leaving}[row]
            request.output += [next(tokens) for _ in range(count)]
            request.finish = int(finish)
        for release in planned.releases:
            request = self.leaving.pop(release.row)
            if request.finish:
                self.remembered.add(request.name)
            else:
                self.waiting.append(request)

    def rebuild(self, states):
        """What a successor does: everything from the snapshot."""
        self.running, self.leaving, self.step_id, self.epoch = {}, {}, 0, self.epoch + 1
        self.remembered = {state.record_id.request_id for state in states if state.row is None and state.finish}
        for state in states:
            request = self.requests[state.record_id.request_id]
            request.output, request.blocks = state.output_token_ids.tolist(), state.block_ids.tolist()
            request.num_expected, request.num_computed = len(request.output), state.num_computed_tokens
            request.finish = int(state.finish)
            # The snapshot does not say; a copy too many does no harm.
            request.is_last_block_shared = request.num_computed % LIMITS.block_size > 0
            if state.row is not None:
                self.running[state.row] = request
        self.waiting = [r for r in self.requests.values() if r not in self.running.values() and not r.finish]

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
        return finish, preempt

    def _place(self, row, sources, grants, shared, copies):
        """Put a request on a row, on as much of what another one computed as they have in common."""
        request = self.waiting.pop(0)
        source = max(sources, key=request.num_in_common, default=request)
        request.num_computed, request.num_expected = 0, len(request.output)
        num_shared, num_copied = divmod(request.num_in_common(source), LIMITS.block_size)
        request.blocks = source.blocks[:num_shared]
        shared += [(row, i, block) for i, block in enumerate(request.blocks)]
        self.running[row] = request
        free = self.free_blocks
        request.is_last_block_shared = num_copied > 0 and self.random.random() < 0.5
        if request.is_last_block_shared:
            shared.append((row, num_shared, source.blocks[num_shared]))
            request.blocks = source.blocks[: num_shared + 1]
            request.num_computed = num_copied
        elif num_copied and free:
            grants.append((row, num_shared, free[0]))
            copies.append((source.blocks[num_shared], free[0]))
            request.blocks = [*request.blocks, free[0]]
            request.num_computed = num_copied
        request.num_computed += num_shared * LIMITS.block_size
        return placement(
            row,
            request.prompt,
            name=request.name,
            output=request.output,
            num_cached_tokens=request.num_computed,
            max_tokens=request.max_tokens,
            end_token_ids=[request.end_token],
        )

    def _schedule(self, grants, copies, place):
        scheduled, budget = [], LIMITS.max_num_batched_tokens
        placed, given_up = [placement.row for placement in place], set()
        for row, request in self.running.items():
            is_over = request.num_expected >= request.max_tokens or request.num_ahead == 0
            num_tokens = self.random.randint(0, min(request.num_ahead, budget))
            needed = -(-(request.num_computed + num_tokens) // LIMITS.block_size) - len(request.blocks)
            free = [block for block in self.free_blocks if block not in given_up]
            needs_copy = request.is_last_block_shared
            if is_over or num_tokens == 0 or needed + needs_copy > len(free) or (needs_copy and row in placed):
                continue
            if needs_copy:
                shared = request.blocks.pop()
                given_up.add(shared)  # until the next plan: this one still copies from it
                grants.append((row, len(request.blocks), free[0]))
                copies.append((shared, free[0]))
                request.blocks.append(free.pop(0))
                request.is_last_block_shared = False
            for block in free[: max(needed, 0)]:
                grants.append((row, len(request.blocks), block))
                request.blocks.append(block)
            request.num_expected += num_tokens == request.num_ahead
            request.num_computed += num_tokens
            budget -= num_tokens
            scheduled.append((row, num_tokens))
        return scheduled


class FragileRunner(HashRunner):
    """A runner whose next step fails in the given place, be it after some of the work is done."""

    fails_in = ""

    def copy_blocks(self, sources, destinations):
        """Copy; then fail."""
        super().copy_blocks(sources, destinations)
        self._fail("copy")

    def execute(self, batch):
        """Compute; then fail, or give an answer that does not fit the batch."""
        output = super().execute(batch)
        self._fail("forward pass")
        if self.fails_in == "output" and batch.sampled.size:
            self.fails_in = ""
            return replace(output, token_ids=output.token_ids[:0])
        return output

    def twin(self):
        """Another runner with the same contents."""
        runner = FragileRunner(LIMITS.num_blocks, LIMITS.block_size, LIMITS.vocab_size)
        runner._slots[:] = self._slots
        return runner

    def _fail(self, place):
        if self.fails_in == place:
            self.fails_in = ""
            raise RuntimeError("device lost")


class Run:
    """A scheduler and an engine until all requests are done, with a number of plans in between."""

    def __init__(self, wanted, num_ahead, seed):
        self.random = Random(seed)  # noqa: S311  # reproducible on purpose
        self.runner = FragileRunner(LIMITS.num_blocks, LIMITS.block_size, LIMITS.vocab_size)
        self.engine = Engine(RowTable(LIMITS), self.runner)
        self.everyone = [
            Request(f"request-{i}", COMMON_START[:num_common] + own, max_tokens, end_token)
            for i, (num_common, own, max_tokens, end_token) in enumerate(wanted)
        ]
        self.scheduler = Scheduler(self.random, self.everyone)
        self.num_ahead = num_ahead
        self.in_flight = deque()

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
        self.scheduler.take(planned, self.engine.execute(planned).result)

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
runs = st.builds(Run, st.lists(wanted, min_size=2, max_size=6), st.integers(1, 4), st.integers(0, 2**32))


@settings(max_examples=settings.default.max_examples // 2)
@given(runs)
def test_any_sound_schedule_gives_every_request_its_own_tokens(run):
    """Chunks, batches, plans ahead of results, shared and copied blocks, preemptions."""
    for planned in run.plans():
        run.execute(planned)

    run.assert_everyone_was_served()


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
            if run.random.random() < 0.6:
                spoilt = Spoiler(LIMITS, run.random).spoil(planned)
                trial = Engine(deepcopy(run.engine.table), run.runner.twin())
                try:
                    trial.execute(spoilt)
                except PlanError as error:
                    assert _picture(trial.table) == _picture(run.engine.table)
                    reached[error.fault] += 1
                    run.engine = Engine(trial.table, run.runner)  # must do for the rest of the run
                else:
                    _assert_applied(trial.table, spoilt)
                    reached["applied, rows ran"] += bool(spoilt.rows.size)
            run.execute(planned)
        run.assert_everyone_was_served()

    every_spoilt_plan_is_applied_wholly_or_not_at_all()
    assert reached["applied, rows ran"] >= 100, reached
    assert {fault for fault in PlanFault if not reached[fault]} == set(), reached


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
    return sorted(map(repr, table.states())), _tags(table), columns, counts, table._grant_hash, table._rows


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

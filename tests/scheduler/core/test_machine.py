"""The core under any order of events: nothing lost, nothing doubled, every block accounted for."""

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from both_sides.audited import ending, expected_logprobs, expected_output, make_executor
from both_sides.harness import CoreHarness
from paceline.plan.values import FinishReason, RecordId, StepResult
from paceline_executor.runner.interface import RowProblem
from paceline_scheduler import errors
from paceline_scheduler.core import events
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import RESUME_WINDOW_S
from paceline_scheduler.core.request import Request
from paceline_scheduler.core.suspects import MAX_EXECUTOR_DEATHS
from paceline_scheduler.core.tables.rows import RUNNING
from scheduler_rig.requests import make_request

END_PROBABILITY = 0.05
REFUSALS = (errors.QueueFullError, errors.InvalidRequestError, errors.NoExecutorError)
ADDRESSES = ("executor-0", "executor-1")
SOME_ADDRESS = st.sampled_from(ADDRESSES)


def small_executor(incarnation, num_blocks=12, max_num_drafts=0):
    """Return an executor of few rows and blocks."""
    return make_executor(
        num_blocks=num_blocks,
        max_num_rows=6,
        max_num_batched_tokens=32,
        max_num_drafts=max_num_drafts,
        end_probability=END_PROBABILITY,
        incarnation=incarnation,
    )


class ServingMachine(RuleBasedStateMachine):
    """Two small, unequal executors whose pools overflow soon, two tenants with common prompts, all that clients do."""

    max_num_drafts = 0

    def __init__(self):
        super().__init__()
        drafts = self.max_num_drafts
        executors = [small_executor(1, 12, drafts), small_executor(100, 9, drafts)]
        self.harness = CoreHarness(*executors, limits=CoreLimits(max_num_queued_reqs=8))
        self.requests: dict[int, Request] = {}
        self.old_results: list[tuple[str, StepResult]] = []
        self.num_restarts = 0
        self.num_deaths = 0  # of executors, as far as the scheduler could tell
        self.cut: dict[int, int] = {}  # ended from outside: the output is some prefix

    @rule(
        num_shared=st.integers(0, 12),
        num_own=st.integers(1, 12),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        tenant=st.sampled_from(("red", "blue")),
        bypass=st.booleans(),
        deadline_s=st.one_of(st.none(), st.integers(1, 20)),
        priority=st.integers(-1, 1),
        options=st.sampled_from(({}, {"min_tokens": 6}, {"num_prompt_logprobs": 1})),
    )
    def submit(self, num_shared, num_own, max_tokens, tenant, bypass, deadline_s, priority, options):
        handle = len(self.requests) + 1
        request = make_request(
            [*range(100, 100 + num_shared), *(handle * 31 + i for i in range(num_own))],
            max_tokens,
            handle=handle,
            tenant=tenant,
            end_token_ids=(0,),
            bypass_prefix_cache=bypass,
            deadline_s=None if deadline_s is None else self.harness.clock() + deadline_s,
            priority=priority,
            is_resumable=True,
            **options,
        )
        try:
            self.harness.submit(request)
        except REFUSALS:
            return
        self.requests[handle] = request

    @rule(num_own=st.integers(1, 12), max_tokens=st.integers(1, 20), num_completions=st.integers(2, 4))
    def submit_completions(self, num_own, max_tokens, num_completions):
        """A request for several completions of one prompt arrives."""
        first = len(self.requests) + 1
        for index in range(num_completions):
            request = make_request(
                [first * 31 + i for i in range(num_own)], max_tokens, handle=first + index, end_token_ids=(0,)
            )
            request = replace(request, is_resumable=True)
            key = RecordId("red", f"request-{first}", index)
            request = replace(request, key=key, num_completions=num_completions)
            try:
                self.harness.submit(request)
            except REFUSALS:
                return
            self.requests[first + index] = request

    @rule(address=SOME_ADDRESS)
    def plan(self, address):
        self.harness.plan(address)

    @rule(address=SOME_ADDRESS)
    def run(self, address):
        self.harness.run(address)

    @rule(address=SOME_ADDRESS)
    def complete(self, address):
        """A result arrives, and is kept: it may arrive again."""
        if self.harness.results[address]:
            self.old_results.append((address, self.harness.results[address][0]))
        self.harness.complete(address)

    @rule(address=SOME_ADDRESS, num_steps=st.integers(1, 8))
    def go_on(self, address, num_steps):
        """Some steps pass without anything special."""
        for _ in range(num_steps):
            self.harness.step(address)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_from_the_edge(self, data):
        """A stop text is found in what a client has."""
        handle = data.draw(st.sampled_from(self.running))
        self.cut[handle] = len(self.harness.client.token_ids.get(handle, []))
        self.harness.end(self.requests[handle], self.cut[handle])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data):
        handle = data.draw(st.sampled_from(self.running))
        self.harness.feed(events.Cancel(self.requests[handle].key))
        assert self.harness.client.finishes[handle].reason == FinishReason.CANCELLED
        self.cut[handle] = len(self.harness.client.token_ids.get(handle, []))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def submit_twice(self, data):
        handle = data.draw(st.sampled_from(self.running))
        twin = replace(make_request(3, handle=10_000 + handle), key=self.requests[handle].key)
        try:
            self.harness.submit(twin)
        except errors.DuplicateRequestError:
            return
        raise AssertionError("two requests of one key are running")

    @rule(seconds=st.integers(0, 5))
    def time_passes(self, seconds):
        self.harness.clock.advance(seconds)
        effects = self.harness.core.apply(events.Tick(), self.harness.clock())
        for failure in effects.failures:
            self.cut[failure.handle] = len(self.harness.client.token_ids.get(failure.handle, []))
        self.harness.client.deliver(effects.tokens, effects.failures)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_steps=st.integers(0, 4), holds_tokens=st.booleans())
    def connection_is_lost(self, data, num_steps, holds_tokens):
        """A client is away for some steps, then it attaches anew."""
        handle = data.draw(st.sampled_from(self.running))
        self.harness.feed(events.Detach(handle))
        self.harness.client.close(handle)
        for address in ADDRESSES * num_steps:
            self.harness.step(address)
        self.harness.client.open(handle)
        self._come_back(handle, holds_tokens)

    def _come_back(self, handle, holds_tokens):
        request = replace(self.requests[handle], attachment=self.requests[handle].attachment + 1)
        self.requests[handle] = request
        try:
            self.harness.resume(request, holds_tokens=holds_tokens)
        except (*REFUSALS, errors.ResumeMismatchError):
            self.cut[handle] = len(self.harness.client.token_ids.get(handle, []))

    @precondition(lambda self: self.harness.client.finishes)
    @rule(data=st.data())
    def acknowledge(self, data):
        """A client has all of an output, or says so of a request whose end it ended itself."""
        handle = data.draw(st.sampled_from(sorted(self.harness.client.finishes)))
        self.harness.feed(events.Acknowledge((self.requests[handle].key,)))

    @precondition(lambda self: self.harness.client.finishes)
    @rule(data=st.data())
    def submit_again_under_the_same_id(self, data):
        """An id is free as soon as its end was told, whether or not the row has been left."""
        before = self.requests[data.draw(st.sampled_from(sorted(self.harness.client.finishes)))]
        handle = len(self.requests) + 1
        again = replace(before, handle=handle, attachment=1, body_digest=b"%d" % handle)
        if any(self.requests[other].key == before.key for other in self.running):
            return  # it was used again already
        try:
            self.harness.submit(again)
        except REFUSALS:
            return
        self.requests[handle] = again

    def _failures_to_expect(self):
        expected = (errors.ExecutorFailedError, errors.NoLongerServedError, errors.DeadlineUnreachableError)
        return (*expected, errors.QuarantinedError) if self.num_deaths > MAX_EXECUTOR_DEATHS else expected

    @property
    def running(self):
        """The handles that have not ended, in order."""
        return sorted(self.requests.keys() - self.harness.client.ended - self.cut.keys())

    @invariant()
    def blocks_are_conserved(self):
        """I1: free + cached + used = total, and a reference count is the number of owners."""
        self.harness.views.check()

    @invariant()
    def nobody_is_preempted_without_end(self):
        """I7: at most three times each."""
        executors = map(self.harness.views.executor, ADDRESSES)
        running = [live for executor in executors for live in executor.ledger.rows.live if live is not None]
        assert all(live.preemptions.count <= 3 for live in (*running, *self.harness.views.waiting_requests()))

    @invariant()
    def streams_are_prefixes(self):
        """I3: what a client has is a prefix of what an undisturbed run generates."""
        for handle in self.requests:
            request = self.requests[handle]
            if request.max_tokens is not None:
                known = self.harness.client.token_ids.get(handle, [])
                reference = expected_output(request, ending(END_PROBABILITY))
                assert tuple(known) == reference[: len(known)]

    @invariant()
    def prompt_logprobs_come_with_the_first_token(self):
        """Whole, whatever happened before it."""
        client = self.harness.client
        for handle, request in self.requests.items():
            if request.num_prompt_logprobs is not None and client.token_ids.get(handle):
                expected = expected_logprobs(request.prompt_token_ids[1:], 1)
                assert list(client.prompt_logprobs.get(handle, ())) == expected

    def teardown(self):
        """Liveness and I6: when the disturbances stop, everything ends, and ends exactly once."""
        self.harness.finish()
        self.harness.views.check()
        if any(self.harness.views.executor(address).draining for address in ADDRESSES):
            # Draining takes nothing new; what had begun has ended all the same.
            assert all(not live.attempt for live in self.harness.views.waiting_requests())
            for address in ADDRESSES:
                self.harness.executors[address].restart()
                self.harness.attach(address)
            self.harness.finish()
        client = self.harness.client
        for handle, request in self.requests.items():
            failure = client.failures.get(handle)
            if handle in self.cut or isinstance(failure, self._failures_to_expect()):
                continue
            if isinstance(failure, errors.DeadlineExceededError):  # while no scheduler knew of it, perhaps
                assert request.deadline_s <= self.harness.clock()
                continue
            assert handle in client.finishes
            if request.max_tokens is not None:
                reference = expected_output(request, ending(END_PROBABILITY))
                assert tuple(client.token_ids[handle]) == reference
        self.harness.clock.advance(2 * RESUME_WINDOW_S)  # what nobody came back for ends
        self.harness.feed(events.Tick())
        self.harness.finish()
        assert self.harness.views.num_unfinished() == 0
        assert self.harness.views.num_waiting() == (0, 0)
        for address in ADDRESSES:
            counts = self.harness.views.counts(address)
            assert counts.blocks.used == 0
            assert counts.num_owned_slots == 0
        assert not np.any([executor.rows for executor in self.harness.executors.values()])
        records = [record for executor in self.harness.executors.values() for record in executor.records.values()]
        assert all(record.released is not None for record in records), "a record without an end would stay for ever"


class CoreMachine(ServingMachine):
    """And all that can happen to executors, to what they send, and to the scheduler."""

    @precondition(lambda self: self.old_results)
    @rule(data=st.data())
    def an_old_result_arrives_again(self, data):
        """I5: of an earlier stream, or for the second time: it changes nothing."""
        address, result = data.draw(st.sampled_from(self.old_results))
        try:
            self.harness.feed(events.StepFinished(address, result))
        except errors.DivergenceError:
            return
        raise AssertionError("an old result was taken")

    @precondition(lambda self: self.running)
    @rule(data=st.data(), address=SOME_ADDRESS)
    def a_row_fails(self, data, address):
        """A request fails alone the next time it runs there."""
        handle = data.draw(st.sampled_from(self.running))
        self.harness.executors[address].fail_row(self.requests[handle].key, RowProblem.NOT_FINITE)

    @rule(holds_tokens=st.booleans())
    def scheduler_dies(self, holds_tokens):
        """Another one takes over both executors, and every client comes back."""
        self.harness.succeed()
        self.old_results = []
        for handle in self.running:
            self._come_back(handle, holds_tokens)

    @rule(address=SOME_ADDRESS)
    def stream_breaks(self, address):
        """A plan stream breaks anywhere and is opened again: the executor kept its rows."""
        self.harness.feed(events.StreamEnded(address))
        self.old_results += [(address, result) for result in self.harness.results[address]]
        assert self.harness.plan(address) is None
        self.harness.attach(address)

    @rule(address=SOME_ADDRESS)
    def outputs_are_expected_to_be_short(self, address):
        """More is admitted than the pool can hold: requests are preempted."""
        self.harness.expect_short_outputs(address)

    @rule(address=SOME_ADDRESS)
    def a_plan_never_runs(self, address):
        """The stream breaks with plans that were sent and did not run, whatever they hold."""
        self.harness.feed(events.StreamEnded(address))
        self.harness.executors[address].drop_waiting()
        self.harness.attach(address)

    @rule(address=SOME_ADDRESS)
    def executor_drains(self, address):
        """What runs there moves to the other one, if it can; it serves again as another process."""
        self.harness.feed(events.DrainExecutor(address))

    @rule(address=SOME_ADDRESS)
    def executor_serves_again(self, address):
        """An operator takes a drain back, or there was none."""
        self.harness.feed(events.UndrainExecutor(address))

    @rule(address=SOME_ADDRESS)
    def executor_restarts(self, address):
        """An executor dies and comes back with nothing."""
        self.num_deaths += 1
        self.harness.executors[address].restart()
        self.harness.attach(address)

    @rule(address=SOME_ADDRESS, num_blocks=st.integers(7, 14))
    def executor_returns_with_another_pool(self, address, num_blocks):
        """How much memory is free decides: what no executor can hold any more fails, the rest goes on."""
        self.num_restarts += 1
        self.num_deaths += 1
        self.harness.executors[address] = small_executor(1000 * self.num_restarts, num_blocks, self.max_num_drafts)
        self.harness.attach(address)

    @rule(address=SOME_ADDRESS)
    def executor_is_lost_for_a_while(self, address):
        """An executor is given up, others go on, then it returns with rows that are no longer its own."""
        self.num_deaths += 1
        self.harness.feed(events.ExecutorLost(address))
        for other in ADDRESSES:
            if other != address:
                self.harness.step(other)
        self.harness.attach(address)


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(
    max_examples=settings.default.max_examples * 3 // 2,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)


class DraftingMachine(CoreMachine):
    """The same core, the same events, and rows that draft."""

    max_num_drafts = 7

    @rule(drafts=st.lists(st.integers(0, 7), min_size=1, max_size=4))
    def rows_want_drafts(self, drafts):
        """From now on, so many each."""
        self.harness.drafts = drafts

    @invariant()
    def what_is_planned_is_what_was_computed_and_is_in_flight(self):
        """A bound goes up with a plan, down with what a result does not bring; each step in flight has it so."""
        for executor in map(self.harness.views.executor, ADDRESSES):
            columns = executor.ledger.rows
            bounds = columns.num_computed.copy()
            for step in executor.in_flight:
                bounds[step.index] += step.num_scheduled
                alive = ~columns.ended[step.index]
                assert np.array_equal(bounds[step.index][alive], step.num_scheduled_after[alive])
            running = (columns.state == RUNNING) & ~columns.ended
            assert np.array_equal(bounds[running], columns.num_scheduled[running])
            assert np.all(bounds[running] <= columns.limit[running])

    @invariant()
    def bounds_are_never_below_the_truth_and_are_the_truth_when_nothing_is_in_flight(self):
        """The truth is what the executor has computed."""
        for address in ADDRESSES:
            executor, rows = self.harness.views.executor(address), self.harness.executors[address].rows
            columns = executor.ledger.rows
            for row in (columns.state == RUNNING).nonzero()[0].tolist():
                if row not in rows:
                    continue  # it is placed by a plan that has not run
                bound, truth = int(columns.num_scheduled[row]), rows[row].num_computed_tokens
                assert bound >= truth
                assert columns.num_computed[row] <= truth
                assert executor.in_flight or bound == truth


TestDraftingMachine = DraftingMachine.TestCase
TestDraftingMachine.settings = settings(stateful_step_count=40, suppress_health_check=list(HealthCheck))

"""The core under any order of events: nothing lost, nothing doubled, every block accounted for."""

from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.plan import RowError, StepResult
from paceline_scheduler.core.request import FinishReason, Request
from paceline_scheduler.errors import (
    DivergenceError,
    DuplicateRequestError,
    ExecutorFailedError,
    InvalidRequestError,
    NoLongerServedError,
    QueueFullError,
)
from paceline_scheduler.simulator.tokens import TokenRule
from paceline_scheduler.testing.harness import CoreHarness
from paceline_scheduler.testing.requests import expected_output, make_executor, make_request

END_PROBABILITY = 0.05
ADDRESSES = ("executor-0", "executor-1")


def small_executor(incarnation, num_blocks=12):
    """Return an executor of few rows and blocks."""
    return make_executor(
        num_blocks=num_blocks,
        max_num_rows=4,
        max_num_batched_tokens=16,
        end_probability=END_PROBABILITY,
        incarnation=incarnation,
    )


class CoreMachine(RuleBasedStateMachine):
    """Two small, unequal executors whose pools overflow soon, two tenants with common prompts, all that can happen."""

    def __init__(self):
        super().__init__()
        executors = [small_executor(1), small_executor(100, num_blocks=9)]
        self.harness = CoreHarness(*executors, limits=CoreLimits(max_num_queued_reqs=8))
        self.requests: dict[int, Request] = {}
        self.old_results: list[tuple[str, StepResult]] = []
        self.num_restarts = 0
        self.cut: dict[int, int] = {}  # ended from outside: the output is some prefix

    address = st.sampled_from(ADDRESSES)

    @rule(
        num_shared=st.integers(0, 12),
        num_own=st.integers(1, 12),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        tenant=st.sampled_from(("red", "blue")),
        bypass=st.booleans(),
        deadline_s=st.one_of(st.none(), st.integers(1, 20)),
    )
    def submit(self, num_shared, num_own, max_tokens, tenant, bypass, deadline_s):
        """A request arrives."""
        handle = len(self.requests) + 1
        request = make_request(
            [*range(100, 100 + num_shared), *(handle * 31 + i for i in range(num_own))],
            max_tokens,
            handle=handle,
            tenant=tenant,
            end_token_ids=(0,),
            bypass_prefix_cache=bypass,
            deadline_s=None if deadline_s is None else self.harness.clock() + deadline_s,
        )
        try:
            self.harness.submit(request)
        except (QueueFullError, InvalidRequestError):
            return
        self.requests[handle] = request

    @rule(address=address)
    def plan(self, address):
        """The core plans a step."""
        self.harness.plan(address)

    @rule(address=address)
    def run(self, address):
        """An executor runs a step."""
        self.harness.run(address)

    @rule(address=address)
    def complete(self, address):
        """A result arrives, and is kept: it may arrive again."""
        if self.harness.results[address]:
            self.old_results.append((address, self.harness.results[address][0]))
        self.harness.complete(address)

    @precondition(lambda self: self.old_results)
    @rule(data=st.data())
    def an_old_result_arrives_again(self, data):
        """I5: of an earlier stream, or for the second time: it changes nothing."""
        address, result = data.draw(st.sampled_from(self.old_results))
        try:
            self.harness.core.complete(address, result)
        except DivergenceError:
            return
        raise AssertionError("an old result was taken")

    @rule(address=address, num_steps=st.integers(1, 8))
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
        """A client cancels."""
        handle = data.draw(st.sampled_from(self.running))
        self.harness.client.deliver(self.harness.core.cancel(self.requests[handle].key))
        assert self.harness.client.finishes[handle].reason == FinishReason.CANCELLED
        self.cut[handle] = len(self.harness.client.token_ids.get(handle, []))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def submit_twice(self, data):
        """A request id in use is refused."""
        handle = data.draw(st.sampled_from(self.running))
        key = self.requests[handle].key
        twin = make_request(3, handle=10_000 + handle, request_id=key.request_id, tenant=key.tenant)
        try:
            self.harness.submit(twin)
        except DuplicateRequestError:
            return
        raise AssertionError("two requests of one key are running")

    @rule(seconds=st.integers(0, 5))
    def time_passes(self, seconds):
        """Deadlines pass with the time."""
        self.harness.clock.advance(seconds)
        outputs = self.harness.core.expire(self.harness.clock())
        for failure in outputs.failures:
            self.cut[failure.handle] = len(self.harness.client.token_ids.get(failure.handle, []))
        self.harness.client.deliver(outputs)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), address=address)
    def a_row_fails(self, data, address):
        """A request fails alone the next time it runs there."""
        handle = data.draw(st.sampled_from(self.running))
        self.harness.executors[address].fail_row(self.requests[handle].key, RowError("NAN_LOGITS", "not numbers"))

    @rule(address=address)
    def stream_breaks(self, address):
        """A plan stream breaks anywhere and is opened again: the executor kept its rows."""
        self.harness.core.detach(address)
        self.old_results += [(address, result) for result in self.harness.results[address]]
        assert self.harness.plan(address) is None
        self.harness.attach(address)

    @rule(address=address)
    def executor_restarts(self, address):
        """An executor dies and comes back with nothing."""
        self.harness.executors[address].restart()
        self.harness.attach(address)

    @rule(address=address, num_blocks=st.integers(7, 14))
    def executor_returns_with_another_pool(self, address, num_blocks):
        """How much memory is free decides: what no executor can hold any more fails, the rest goes on."""
        self.num_restarts += 1
        self.harness.executors[address] = small_executor(1000 * self.num_restarts, num_blocks)
        self.harness.attach(address)

    @precondition(lambda self: self.harness.client.finishes)
    @rule(data=st.data())
    def acknowledge(self, data):
        """A client has all of an output, or says so of a request whose end it ended itself."""
        handle = data.draw(st.sampled_from(sorted(self.harness.client.finishes)))
        self.harness.core.acknowledge((self.requests[handle].key,))

    @precondition(lambda self: self.harness.client.finishes)
    @rule(data=st.data())
    def submit_again_under_the_same_id(self, data):
        """An id is free as soon as its end was told, whether or not the row has been left."""
        before = self.requests[data.draw(st.sampled_from(sorted(self.harness.client.finishes)))]
        handle = len(self.requests) + 1
        again = replace(before, handle=handle)
        if any(self.requests[other].key == before.key for other in self.running):
            return  # it was used again already
        try:
            self.harness.submit(again)
        except (QueueFullError, InvalidRequestError):
            return
        self.requests[handle] = again

    @rule(address=address)
    def executor_is_lost_for_a_while(self, address):
        """An executor is given up, others go on, then it returns with rows that are no longer its own."""
        self.harness.core.lose(address)
        for other in ADDRESSES:
            if other != address:
                self.harness.step(other)
        self.harness.attach(address)

    @property
    def running(self):
        """The handles that have not ended, in order."""
        return sorted(self.requests.keys() - self.harness.client.ended - self.cut.keys())

    @invariant()
    def blocks_are_conserved(self):
        """I1: free + cached + used = total, and a reference count is the number of owners."""
        self.harness.core.check()

    @invariant()
    def streams_are_prefixes(self):
        """I3: what a client has is a prefix of what an undisturbed run generates."""
        for handle in self.requests:
            request = self.requests[handle]
            if request.max_tokens is not None:
                known = self.harness.client.token_ids.get(handle, [])
                reference = expected_output(request, TokenRule(end_probability=END_PROBABILITY))
                assert tuple(known) == reference[: len(known)]

    def teardown(self):
        """Liveness and I6: when the disturbances stop, everything ends, and ends exactly once."""
        self.harness.finish()
        self.harness.core.check()
        client = self.harness.client
        for handle, request in self.requests.items():
            failure = client.failures.get(handle)
            if handle in self.cut or isinstance(failure, (ExecutorFailedError, NoLongerServedError)):
                continue
            assert handle in client.finishes
            if request.max_tokens is not None:
                reference = expected_output(request, TokenRule(end_probability=END_PROBABILITY))
                assert tuple(client.token_ids[handle]) == reference
        assert self.harness.core.num_unfinished() == 0
        assert self.harness.core.num_waiting() == (0, 0)
        for address in ADDRESSES:
            counts = self.harness.core.counts(address)
            assert counts.blocks.used == 0
            assert counts.num_owned_slots == 0
        assert not np.any([executor.rows for executor in self.harness.executors.values()])
        records = [r.snapshot() for executor in self.harness.executors.values() for r in executor.records.values()]
        assert all(record.released is not None for record in records), "a record without an end would stay for ever"


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(
    max_examples=settings.default.max_examples * 3 // 2,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)

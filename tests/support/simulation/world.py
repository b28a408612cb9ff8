"""One run: the parts of a scenario put together, its faults, its end, and what was wrong with it.

A run has three parts. While things go wrong everything is checked as it happens (safety). Then nothing goes wrong any
more, and every request must end (liveness). Then nobody asks for anything, and nothing must be left (conservation).
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from random import Random

from executor_rig.hash_runner import HashRule
from paceline.plan.values import Approach, RecordId
from paceline_client.errors import PacelineError
from paceline_client.results import Delta, Result
from paceline_scheduler.access.tenant_limits import TenantBounds, TenantLimits
from paceline_scheduler.core.limits import CoreLimits
from simulation.clients import ClientHost
from simulation.describe import describe, is_heartbeat
from simulation.executors import ATTACH, ExecutorHost, address_of
from simulation.faults import Faults
from simulation.invariants import ClientChecks, ExecutorChecks
from simulation.loop import WORLD, SimulationLoop, keep_failure
from simulation.mangling import PastPlans
from simulation.network import Call, Inbox, Network, Site
from simulation.rogue import Rogue
from simulation.scenario import FAULTS_END_S, FORGETS_NOTHING, ROGUE, PlannedRequest, Reproducibility, Scenario
from simulation.schedulers import SchedulerHost
from simulation.trace import Trace

_LIVENESS_S = 30.0
_IDLE_S = 45.0  # a request that nobody listens to goes on for 30 s
_POLL_S = 0.25
_RESTART_S = 0.3  # what a supervisor takes
_MANY = 3
LIMITS = CoreLimits(ttft_budget_s=600.0)  # nothing is refused because it would have to wait


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run. `failures` is empty if it is as it should be."""

    seed: int
    failures: tuple[str, ...]
    digest: str
    ends: dict[str, str]  # of requests, by id
    num_events: int
    lasted_s: float  # of virtual time


class World:
    """A run, as faults and checks see it."""

    def __init__(self, scenario: Scenario, trace: Trace) -> None:
        self.failures: list[str] = []
        self.loop = SimulationLoop()
        self._scenario = scenario
        self._trace = trace
        self._random = Random(f"world {scenario.seed}")  # noqa: S311 - nothing secret
        self.network = Network(self.loop, self._own_random("network"), self._arrived)
        self.past_plans = PastPlans()
        self.failing: set[RecordId] = set()
        self._all_ended = asyncio.Event()
        self._executor_checks = ExecutorChecks(lambda: self.loop.now_s, self.report)
        num_losses = sum(fault.kind not in FORGETS_NOTHING for fault in scenario.faults)
        self.client_checks = ClientChecks(self._rules, self.failing, self.report, may_many_die=num_losses >= _MANY)
        executor_names = [f"executor-{number}" for number in range(len(scenario.executor_protocols))]
        scheduler_names = tuple(f"scheduler-{number}" for number in range(len(scenario.scheduler_protocols)))
        self.executors = [
            ExecutorHost(self._site(name), self._executor_checks, self.failing, self._executor_ended)
            for name in executor_names
        ]
        addresses = ",".join(map(address_of, executor_names))
        bounds = TenantBounds(any_tenant=TenantLimits(max_kv_share=scenario.max_kv_share))
        limits = replace(LIMITS, tenants=bounds)
        self.schedulers = [
            SchedulerHost(self._site(name), addresses, limits, scenario.ready_when) for name in scheduler_names
        ]
        self.clients = [
            ClientHost(self._site(f"client-{number}"), self.schedulers, self._received, self._ended)
            for number in range(scenario.num_clients)
        ]
        self.rogue = Rogue(self._site(ROGUE), self.schedulers, self.report)

    def run(self) -> Outcome:
        """Run to the end, or to the first failure."""
        main = self.loop.create_task(self._main())
        main.add_done_callback(self._ended_main)
        self.loop.run_forever()
        if not main.done() and not self.failures:
            self.failures.append("liveness: nothing is left that could happen")
        self.failures += [f"a callback failed: {failure!r}" for failure in self.loop.failures]
        outcome = Outcome(
            seed=self._scenario.seed,
            failures=tuple(self.failures),
            digest=self._trace.digest,
            ends=dict(self.client_checks.ends),
            num_events=self._trace.num_events,
            lasted_s=self.loop.now_s,
        )
        self.loop.end()
        return outcome

    def report(self, sentence: str) -> None:
        """Something happened that must not: the run is over."""
        self._trace.add(self.loop.now_s, self.loop.node.name, f"!! {sentence}")
        self.failures.append(sentence)
        self.loop.stop()

    # The stage of the faults

    def start_executor(self, host: ExecutorHost) -> None:
        config = self._scenario.config
        if self._scenario.reproducibility is Reproducibility.OTHER_TOKENS:
            config = replace(config, rule=replace(config.rule, salt=self._random.getrandbits(40)))
        self.tell(f"{host.name} starts")
        host.start(config, self._scenario.executor_protocols[self.executors.index(host)])

    def start_scheduler(self, host: SchedulerHost, approach: Approach) -> None:
        self.tell(f"{host.name} starts" + (", to take over" if approach is Approach.TAKE_OVER else ""))
        host.start(approach, self._scenario.scheduler_protocols[self.schedulers.index(host)])

    def _executor_ended(self, host: ExecutorHost) -> None:
        self.tell(f"{host.name} ends itself")
        self.loop.call_on(WORLD, self.loop.now_s + _RESTART_S, self._restart_executor, host)

    def _restart_executor(self, host: ExecutorHost) -> None:
        if host.node.is_dead:
            self.start_executor(host)

    def client_died(self) -> None:
        self._look_for_open()

    def tell(self, what: str) -> None:
        self._trace.add(self.loop.now_s, "--", what)

    # What clients receive

    def _received(self, planned: PlannedRequest, delta: Delta) -> None:
        """More of the output has come out of the library."""
        what = f"{planned.request_id}.{delta.index} receives {list(delta.token_ids)} at {delta.offset}"
        self._trace.add(self.loop.now_s, self.loop.node.name, what)
        self.client_checks.received(planned, delta)

    def _ended(self, planned: PlannedRequest, end: Result | PacelineError | None) -> None:
        """A request is over; None: its reader left."""
        what = "done" if isinstance(end, Result) else "left" if end is None else f"{type(end).__name__} {end.reason}"
        self._trace.add(self.loop.now_s, self.loop.node.name, f"{planned.request_id}: {what}")
        self.client_checks.ended(planned, end)
        self._look_for_open()

    # Inside

    async def _main(self) -> None:
        for executor in self.executors:
            self.start_executor(executor)
        for scheduler in self.schedulers:
            self.start_scheduler(scheduler, Approach.WAIT)
        for planned in self._scenario.requests:
            self.clients[planned.client].start(planned)
        faults = Faults(self, {fault.kind for fault in self._scenario.faults})
        tasks = [self.loop.create_task(faults.happen(fault)) for fault in self._scenario.faults]
        await self._until_all_ended(FAULTS_END_S)
        for task in tasks:
            task.cancel()
        faults.calm()
        await self._until_all_ended(_LIVENESS_S)
        if not self._all_ended.is_set():
            self.report(f"liveness: {', '.join(self._open_requests())} did not end within {_LIVENESS_S} s")
            return
        await self._until_idle()

    async def _until_all_ended(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._all_ended.wait()

    async def _until_idle(self) -> None:
        for _ in range(round(_IDLE_S / _POLL_S)):
            left = [what for executor in self.executors for what in self._left_on(executor)]
            left += [what for scheduler in self.schedulers for what in scheduler.left()]
            if not left:
                return
            await asyncio.sleep(_POLL_S)
        self.report(f"I1: there is left over: {'; '.join(left)}")

    def _left_on(self, executor: ExecutorHost) -> Iterator[str]:
        for record_id in executor.running_keys():
            yield f"{record_id} on a row of {executor.name}"

    def _look_for_open(self) -> None:
        if not self._open_requests():
            self._all_ended.set()

    def _open_requests(self) -> list[str]:
        return [
            planned.request_id
            for planned in self._scenario.requests
            if planned.request_id not in self.client_checks.ends and not self.clients[planned.client].node.is_dead
        ]

    def _rules(self) -> Iterator[HashRule]:
        for executor in self.executors:
            yield from executor.rules

    def _arrived(self, call: Call, inbox: Inbox, message: object) -> None:
        if is_heartbeat(call, inbox, message):
            return
        if not isinstance(message, bytes):
            self._trace.add(self.loop.now_s, inbox.owner.name, describe(call, inbox, message))
            return
        if call.method == ATTACH and inbox is call.to_server:
            self.past_plans.add(inbox.owner.name, call.number, message)
        self._trace.add_bytes(self.loop.now_s, inbox.owner.name, message, partial(describe, call, inbox, message))

    def _site(self, name: str) -> Site:
        return Site(name, self.loop, self.network, self._own_random(name))

    def _own_random(self, name: str) -> Random:
        return Random(f"{name} {self._scenario.seed}")  # noqa: S311 - nothing secret

    def _ended_main(self, main: asyncio.Task[None]) -> None:
        keep_failure(main)
        self.loop.stop()

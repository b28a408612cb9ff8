"""Turns what links report of executors into events for the core.

An executor's state is noted before its event happens, and who waits for all executors continues after, when plans have
left.
"""

from functools import partial

from paceline.plan.texts import readable
from paceline.plan.values import Claim, Model, StepResult
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.core.events import (
    BeginAnew,
    DrainExecutor,
    ExecutorAttached,
    ExecutorLost,
    ExecutorRemoved,
    ExpectExecutors,
    StepFinished,
    StreamEnded,
)
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.link.executors import LinkedExecutors
from paceline_scheduler.link.link_listener import PlanPort
from paceline_scheduler.link.linked_executor import LinkedExecutor
from paceline_scheduler.link.plan_stream import StepCallbacks
from paceline_scheduler.runtime import Runtime

MAX_REASON_BYTES = 512


class Listener:
    def __init__(self, runtime: Runtime, executors: LinkedExecutors) -> None:
        self._runtime = runtime
        self._executors = executors

    def looked(self, addresses: tuple[str, ...]) -> None:
        self._runtime.feed(ExpectExecutors(addresses))

    def expected(self, address: str) -> None:
        self._executors.by_address[address] = LinkedExecutor(self._runtime.now_s())

    def removed(self, address: str) -> None:
        del self._executors.by_address[address]
        self._runtime.feed(ExecutorRemoved(address))

    def require_alike(self, address: str, model: Model, tokenizer: TokenizerSource) -> None:
        self._executors.require_alike(address, model, tokenizer)

    def is_expected_back(self, address: str, left_for_s: float) -> bool:
        return self._executors.is_expected_back(address, left_for_s)

    def attached(
        self,
        model: Model,
        tokenizer: TokenizerSource,
        description: ExecutorDescription,
        snapshot: Snapshot,
        port: PlanPort,
    ) -> None:
        executor = self._executors.by_address[description.address]
        executor.model, executor.tokenizer = model, tokenizer
        executor.port, executor.last_error = port, ""
        self._runtime.feed(ExecutorAttached(description, snapshot))
        self.changed()

    def finished_step(self, address: str, result: StepResult) -> None:
        self._runtime.feed(StepFinished(address, result))

    def steps_of(self, address: str) -> StepCallbacks:
        return StepCallbacks(partial(self.finished_step, address), partial(self._runtime.views.due_step, address))

    def draining(self, address: str) -> None:
        if self._runtime.views.description(address) is not None:
            self._runtime.feed(DrainExecutor(address, is_leaving=True))

    def in_line(self, address: str) -> None:
        self._executors.by_address[address].last_error = ""

    def detached(self, address: str, reason: str) -> None:
        executor = self._executors.by_address[address]
        if executor.port is not None:
            executor.away_since_s = self._runtime.now_s()
        executor.port, executor.last_error = None, readable(reason, MAX_REASON_BYTES)
        self._runtime.feed(StreamEnded(address))

    def lost(self, address: str) -> None:
        self._executors.by_address[address].port = None
        self._runtime.feed(ExecutorLost(address))

    def displaced(self, active: Claim) -> None:
        self.give_up(f"another scheduler took over: {active}; send the request again", active)

    def give_up(self, reason: str, active: Claim | None = None) -> None:
        """Nothing is driven until a welcome. Executors keep the requests; `active` drives them now, if anybody does."""
        for executor in self._executors.by_address.values():
            executor.give_up(reason)
        self.changed()
        self._runtime.feed(BeginAnew(reason, active, tuple(self._executors.by_address)))

    def changed(self) -> None:
        self._executors.changed()

"""What links say of executors, turned into events for the core. Decides nothing of requests and plans.

Knows the order: what is known of an executor is written down before its event happens, and who waits for word of all
executors is let in after, when plans have left.
"""

from paceline.plan.values import Model, StepResult
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
from paceline_scheduler.holder import Holder
from paceline_scheduler.link.attachment import Attachment
from paceline_scheduler.link.executor_link import PlanPort
from paceline_scheduler.link.executors import Executors
from paceline_scheduler.link.messages import ExecutorState
from paceline_scheduler.runtime import Runtime


class Listener:
    """The LinkListener of a scheduler."""

    def __init__(self, runtime: Runtime, executors: Executors) -> None:
        self._runtime = runtime
        self._executors = executors
        self._gate = executors.gate

    def looked(self, addresses: tuple[str, ...]) -> None:
        """These executors there are at the start: nothing is admitted before there is word of each."""
        self._gate.expect(addresses)
        self._runtime.feed(ExpectExecutors(addresses))

    def expected(self, address: str) -> None:
        """An executor is looked for."""
        self._executors.by_address[address] = Attachment()

    def held(self, address: str, holder: Holder) -> None:
        """Another scheduler that is alive drives the executor."""
        self._executors.by_address[address].holder = holder
        self._gate.is_held(address, holder)
        self._executors.tell_readiness()

    def removed(self, address: str) -> None:
        """An executor is not looked for any more."""
        self._is_lost(address)
        self._runtime.feed(ExecutorRemoved(address))
        del self._executors.by_address[address]
        self._executors.tell_readiness()

    def syncing(self, address: str) -> None:
        """The executor accepted this scheduler."""
        self._executors.by_address[address].state = ExecutorState.SYNCING

    def attached(
        self,
        model: Model,
        tokenizer: TokenizerSource,
        description: ExecutorDescription,
        snapshot: Snapshot,
        port: PlanPort,
    ) -> None:
        """Drive an executor from here on."""
        executor = self._executors.by_address[description.address]
        executor.model, executor.tokenizer, executor.description = model, tokenizer, description
        executor.port, executor.last_error, executor.is_serving, executor.holder = port, "", True, None
        executor.state = ExecutorState.READY
        self._runtime.feed(ExecutorAttached(description, snapshot))
        self._gate.is_ours(description.address)  # late: plans leave before all who wait for the gate are served
        self._executors.tell_readiness()

    def finished_step(self, address: str, result: StepResult) -> None:
        """Apply a result; raises DivergenceError."""
        self._runtime.feed(StepFinished(address, result))

    def draining(self, address: str) -> None:
        """Place nothing new on an executor, unless it has been given up."""
        if self._executors.by_address[address].description is not None:
            self._runtime.feed(DrainExecutor(address))

    def detached(self, address: str, reason: str, holder: Holder | None = None) -> None:
        """Plan nothing for an executor until it attaches again."""
        executor = self._executors.by_address[address]
        executor.port, executor.last_error, executor.holder = None, reason, holder
        self._gate.is_held(address, holder)
        self._runtime.feed(StreamEnded(address))
        if executor.state is not ExecutorState.LOST:
            executor.state = ExecutorState.CONNECTING
        self._executors.tell_readiness()

    def lost(self, address: str) -> None:
        """Run an executor's requests elsewhere."""
        self._is_lost(address)
        self._runtime.feed(ExecutorLost(address))
        self._executors.tell_readiness()

    def displaced(self, active: Holder) -> None:
        """Another scheduler runs these requests now, and their clients find them there."""
        self.give_up(f"another scheduler took over: {active}; send the request again", active)

    def give_up(self, reason: str, active: Holder | None = None) -> None:
        """Begin anew: tell every stream that its request is not run here any more, and drive nothing until a welcome.

        What executors hold of the requests stays there; `active` is who drives them now, if anybody does.
        """
        addresses = tuple(self._executors.by_address)
        self._gate.expect(addresses)
        for executor in self._executors.by_address.values():
            executor.give_up(reason)
        self._executors.tell_readiness()
        self._runtime.feed(BeginAnew(reason, active, addresses))

    def _is_lost(self, address: str) -> None:
        executor = self._executors.by_address[address]
        executor.port, executor.is_serving, executor.state = None, False, ExecutorState.LOST
        self._gate.has_word(address)

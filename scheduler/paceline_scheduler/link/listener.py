"""What links say of executors, turned into events for the core. Decides nothing of requests and plans.

Knows the order: what is known of an executor is written down before its event happens, and who waits for word of all
executors is let in after, when plans have left.
"""

from functools import partial

from paceline.plan.texts import readable
from paceline.plan.values import Model, StepResult, Welcome
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
from paceline_scheduler.link.executors import Executors
from paceline_scheduler.link.link_listener import PlanPort
from paceline_scheduler.link.plan_stream import Steps
from paceline_scheduler.runtime import Runtime

MAX_REASON_BYTES = 512
"""The most of why a stream has ended that operators see."""


class Listener:
    """The LinkListener of a scheduler."""

    def __init__(self, runtime: Runtime, executors: Executors) -> None:
        self._runtime = runtime
        self._executors = executors

    def looked(self, addresses: tuple[str, ...]) -> None:
        """These executors there are at the start: nothing is admitted before there is word of each."""
        self._runtime.feed(ExpectExecutors(addresses))

    def expected(self, address: str) -> None:
        """An executor is looked for."""
        self._executors.by_address[address] = Attachment()

    def removed(self, address: str) -> None:
        """An executor is not looked for any more."""
        del self._executors.by_address[address]
        self._runtime.feed(ExecutorRemoved(address))

    def require_alike(self, address: str, welcome: Welcome) -> None:
        """Raise UnlikeExecutorError if requests of its model would get another one's text elsewhere."""
        self._executors.require_alike(address, welcome.model, welcome.tokenizer_digest)

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
        executor.model, executor.tokenizer = model, tokenizer
        executor.port, executor.last_error = port, ""
        self._runtime.feed(ExecutorAttached(description, snapshot))
        self.changed()

    def finished_step(self, address: str, result: StepResult) -> None:
        """Apply a result; raises DivergenceError."""
        self._runtime.feed(StepFinished(address, result))

    def steps_of(self, address: str) -> Steps:
        """Return where results of an executor go, and what is due of it."""
        return Steps(partial(self.finished_step, address), partial(self._runtime.views.due_step, address))

    def draining(self, address: str) -> None:
        """Place nothing new on an executor, unless it has been given up."""
        if self._runtime.views.description(address) is not None:
            self._runtime.feed(DrainExecutor(address, is_leaving=True))

    def detached(self, address: str, reason: str) -> None:
        """Plan nothing for an executor until it attaches again."""
        executor = self._executors.by_address[address]
        executor.port, executor.last_error = None, readable(reason, MAX_REASON_BYTES)
        self._runtime.feed(StreamEnded(address))

    def lost(self, address: str) -> None:
        """Run an executor's requests elsewhere."""
        self._executors.by_address[address].port = None
        self._runtime.feed(ExecutorLost(address))

    def displaced(self, active: Holder) -> None:
        """Another scheduler runs these requests now, and their clients find them there."""
        self.give_up(f"another scheduler took over: {active}; send the request again", active)

    def give_up(self, reason: str, active: Holder | None = None) -> None:
        """Begin anew: tell every stream that its request is not run here any more, and drive nothing until a welcome.

        What executors hold of the requests stays there; `active` is who drives them now, if anybody does.
        """
        for executor in self._executors.by_address.values():
            executor.give_up(reason)
        self.changed()
        self._runtime.feed(BeginAnew(reason, active, tuple(self._executors.by_address)))

    def changed(self) -> None:
        """Let those in who waited for the last executor, and tell what would become of a new request."""
        self._executors.changed()

"""The expected executors as the edge, operators and health checks see them; also where plans go.

`listener` brings in what the links say.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from paceline.plan.values import BatchPlan, Model
from paceline_scheduler.backend import Arrival, ExecutorStatus, ServedModel, TokenizerSource
from paceline_scheduler.core.events import BeginDrain, DrainExecutor, Effects, Event, UndrainExecutor
from paceline_scheduler.errors import NoExecutorError, StandbyError, UnlikeExecutorError
from paceline_scheduler.link.leadership import Leadership, Readiness, ServingStatus
from paceline_scheduler.link.linked_executor import LinkedExecutor, served_models, status
from paceline_scheduler.observers.steps import StepObserver
from paceline_scheduler.runtime import Runtime

MAX_LEASE_S = 1.5  # a little more than executors give a silent holder
MAX_WAIT_S = 3.0  # twice what it takes to give up a silent executor
REPLACED_S = 60.0  # a pod has another address by then, long before its model is loaded
_RETRY_S = 0.5
_STANDBY_RETRY_S = 0.15  # a silent holder's lease is almost over


class LinkedExecutors:
    def __init__(self, runtime: Runtime, steps: StepObserver, leadership: Leadership) -> None:
        self.by_address: dict[str, LinkedExecutor] = {}
        self._leadership = leadership
        self._changed = asyncio.Event()
        self._views = runtime.views
        self._now_s = runtime.now_s
        self._steps = steps
        self._on_readiness: Callable[[Readiness], None] = lambda _: None
        self._reported = Readiness(ServingStatus.NOT_SERVING)
        runtime.show_plans(steps)
        runtime.show(self)
        runtime.send_plans_to(self)

    def send_plan(self, address: str, plan: BatchPlan) -> None:
        port = self.by_address[address].port
        assert port is not None, "only what is attached is planned for"
        port.send_plan(plan)

    def saw(self, event: Event[Any], now: float, effects: Effects[Any]) -> None:
        """A draining executor takes nothing new until an operator undoes that."""
        del now, effects
        if isinstance(event, DrainExecutor | UndrainExecutor | BeginDrain):
            self.changed()

    def on_readiness(self, tell: Callable[[Readiness], None]) -> None:
        self._on_readiness = tell

    def changed(self) -> None:
        """Wakes those who wait, and reports readiness if it changed."""
        self._changed.set()
        readiness = self.readiness
        if readiness != self._reported:
            self._reported = readiness
            self._on_readiness(readiness)

    @property
    def readiness(self) -> Readiness:
        if self._views.is_draining:
            return Readiness(ServingStatus.NOT_SERVING)
        return self._leadership.readiness(self._views.drains)

    @property
    def is_at_rest(self) -> bool:
        awaited = self._leadership.awaited
        return (awaited.is_empty or awaited.active is not None) and not self._views.num_unfinished()

    async def until_synced(self, arrival: Arrival) -> None:
        """A new request is refused at once where another scheduler drives them; a begun one waits while the
        named holder may just have died.
        """
        awaited = self._leadership.awaited
        wait_s = MAX_WAIT_S
        if arrival is Arrival.BACK and not awaited.is_empty:
            await self._until(lambda: awaited.is_empty, MAX_LEASE_S)
            wait_s -= MAX_LEASE_S
        if not awaited.is_empty:
            await self._until(lambda: awaited.is_empty or awaited.active is not None, wait_s)
        self.require_lead()
        if not awaited.is_empty:
            raise NoExecutorError("not all executors have answered yet; try again", _RETRY_S)

    def require_lead(self) -> None:
        if (active := self._leadership.awaited.active) is not None:
            raise StandbyError(active, _STANDBY_RETRY_S)

    def require_alike(self, address: str, model: Model, tokenizer: TokenizerSource) -> None:
        """Raises UnlikeExecutorError. Executors of two releases may read a model's files in two ways, but its
        vocabulary is one, and so are its weights, where both say which.
        """
        for served in served_models(self._serving(lambda other: other == address)):
            if served.name != model.name:
                continue
            if not tokenizer.is_alike(served.tokenizer):
                raise UnlikeExecutorError(model.name, f"tokenizer {tokenizer.digest!r}", repr(served.tokenizer.digest))
            if served.vocab_size != model.vocab_size:
                raise UnlikeExecutorError(model.name, f"{model.vocab_size} token ids", f"{served.vocab_size}")
            if model.weights_digest and served.weights_digest not in ("", model.weights_digest):
                raise UnlikeExecutorError(model.name, _weights(model), _weights(served))

    def is_expected_back(self, address: str, left_for_s: float) -> bool:
        """Nobody else serves its model, and who comes in its place may not have said so yet."""
        model = self.by_address[address].model
        others = self._serving(lambda other: other == address)
        is_last = model is not None and all(each.model is None or each.model.name != model.name for each in others)
        return is_last and (left_for_s < REPLACED_S or self.may_come)

    def models(self) -> tuple[ServedModel, ...]:
        return served_models(self._serving())

    def known_models(self) -> tuple[ServedModel, ...]:
        served = {model.name: model for model in self.models()}
        known = served_models(self.by_address.values())
        return tuple(served.get(model.name) or replace(model, num_executors=0) for model in known)

    @property
    def may_come(self) -> bool:
        return not self.by_address or any(executor.model is None for executor in self.by_address.values())

    def open_models(self) -> tuple[ServedModel, ...]:
        return served_models(self._serving(self._views.drains))

    def statuses(self) -> tuple[ExecutorStatus, ...]:
        return tuple(
            status(self._leadership[address], executor, self._views, self._steps.totals(address), self._now_s())
            for address, executor in sorted(self.by_address.items())
        )

    def _serving(self, is_left_out: Callable[[str], bool] = lambda _: False) -> Iterator[LinkedExecutor]:
        for address, executor in self.by_address.items():
            if self._leadership[address].is_serving and not is_left_out(address):
                yield executor

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def _until(self, holds: Callable[[], bool], seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.until(holds)


def _weights(model: Model | ServedModel) -> str:
    return f"{model.quantization or 'unquantised'} weights of digest {model.weights_digest!r}"

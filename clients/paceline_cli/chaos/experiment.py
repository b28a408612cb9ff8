"""A system under load, ready to be harmed: started, asked once undisturbed, then loaded until told to finish.

The composition of this package: every part is made here. Knows no fault's consequences and no terminal.
"""

import asyncio
import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from paceline_cli.chaos.campaign import Campaign, CampaignListener, FaultTiming
from paceline_cli.chaos.claims import untrue_of_all
from paceline_cli.chaos.faults import FaultKind, FaultTimes, Injector
from paceline_cli.chaos.ledger import ChaosLedger
from paceline_cli.chaos.load import ClosedLoopLoad, undisturbed_results
from paceline_cli.chaos.metrics import Samples, between
from paceline_cli.chaos.requests import chaos_requests
from paceline_cli.chaos.system import LocalSystem
from paceline_cli.supervisor.events import ChildListener
from paceline_cli.supervisor.programs import Deployment
from paceline_client.async_client import AsyncClient
from paceline_client.config import Retry


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    deployment: Deployment
    kinds: tuple[FaultKind, ...]
    """The faults that may be asked for."""
    num_streams: int = 32
    max_tokens: int = 48
    """Output tokens of the longest requests."""
    max_outage_seconds: float = 60.0
    """How long a request may be without a server: longer than the longest freeze."""
    seed: int = 0
    """What victims, times and the order of requests follow from."""
    timing: FaultTiming = field(default_factory=FaultTiming)
    times: FaultTimes = field(default_factory=FaultTimes)


class ExperimentObserver(ChildListener, CampaignListener, Protocol):
    """Hears about processes, faults, and how far the experiment is. Must not block."""

    def on_loaded(self, ledger: ChaosLedger) -> None:
        """The undisturbed outputs are known, and the load begins: from now on the ledger fills."""


class Experiment:
    """Runs inside an `async with` block, on the main thread: entering it takes as long as the system takes to start.

    Raises `ChildFailedError` when a part of the system cannot work, and a `PacelineError` when a request fails though
    nothing was done to the system.
    """

    def __init__(self, setting: Setting, observer: ExperimentObserver) -> None:
        self._setting = setting
        self._observer = observer
        self._chance = random.Random(setting.seed)  # noqa: S311  repeatable, not secret
        needs = {need for kind in setting.kinds if (need := kind.need) is not None}
        self.system = LocalSystem(setting.deployment, needs, observer, self._chance)
        self.ledger = ChaosLedger(time.monotonic())
        self._stack = AsyncExitStack()
        self._load: ClosedLoopLoad | None = None
        self._loading: asyncio.Task[None] | None = None
        self._metrics_before: dict[int, Samples] = {}
        self._campaign = Campaign(
            self.system,
            Injector(self.system, self._chance),
            self.ledger,
            setting.timing,
            observer,
            self._chance,
            setting.times,
        )

    @property
    def campaign(self) -> Campaign:
        return self._campaign

    async def finish(self) -> None:
        """End the load: no new streams, and those that run come to their ends, or fail after `settle_seconds`."""
        assert self._load is not None
        assert self._loading is not None
        self._load.stop()
        await self.system.during(self._ended(self._loading))
        self.ledger.close(time.monotonic())
        claimed = between(self._metrics_before, await self.system.metrics())
        self.ledger.current.untrue += untrue_of_all(claimed, self.ledger)

    async def _ended(self, loading: asyncio.Task[None]) -> None:
        done, _ = await asyncio.wait([loading], timeout=self._setting.timing.settle_seconds)
        for task in done:
            task.result()
        for stream in tuple(self.ledger.running):
            self.ledger.failed(stream, "NOT_FINISHED", "it did not come to its end")

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.system)
            await self._begin(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _begin(self, stack: AsyncExitStack) -> None:
        setting = self._setting
        model, *_ = await self.system.ready()
        retry = Retry(max_outage_seconds=setting.max_outage_seconds)
        client = await stack.enter_async_context(AsyncClient(self.system.target, retry=retry))
        has_forms = bool(model.structured_output)
        has_tools = has_forms and model.supports_tools
        requests = chaos_requests(setting.max_tokens, has_forms=has_forms, has_tools=has_tools)
        expected = await self.system.during(undisturbed_results(client, requests, model.name))
        self._metrics_before = await self.system.metrics()
        self._load = ClosedLoopLoad(
            client,
            expected,
            requests,
            self.ledger,
            model=model.name,
            num_streams=setting.num_streams,
            seed=setting.seed,
        )
        self._loading = asyncio.create_task(self._load.run())
        stack.push_async_callback(_cancelled, self._loading)
        self._observer.on_loaded(self.ledger)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])

"""Runs the rungs of a benchmark one after the other, shows how far each is, and hands each on when it has ended."""

import asyncio
from collections.abc import Callable, Sequence

from paceline_cli.bench.clock import Clock
from paceline_cli.bench.live_view import LiveView
from paceline_cli.bench.load import LoadGenerator
from paceline_cli.bench.records import RungRun
from paceline_cli.bench.rungs import Rung

_VIEW_SECONDS = 0.5


async def run_ladder(
    generator: LoadGenerator,
    rungs: Sequence[Rung],
    clock: Clock,
    *,
    stop: asyncio.Event,
    make_view: Callable[[], LiveView],
    on_ended: Callable[[RungRun], None],
) -> None:
    """Run them all, or until `stop` is set: the rung that runs then is handed on with what it has, if anything."""
    for rung in rungs:
        run = generator.begin(rung)
        with make_view() as view:
            watcher = asyncio.create_task(_watch(run, view, clock))
            try:
                await generator.run(run, stop)
            finally:
                watcher.cancel()
        if any(record.outcome for record in run.records):
            on_ended(run)
        if stop.is_set():
            return


async def _watch(run: RungRun, view: LiveView, clock: Clock) -> None:
    while True:
        view.show(run, clock.now())
        # The view's own pace, whatever clock the requests go by.
        await asyncio.sleep(_VIEW_SECONDS)

"""What `up` and `demo` share: run a deployment, show it coming up, do something with it, end it in order."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import typer

from paceline_cli.failures import print_error
from paceline_cli.progress import ProgressView, make_view
from paceline_cli.supervisor.events import ChildEvent, ChildListener, Progressed
from paceline_cli.supervisor.log_files import LogFiles
from paceline_cli.supervisor.programs import Deployment, programs_of
from paceline_cli.supervisor.signals import StopSignals
from paceline_cli.supervisor.supervisor import Restarts, Supervisor
from paceline_client import AsyncClient, Model, Timeout, UnavailableError

# What a service may take beyond its own limit before it is killed.
_GRACE_SECONDS = 5.0
# The scheduler attaches to executors that are ready in a moment; after this long the wait is shown.
_ATTACH_SECONDS = 3.0

Use = Callable[[list[Model]], Coroutine[Any, Any, None]]


def run_deployment(
    deployment: Deployment, *, restarts: Restarts, log_dir: Path | None, use: Use
) -> signal.Signals | None:
    """Start everything, wait until it is ready, do `use`, stop everything.

    Returns the signal that ended it, None when `use` came to its end. Raises ChildFailedError when a process ended for
    good, or gave up what it ran when it was to end; ProgramMissingError, what `use` raises, and KeyboardInterrupt when
    a second signal came.
    """
    signals = StopSignals()
    view = make_view()
    supervisor = _supervisor(deployment, view, restarts, log_dir)
    try:
        asyncio.run(_run(deployment, supervisor, view, use, signals))
    except asyncio.CancelledError:
        if signals.received is None:
            raise
    if signals.is_hurried:
        raise KeyboardInterrupt
    if supervisor.unfinished is not None:
        raise supervisor.unfinished
    return signals.received


def _supervisor(deployment: Deployment, view: ProgressView, restarts: Restarts, log_dir: Path | None) -> Supervisor:
    return Supervisor(
        programs_of(deployment),
        _listeners(view, log_dir),
        restarts=restarts,
        grace_seconds=deployment.shutdown_timeout_seconds + _GRACE_SECONDS,
    )


async def _run(
    deployment: Deployment, supervisor: Supervisor, view: ProgressView, use: Use, signals: StopSignals
) -> None:
    with signals.cancelling_this_task(on_second=supervisor.kill), view:
        async with supervisor:
            try:
                await supervisor.ready()
                models = await supervisor.during(_serving(deployment, view))
                view.settle()
                await supervisor.during(use(models))
            except asyncio.CancelledError:
                view.settle()
                typer.echo("\nStopping; what runs may finish. Ctrl-C again stops at once.", err=True)
                raise


async def _serving(deployment: Deployment, view: ProgressView) -> list[Model]:
    """The models, once the scheduler has attached to every executor.

    However long that takes: one that died after it had become ready is loading again, and the supervisor knows when
    there is no hope. None are told where callers have to prove who they are: a scheduler said that it is ready.
    """
    if deployment.tls_dir is not None or deployment.tokens is not None:
        return []
    async with AsyncClient(deployment.target, timeout=Timeout(connect_seconds=5)) as client:
        while True:
            try:
                return await client.wait_until_ready(_ATTACH_SECONDS, num_executors=deployment.num_executors)
            except UnavailableError:
                view.on_event(Progressed(deployment.scheduler_names[0], "waiting for its executors", None))


def _listeners(view: ProgressView, log_dir: Path | None) -> ChildListener:
    return _Tee([view] if log_dir is None else [LogFiles(log_dir, warn=print_error), view])


class _Tee:
    def __init__(self, listeners: Sequence[ChildListener]) -> None:
        self._listeners = listeners

    def on_event(self, event: ChildEvent) -> None:
        """Tell each of them. A terminal that cannot be written costs lines, never the service."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.on_event(event)

"""`paceline chaos`: kills, freezes and cuts a system of its own while it streams, and checks every token."""

import asyncio
import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline_cli import options
from paceline_cli.chaos.campaign import FaultTiming
from paceline_cli.chaos.experiment import Experiment, Setting
from paceline_cli.chaos.faults import FaultKind
from paceline_cli.chaos.ledger import ChaosLedger
from paceline_cli.chaos.report import figures_of, report_fields
from paceline_cli.chaos.system import RANKS_OPTION, degrees_of
from paceline_cli.chaos.tables import print_summary
from paceline_cli.chaos.views import ChaosView, make_chaos_view
from paceline_cli.failures import EXIT_INTERRUPTED, print_error, reported
from paceline_cli.output import never_waiting
from paceline_cli.supervisor.programs import LOOPBACK, Deployment, free_ports
from paceline_cli.supervisor.signals import StopSignals

_DEFAULT_COUNT = 20
_FRAME_SECONDS = 0.25
_PIPE_WIDTH = 120
_SHUTDOWN_SECONDS = 10
# What only makes a link slow makes nothing break: these are done when asked for.
_DEFAULT_FAULTS = tuple(kind for kind in FaultKind if not kind.endswith(("-delay", "-throttle")))

FaultsOption = Annotated[
    str | None,
    typer.Option(
        "--faults",
        metavar="KIND,…",
        show_default="all but -delay and -throttle",
        help=f"Which, in turn: {', '.join(FaultKind)}; or all.",
    ),
]
CountOption = Annotated[
    int | None, typer.Option("--count", metavar="N", min=1, help=f"How many faults; unset, {_DEFAULT_COUNT}.")
]
DurationOption = Annotated[
    float | None,
    typer.Option(
        "--duration", metavar="SECONDS", min=0, help="Begin no fault after this long; unset, --count decides."
    ),
]
PauseOption = Annotated[
    float, typer.Option("--pause", metavar="SECONDS", min=0, help="From one fault's end to the next, on average.")
]
StreamsOption = Annotated[int, typer.Option("--streams", metavar="N", min=1, max=1024, help="Streams at a time.")]
MaxTokensOption = Annotated[
    int, typer.Option("--max-tokens", metavar="N", min=4, max=4096, help="Output tokens of the longest requests.")
]
ChaosSeedOption = Annotated[
    int, typer.Option("--seed", metavar="N", help="What victims, times and the order of requests follow from.")
]
JsonFileOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures here.")]


@options.hands_on
def chaos(
    model: options.ModelIfAnyOption = None,
    num_executors: options.NumExecutorsOption = 2,
    standby: options.StandbyOption = False,
    num_threads: options.NumThreadsOption = None,
    runner: options.RunnerOption = None,
    faults: FaultsOption = None,
    count: CountOption = None,
    duration: DurationOption = None,
    pause: PauseOption = 2.0,
    num_streams: StreamsOption = 32,
    max_tokens: MaxTokensOption = 48,
    seed: ChaosSeedOption = 0,
    json_file: JsonFileOption = None,
    *,
    handed: options.Handed,
) -> None:
    """Kill, freeze and cut a system under load, and check every token.

    Starts schedulers and executors of its own (by turns of 3 ranks and of 1: --tensor-parallel-size 3,1), asks 24 to
    32 requests undisturbed, keeps them streaming while it injects one fault after another, and compares each delta with
    the undisturbed output, and metrics with what clients saw. Exit code 0: nothing failed, was lost, doubled, changed,
    left or untrue, and the system came back each time.
    """
    deployment = Deployment(
        options=options.names_of(chaos),
        model=options.model_for(runner, model),
        host=LOOPBACK,
        ports=free_ports(num_executors),
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        num_threads=num_threads,
        runner=runner,
        scheduler_options=handed.scheduler,
        executor_options=handed.executor,
        with_standby=standby,
    )
    kinds = parse_kinds(faults, has_ranks=_has_ranks(deployment))
    num_faults = count if count is not None or duration is not None else _DEFAULT_COUNT
    setting = Setting(
        deployment=deployment,
        kinds=kinds,
        num_streams=num_streams,
        max_tokens=max_tokens,
        seed=seed,
        timing=FaultTiming(pause_seconds=pause),
    )
    signals = StopSignals()
    with never_waiting() as writers:
        view = make_chaos_view(num_faults)
        experiment = Experiment(setting, view)
        with reported():
            try:
                asyncio.run(_run(experiment, kinds_in_turn(kinds, num_faults, duration, seed), view, signals))
            except asyncio.CancelledError:
                if signals.received is None:
                    raise
            _conclude(experiment.ledger, json_file)
        _exit(experiment.ledger, is_interrupted=signals.received is not None)
    if "stdout" in writers and writers["stdout"].num_lost:
        raise typer.Exit(os.EX_IOERR)


def parse_kinds(text: str | None, *, has_ranks: bool) -> tuple[FaultKind, ...]:
    """The faults that were named, else those that can be done. `typer.BadParameter` for one that cannot be."""
    if text is None or text == "all":
        kinds = tuple(FaultKind) if text else _DEFAULT_FAULTS
        return tuple(kind for kind in kinds if has_ranks or not kind.is_of_ranks)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in tuple(FaultKind):
            raise typer.BadParameter(f"there is no fault {name!r}; there are {', '.join(FaultKind)}")
        if FaultKind(name).is_of_ranks and not has_ranks:
            raise typer.BadParameter(f"{name} needs executors of several ranks: see {RANKS_OPTION}")
    return tuple(FaultKind(name) for name in names)


def _has_ranks(deployment: Deployment) -> bool:
    try:
        return max(degrees_of(deployment).values()) > 1
    except ValueError:
        raise typer.BadParameter(f"{RANKS_OPTION} takes numbers") from None


def kinds_in_turn(
    kinds: tuple[FaultKind, ...], count: int | None, duration_seconds: float | None, seed: int
) -> Iterator[FaultKind]:
    """Each of them once, in an order by chance, and again, until there were enough or it took long enough.

    The time counts from when the first is asked for.
    """
    chance = random.Random(seed)  # noqa: S311  repeatable, not secret
    began_s: float | None = None
    for number in itertools.count():
        began_s = time.monotonic() if began_s is None else began_s
        is_late = duration_seconds is not None and time.monotonic() - began_s >= duration_seconds
        if is_late or number == count:
            return
        if number % len(kinds) == 0:
            turn = chance.sample(kinds, len(kinds))
        yield turn[number % len(kinds)]


async def _run(experiment: Experiment, kinds: Iterator[FaultKind], view: ChaosView, signals: StopSignals) -> None:
    with signals.cancelling_this_task(on_second=experiment.system.kill), view:
        frames = asyncio.create_task(_draw(view))
        try:
            async with experiment:
                await experiment.system.during(experiment.campaign.run(kinds))
                await experiment.finish()
        finally:
            frames.cancel()


async def _draw(view: ChaosView) -> None:
    while True:
        view.show(time.monotonic())
        await asyncio.sleep(_FRAME_SECONDS)


def _conclude(ledger: ChaosLedger, json_file: Path | None) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    print_summary(console, ledger)
    if json_file is not None:
        json_file.write_text(json.dumps(report_fields(ledger.windows), indent=2) + "\n", encoding="utf-8")


def _exit(ledger: ChaosLedger, *, is_interrupted: bool) -> None:
    if is_interrupted:
        typer.echo("Interrupted; the figures are of what was done by then.", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    if not figures_of("", ledger.windows).is_clean:
        print_error("something failed, was lost, doubled or changed, or a metric was untrue")
        raise typer.Exit(1)

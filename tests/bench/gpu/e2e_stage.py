"""The stage of the whole system: a profile, and mixed streams through faults.

Knows which checks there are. What faults are, and what came of them, `paceline_cli.chaos` knows.
"""

import asyncio
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from gpu.bench_models import write_config
from gpu.errors import CheckFailedError
from gpu.profiled import shows_kernels
from gpu.report import Figure, Report
from gpu.rigs import Place, find_place
from gpu.stage import Task, run_stage
from gpu.system import START_S, running_system
from paceline_cli.chaos.campaign import FaultTiming
from paceline_cli.chaos.experiment import Experiment, Setting
from paceline_cli.chaos.faults import FaultKind
from paceline_cli.chaos.ledger import UNDISTURBED, ChaosLedger, FaultWindow
from paceline_cli.chaos.report import KindFigures, figures_by_kind
from paceline_cli.supervisor.events import ChildEvent, Exited
from paceline_cli.supervisor.programs import LOOPBACK, Deployment, free_ports
from random_models import TINY_CONFIG

_LAST_FAULT_S = 40.0  # before the deadline: it may take so long until all is whole again
# Two executors share the GPU, so that there is one while the other comes back.
_GPU_OPTIONS = ("--runner", "cuda", "--batch-invariant", "--gpu-memory-utilization", "0.4", "--kv-cache-memory", "2GiB")
_TWIN_OPTIONS = ("--runner", "twin", "--num-threads", "1", "--kv-cache-memory", "16MiB")
_SIZES = ("--max-num-batched-tokens", "512")
_DUMMY = replace(
    TINY_CONFIG, num_layers=4, hidden_size=1024, intermediate_size=2816, num_heads=8, head_dim=128, vocab_size=32768
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    num_streams: int
    max_tokens: int
    num_faults: int
    pause_s: float


FULL = Sizes(num_streams=64, max_tokens=96, num_faults=12, pause_s=1.5)
TINY = Sizes(num_streams=6, max_tokens=12, num_faults=2, pause_s=0.3)
_KINDS = (FaultKind.SCHEDULER_KILL, FaultKind.EXECUTOR_KILL)


def work(task: Task, report_on: Callable[[str], Report]) -> Report:
    """A profile, then faults until the time is up."""
    sizes, place = TINY if task.rehearses else FULL, find_place(rehearses=task.rehearses)
    report, options = report_on(place.name), _options(task)
    print(f"e2e on {place.name} with {task.model or 'random weights'}", flush=True)
    report.check("a profile shows what the device did", partial(_profiles, task, options, place))
    report.check(f"{sizes.num_streams} mixed streams through kills", partial(_survives, task, options, sizes, report))
    return report


def _options(task: Task) -> tuple[str, ...]:
    """Of every executor: the model that was named, or random weights."""
    device = _TWIN_OPTIONS if task.rehearses else _GPU_OPTIONS
    if task.model is not None:
        return (*device, *_SIZES, "--model", task.model)
    config = replace(TINY_CONFIG, max_model_len=1024) if task.rehearses else replace(_DUMMY, max_model_len=8192)
    model = write_config(config, task.folder)
    return (*device, *_SIZES, "--load-format", "dummy", "--model", str(model))


def _profiles(task: Task, options: Sequence[str], place: Place) -> str:
    with running_system(task.folder, "profile", [*options, "--max-num-seqs", "64"]) as system:
        system.wait_until_ready(START_S)
        seen = shows_kernels(system, task.folder / "profile.json", is_cuda=place.is_cuda)
    system.check_ends()
    return seen


class _Lines:
    """Prints what happens to the processes and what faults there are; see `experiment.Observer`."""

    def on_event(self, event: ChildEvent) -> None:
        """Only ends are worth a line."""
        if isinstance(event, Exited) and event.last_error is not None:
            print(f"  {event.name} ended with {event.exit_code}: {event.last_error}", flush=True)

    def on_loaded(self, ledger: ChaosLedger) -> None:
        """The load begins."""

    def on_fault(self, window: FaultWindow) -> None:
        """A fault was done."""

    def on_settled(self, window: FaultWindow) -> None:
        """Everything is there again."""
        seconds = "gave up waiting" if window.settled_seconds is None else f"whole after {window.settled_seconds:.2f} s"
        print(f"  {window.kind} {window.detail}: {seconds}", flush=True)


def _survives(task: Task, options: Sequence[str], sizes: Sizes, report: Report) -> str:
    """Kills in turn while streams run, each compared, delta by delta, with the undisturbed output."""
    model, runner = (options[options.index(name) + 1] for name in ("--model", "--runner"))
    deployment = Deployment(
        model=model,
        runner=runner,
        host=LOOPBACK,
        ports=free_ports(2),
        shutdown_timeout_seconds=10,
        executor_options=("--max-num-seqs", "64", *options),
    )
    setting = Setting(
        deployment=deployment,
        kinds=_KINDS,
        num_streams=sizes.num_streams,
        max_tokens=sizes.max_tokens,
        timing=FaultTiming(pause_seconds=sizes.pause_s, settle_seconds=_LAST_FAULT_S),
    )
    experiment = Experiment(setting, _Lines())
    asyncio.run(_run(experiment, itertools.islice(itertools.cycle(_KINDS), sizes.num_faults), task))
    figures = figures_by_kind(experiment.ledger.windows)
    missing = {kind.value for kind in _KINDS} - {one.kind for one in figures}
    if missing:
        raise CheckFailedError(f"there was no time for a {' or a '.join(sorted(missing))}")
    print("\n".join(map(_line, figures)), flush=True)
    report.add([figure for one in figures for figure in _pauses_of(one)])
    if not all(one.is_clean for one in figures):
        raise CheckFailedError("; ".join(_faults_of(one, experiment.ledger) for one in figures if not one.is_clean))
    num_tokens = sum(one.num_tokens for one in figures)
    num_faults = sum(one.num_faults for one in figures)
    return f"{num_faults} kills, 0 of {num_tokens:,} tokens lost, doubled or changed"


async def _run(experiment: Experiment, kinds: "itertools.islice[FaultKind]", task: Task) -> None:
    """As many faults as there is time for."""
    least = 0.0 if task.rehearses else _LAST_FAULT_S
    in_time = itertools.takewhile(lambda _: task.seconds_left() > least, kinds)
    async with experiment:
        await experiment.system.during(experiment.campaign.run(in_time))
        await experiment.finish()


def _pauses_of(figures: KindFigures) -> list[Figure]:
    """Of streams that were delivering."""
    spread = figures.longest if figures.kind == UNDISTURBED else figures.stall
    what, shape = f"pause of a stream, {figures.kind}", f"{figures.num_faults} faults"
    if spread is None:
        return []
    return [Figure(name, what, shape, "s", system=value) for name, value in asdict(spread).items()]


def _line(figures: KindFigures) -> str:
    name = "nothing" if figures.kind == UNDISTURBED else f"{figures.num_faults} x {figures.kind}"
    stalls = figures.longest if figures.kind == UNDISTURBED else figures.stall
    times = "none" if stalls is None else f"p50 {stalls.p50:.3f}, p99 {stalls.p99:.3f}, longest {stalls.longest:.3f}"
    wrong = figures.mismatches
    flaws = f"{wrong.num_lost} lost, {wrong.num_doubled} doubled, {wrong.num_changed} changed"
    return f"  {name}: {figures.num_tokens:,} tokens, {flaws}, {figures.num_failed} failed; pauses in s: {times}"


def _faults_of(figures: KindFigures, ledger: ChaosLedger) -> str:
    first = figures.mismatches.first or ledger.first_failure or "the system did not come back"
    return f"{figures.kind}: {figures.num_failed} streams failed, first: {first}"


if __name__ == "__main__":
    sys.exit(run_stage("e2e", work))

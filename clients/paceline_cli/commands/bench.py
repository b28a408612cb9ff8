"""`paceline bench`: how fast a server answers, under loads that rise, come at random, or were recorded."""

import asyncio
import dataclasses
import gc
import json
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

import typer
from rich.console import Console

from paceline_cli.bench.clock import Clock
from paceline_cli.bench.errors import LibraryMissingError, ReportError, WorkloadError
from paceline_cli.bench.ladder import run_ladder
from paceline_cli.bench.live_view import make_live_view
from paceline_cli.bench.load import LoadGenerator
from paceline_cli.bench.metrics import Objectives, Summary, summarise
from paceline_cli.bench.paceline_target import PacelineTarget
from paceline_cli.bench.plan import WorkloadOptions
from paceline_cli.bench.prompts import PromptWriter
from paceline_cli.bench.records import RungRun
from paceline_cli.bench.report import Heading, result_fields
from paceline_cli.bench.rungs import Rung
from paceline_cli.bench.tables import print_ladder, print_rung
from paceline_cli.bench.targets import Served, Target
from paceline_cli.bench.workload import num_too_long
from paceline_cli.commands import bench_options
from paceline_cli.config import DEFAULT_TARGET, TargetOption, openai_api_key, token_of
from paceline_cli.failures import EXIT_INTERRUPTED, print_error, reported
from paceline_cli.options import ServedModelOption, TlsDirOption, TokenFileOption, tls_of
from paceline_client.requests import Sampling

_PIPE_WIDTH = 120


def bench(
    more_goodput: bench_options.MoreGoodputArgument = None,
    target: TargetOption = DEFAULT_TARGET,
    tls_dir: TlsDirOption = None,
    token_file: TokenFileOption = None,
    backend: bench_options.BackendOption = bench_options.ServerKind.PACELINE,
    base_url: bench_options.BaseUrlOption = None,
    model: ServedModelOption = None,
    max_concurrency: bench_options.MaxConcurrencyOption = None,
    request_rate: bench_options.RequestRateOption = None,
    burstiness: bench_options.BurstinessOption = None,
    trace: bench_options.TraceOption = None,
    scale_lengths: bench_options.ScaleLengthsOption = None,
    scale_rate: bench_options.ScaleRateOption = None,
    input_len: bench_options.InputLenOption = None,
    output_len: bench_options.OutputLenOption = None,
    shared_prefix_len: bench_options.SharedPrefixLenOption = None,
    num_prompts: bench_options.NumPromptsOption = None,
    num_warmups: bench_options.NumWarmupsOption = 1,
    seed: bench_options.BenchSeedOption = 0,
    ignore_eos: bench_options.IgnoreEosOption = True,
    temperature: bench_options.BenchTemperatureOption = 0.0,
    goodput: bench_options.GoodputOption = None,
    cost_per_hour: bench_options.CostOption = None,
    output: bench_options.OutputFileOption = None,
    plot: bench_options.PlotOption = None,
) -> None:
    """Measure how fast a server answers.

    By default a closed loop at 1, 4, 16, 32 and 64 requests at once; --request-rate makes it an open loop, --trace
    replays recorded traffic. No two prompts are alike unless a shared prefix is asked for. Ctrl-C ends it with what was
    measured so far.
    """
    with reported():
        if more_goodput and not goodput:
            raise WorkloadError(f"what is {' '.join(more_goodput)!r}? There is an argument too many")
        workload = WorkloadOptions(
            max_concurrency=max_concurrency,
            request_rate=request_rate,
            burstiness=burstiness,
            trace=trace,
            scale_lengths=scale_lengths,
            scale_rate=scale_rate,
            input_len=input_len,
            output_len=output_len,
            shared_prefix_len=shared_prefix_len,
            num_prompts=num_prompts,
            seed=seed,
        )
        rungs = workload.rungs()
        where = _Where(
            backend, target, base_url, model, Sampling(temperature=temperature), ignore_eos, tls_dir, token_file
        )
        results = _Results(Objectives.parse([*(goodput or ()), *(more_goodput or ())]), cost_per_hour, plot)
        with results.written_to(output):
            is_interrupted = asyncio.run(_measure(workload, rungs, where, num_warmups, results))
        _finish(results, is_interrupted=is_interrupted)


@dataclass(frozen=True, slots=True)
class _Where:
    backend: bench_options.ServerKind
    address: str
    base_url: str | None
    model: str | None
    sampling: Sampling
    ignore_eos: bool
    tls_dir: Path | None
    token_file: Path | None

    async def connect(self, clock: Clock) -> Target:
        if self.backend is bench_options.ServerKind.PACELINE:
            if self.base_url is not None:
                raise WorkloadError("--base-url belongs to --backend openai; a scheduler's address is --target")
            return await PacelineTarget.connect(
                self.address,
                self.model,
                self.sampling,
                ignore_eos=self.ignore_eos,
                now=clock.now,
                tls=tls_of(self.tls_dir),
                token=token_of(self.token_file),
            )
        if self.base_url is None:
            raise WorkloadError("--backend openai needs --base-url, such as http://localhost:8000/v1")
        try:
            from paceline_cli.bench.openai_target import OpenAITarget
        except ModuleNotFoundError as error:
            raise LibraryMissingError(error.name or "httpx2", "--backend openai") from None
        return await OpenAITarget.connect(
            self.base_url,
            self.model,
            self.sampling,
            api_key=openai_api_key(),
            ignore_eos=self.ignore_eos,
            now=clock.now,
        )


class _Results:
    """Takes each rung when it has ended: prints it, writes its line of JSON, keeps it for the plots."""

    def __init__(self, objectives: Objectives | None, cost_per_hour: float | None, plot: Path | None) -> None:
        if plot is not None:
            require_matplotlib()
        self._objectives = objectives
        self._cost_per_hour = cost_per_hour
        self._plot = plot
        self._heading: Heading | None = None
        self._file: TextIO | None = None
        self._console = Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = _PIPE_WIDTH
        self.rungs: list[tuple[RungRun, Summary]] = []

    @contextmanager
    def written_to(self, path: Path | None) -> Iterator[None]:
        """`ReportError` when it cannot be written."""
        if path is None:
            yield
            return
        try:
            # What is there is kept until there is something new.
            file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ReportError(f"--output: cannot write {path}: {error.strerror}") from None
        with file as self._file:
            yield

    def begin(self, heading: Heading) -> None:
        self._heading = heading
        if self._file is not None:
            self._file.truncate(0)

    def take(self, run: RungRun) -> None:
        assert self._heading is not None
        summary = summarise(run, self._objectives, self._cost_per_hour)
        self.rungs.append((run, summary))
        print_rung(self._console, run.rung.load.label, summary)
        if self._file is not None:
            self._file.write(json.dumps(result_fields(self._heading, run, summary)) + "\n")
            self._file.flush()

    def conclude(self) -> None:
        if len(self.rungs) > 1:
            print_ladder(self._console, [(run.rung.load.label, summary) for run, summary in self.rungs])
        if self._plot is not None and self.rungs and self._heading is not None:
            from paceline_cli.bench.plots import write_plots

            for path in write_plots(self._plot, f"{self._heading.model} ({self._heading.backend})", self.rungs):
                typer.echo(f"wrote {path}", err=True)


async def _measure(
    workload: WorkloadOptions, rungs: list[Rung], where: _Where, num_warmups: int, results: _Results
) -> bool:
    """Run all rungs; whether that was interrupted."""
    clock, stop = Clock(), asyncio.Event()
    target = await where.connect(clock)
    try:
        _warn_of_long_requests(rungs, target.served)
        # Without this a second run with the same seed would find the prompts of the first in the prefix cache.
        generator = LoadGenerator(
            target, PromptWriter(target.num_symbols, workload.seed), clock, cache_group=uuid.uuid4().hex
        )
        for number in range(num_warmups):
            await generator.warm_up(rungs[0].requests[0], number)
        results.begin(_heading(where, target.served, workload))
        # A collection of everything that was imported would look like a gap between tokens.
        gc.collect()
        gc.freeze()
        with _stopping_on_signals(stop):
            await run_ladder(generator, rungs, clock, stop=stop, make_view=make_live_view, on_ended=results.take)
        return stop.is_set()
    finally:
        await target.close()


def _finish(results: _Results, *, is_interrupted: bool) -> None:
    results.conclude()
    if is_interrupted:
        typer.echo("Interrupted; the figures are of what had ended by then.", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    if not any(summary.num_completed for _, summary in results.rungs):
        print_error("every request failed")
        raise typer.Exit(1)


@contextmanager
def _stopping_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """The first signal sets the event; a second one finds the interpreter's own handling and ends at once."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def handle() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def require_matplotlib() -> None:
    """`LibraryMissingError` where there is none: before the measurement rather than after it."""
    if find_spec("matplotlib") is None:
        raise LibraryMissingError("matplotlib", "--plot")


def _warn_of_long_requests(rungs: list[Rung], served: Served) -> None:
    if served.max_model_len is None:
        return
    num_requests = sum(num_too_long(rung.requests, served.max_model_len) for rung in rungs)
    if num_requests:
        typer.echo(
            f"warning: {num_requests:,} requests do not fit the model's context of {served.max_model_len:,} tokens "
            "and will fail; ask for shorter ones, or scale the trace with --scale-lengths",
            err=True,
        )


def _heading(where: _Where, served: Served, workload: WorkloadOptions) -> Heading:
    options = {name: value for name, value in dataclasses.asdict(workload).items() if value is not None}
    if workload.trace is not None:
        options["trace"] = str(workload.trace)
    options |= {"ignore_eos": where.ignore_eos, "temperature": where.sampling.temperature}
    return Heading(datetime.now(UTC).strftime("%Y%m%d-%H%M%S"), where.backend, served.model, options)

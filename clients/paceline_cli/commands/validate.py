"""`paceline validate`: whether a quantised checkpoint is good enough to serve in place of another."""

import asyncio
import enum
import json
import math
import os
import re
import signal
import tempfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paceline_cli.failures import reported
from paceline_cli.options import NumThreadsOption, RunnerOption
from paceline_cli.output import echo_json
from paceline_cli.progress import ProgressView, make_view
from paceline_cli.supervisor.child import start_child
from paceline_cli.supervisor.events import BecameReady, Program
from paceline_cli.supervisor.programs import find_script
from paceline_cli.supervisor.signals import StopSignals
from paceline_cli.supervisor.supervisor import ChildFailedError

# With less an interval of this kind promises more than it holds.
_LEAST_WINDOWS, _LEAST_PREDICTED = 16, 2000
_MAX_ADVISED_TOKENS = 10_000_000
_TITLES = {"data": "your data", "prose": "prose"}
_LADDER = "float8, W8A8, W4A16 in groups of 32, W4A16 in groups of 128; then a KV cache of 8 bits"

Texts = dict[str, dict[str, Any]]
"""Figures of each text, as `paceline_executor.validation` names them."""


_DataOption = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help='Your own prompts: a text, or JSON lines with "text" or "messages". Prose is read besides.',
    ),
]


class Verdict(enum.Enum):
    """Value: the exit code."""

    WITHIN = 0
    BEYOND = 1
    UNDECIDED = 10


def _share(text: str) -> float:
    found = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?) ?%?", text, re.ASCII)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a percentage; write it like 2%")
    return float(found[1]) / 100


def validate(
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="As --model of 'paceline up'.")],
    against: Annotated[
        str, typer.Option("--against", metavar="BASE", help="The model it stands for, best in 16 bits; named likewise.")
    ],
    data: _DataOption = None,
    max_perplexity_increase: Annotated[
        float,
        typer.Option("--max-perplexity-increase", metavar="PERCENT", parser=_share, help="What is good enough."),
    ] = "2%",  # type: ignore[assignment]  # typer parses it
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", min=64, help="Of each text, so many at most.")
    ] = 32768,
    quantization: Annotated[
        str | None, typer.Option("--quantization", metavar="KIND", help="The candidate's, as of 'paceline up'.")
    ] = None,
    base_quantization: Annotated[
        str, typer.Option("--base-quantization", metavar="KIND", help="The same of BASE: none is as exact as can be.")
    ] = "none",
    kv_cache_dtype: Annotated[
        str | None, typer.Option("--kv-cache-dtype", metavar="DTYPE", help="The candidate's, as of 'paceline up'.")
    ] = None,
    runner: RunnerOption = None,
    num_threads: NumThreadsOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Compare a quantised checkpoint with the one it was made from.

    One after the other is loaded as an executor would, and predicts the same text. It is good enough where the upper
    end of the 95 % interval of what perplexity increases by is within the bound, in your data and in prose.

    Exit codes: 0 within the bound, 1 beyond it, 10 undecided: more text would tell; 2 wrong use, 3 a model that cannot
    be read or compared, 5 too little memory, 7 a model that could not be fetched.
    """
    shared = _options(("--runner", runner), ("--num-threads", num_threads))
    of_base = _options(("--model", against), ("--quantization", base_quantization))
    of_candidate = _options(
        ("--model", candidate), ("--quantization", quantization), ("--kv-cache-dtype", kv_cache_dtype)
    )
    request = {"data": None if data is None else str(data.absolute()), "num_tokens": tokens}
    with reported(), tempfile.TemporaryDirectory(prefix="paceline-validate-") as name:
        script = find_script("paceline-executor")
        base = Program("base", (script, "validate-base", name, *of_base, *shared))
        compared = Program("candidate", (script, "validate-candidate", name, *of_candidate, *shared))
        # The first of the three only opens the candidate's files.
        found = _found(Path(name), request, [compared, base, compared])
        verdict = verdict_of(found["texts"], max_perplexity_increase)
        if as_json:
            bound = {"verdict": verdict.name.lower(), "max_perplexity_increase": max_perplexity_increase}
            echo_json({**bound, **found})
        else:
            _show(found, verdict, max_perplexity_increase)
    raise typer.Exit(verdict.value)


def _found(folder: Path, request: Mapping[str, object], programs: list[Program]) -> dict[str, Any]:
    now = datetime.now().isoformat()  # noqa: DTZ005  chat templates show the local time, to both the same
    (folder / "request.json").write_text(json.dumps({**request, "now": now}))
    signals = StopSignals()
    try:
        asyncio.run(_run(programs, make_view(), signals))
    except asyncio.CancelledError:
        raise typer.Exit(128 + (signals.received or signal.SIGINT)) from None
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def verdict_of(texts: Texts, bound: float) -> Verdict:
    """The worst of all texts'; beyond the bound is worse than undecided."""
    verdicts = [_verdict_of(text, bound) for text in texts.values()]
    return next(each for each in (Verdict.BEYOND, Verdict.UNDECIDED, Verdict.WITHIN) if each in verdicts)


def _verdict_of(text: dict[str, Any], bound: float) -> Verdict:
    if _is_short(text) or text["lower"] <= bound < text["upper"]:
        return Verdict.UNDECIDED
    return Verdict.WITHIN if text["upper"] <= bound else Verdict.BEYOND


def _is_short(text: dict[str, Any]) -> bool:
    return bool(text["num_windows"] < _LEAST_WINDOWS or text["num_predicted"] < _LEAST_PREDICTED)


def _options(*options: tuple[str, object]) -> tuple[str, ...]:
    return tuple(part for name, value in options if value is not None for part in (name, str(value)))


async def _run(programs: list[Program], view: ProgressView, signals: StopSignals) -> None:
    """One after the other, so that one model is in memory at a time. Raises ChildFailedError."""
    with signals.cancelling_this_task(on_second=lambda: None), view:
        for program in programs:
            child = await start_child(program, view)
            try:
                exit_code = await child.wait()
            except asyncio.CancelledError:
                child.kill()
                await child.wait()
                raise
            if exit_code != 0:
                error = ChildFailedError(program.name, exit_code, child.last_error(exit_code))
                error.exit_code = exit_code if exit_code > 1 else os.EX_SOFTWARE  # 1 is a verdict
                raise error
            view.on_event(BecameReady(program.name))


def _show(found: dict[str, Any], verdict: Verdict, bound: float) -> None:
    texts: Texts = found["texts"]
    table = Table(title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in texts:
        table.add_column(_TITLES[name], justify="right")
    rows = [_rows(text) for text in texts.values()]
    for label in rows[0]:
        table.add_row(label, *(row[label] for row in rows))
    console = Console(highlight=False, soft_wrap=True)
    for role in ("candidate", "base"):
        side = found[role]
        how = f"run with --quantization {side['computed']}, KV cache {side['kv_cache']}, {side['device']}"
        console.print(f"{role:<10} {side['model']} ({side['quantization'] or 'not quantised'}, {how})", markup=False)
    console.print()
    console.print(table)
    console.print(f"\n{_sentence(texts, verdict, bound)}", markup=False)


def _rows(text: dict[str, Any]) -> dict[str, str]:
    interval = "none" if text["lower"] is None else f"{text['lower']:+.2%} to {text['upper']:+.2%}"
    first = text["first_difference"]
    return {
        "perplexity of the base": f"{text['base_perplexity']:.3f}",
        "perplexity of the candidate": f"{text['perplexity']:.3f}",
        "increase": f"{text['increase']:+.2%}",
        "95 % interval of the increase": interval,
        "KL divergence in nats, mean": f"{text['mean_divergence']:.4f}",
        "KL divergence, 99th percentile": f"{text['p99_divergence']:.4f}",
        "same likeliest token": f"{text['same_best']:.1%}",
        "same greedy answers, up to 64 tokens": f"{text['num_same_answers']} of {text['num_answers']}",
        "earliest difference among them": "none" if first is None else f"token {first + 1}",
        "tokens predicted": f"{text['num_predicted']:,} in {text['num_windows']} windows",
    }


def _sentence(texts: Texts, verdict: Verdict, bound: float) -> str:
    """The verdict, why, and what to try next."""
    within = f"{bound * 100:.4g} %"
    if verdict is Verdict.WITHIN:
        most = max(text["upper"] for text in texts.values())
        pair = f"{most:+.2%} (the upper end of the interval), and {within} is allowed"
        return f"Good enough: perplexity increases by at most {pair}. Other formats, from safe to small: {_LADDER}."
    if verdict is Verdict.BEYOND:
        return (
            f"Not good enough: perplexity increases by more than {within}. To try next, one step back: from small to"
            " safe smaller groups (32), W8A8, float8. What the KV cache costs, --kv-cache-dtype float16 tells."
        )
    return f"Undecided: {' '.join(_what_is_missing(name, text, bound) for name, text in texts.items())}".rstrip()


def _what_is_missing(name: str, text: dict[str, Any], bound: float) -> str:
    if _verdict_of(text, bound) is not Verdict.UNDECIDED:
        return ""
    if _is_short(text):
        windows = f"{text['num_windows']} of {_LEAST_WINDOWS} windows of up to 512 tokens"
        tokens = f"{text['num_predicted']:,} of {_LEAST_PREDICTED:,} predicted ones"
        return f"{_TITLES[name]} has {windows} that are needed, and {tokens}: raise --tokens, or give more --data."
    half, gap = (text["upper"] - text["lower"]) / 2, abs(bound - text["increase"])
    needed = text["num_predicted"] * (half / gap) ** 2 if gap else math.inf
    if needed > _MAX_ADVISED_TOKENS:
        return f"{_TITLES[name]} lies on the bound: choose another."
    return f"the interval of {_TITLES[name]} holds the bound; about {float(f'{needed:.1e}'):,.0f} tokens would tell."

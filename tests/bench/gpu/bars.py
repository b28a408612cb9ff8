"""What is to be reached, as data, and the table that says whether it is. A bar that is missed is no failure of a run.

Knows figures, and those of a peer on the same GPU, out of a CSV file that a person names; not how they came about.
"""

import contextlib
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu import cells
from gpu.errors import GpuRunError
from gpu.report import Figure

Place = tuple[str, str, str]
"""Numbers, what, shape: as of a `Figure`."""
_COLUMNS = ("numbers", "what", "shape", "unit", "value")
_SLACK = 1.03
_MORE_IS_BETTER = ("output tok/s", "TFLOP/s")


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure to be reached, by the engine and by the whole system."""

    what: str
    limit: float
    is_least: bool  # or the most
    numbers: str = ""  # empty: of all
    shape: str = ""  # empty: at all

    def applies(self, figure: Figure) -> bool:
        return figure.what == self.what and self.numbers in ("", figure.numbers) and self.shape in ("", figure.shape)

    def is_reached(self, value: float) -> bool:
        return value >= self.limit if self.is_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'>=' if self.is_least else '<='} {self.limit:.4g}"


_ROWS = (1, 8, 32, 64, 128, 256)
_DECODES = {
    ("bf16", 512): (4.36, 4.8, 5.5, 6.19, 7.79, 12.1),
    ("bf16", 2048): (4.5, 5.18, 6.98, 9.13, 13.7, 23.9),
    ("fp8", 512): (2.89, 3.06, 3.82, 4.35, 6.09, 8.6),
    ("fp8", 2048): (3.4, 3.81, 4.69, 7.57, 10.8, 18.2),
}
_MIXED_SLACK = 1.05
_MIXED = {("bf16", 64, 512): 15.1, ("bf16", 64, 2048): 18.1, ("bf16", 255, 512): 22.5}
_MIXED |= {("fp8", 64, 512): 11.0, ("fp8", 64, 2048): 13.2, ("fp8", 255, 512): 16.0}
BARS = (
    Bar(cells.IDLE, 1.0, is_least=False),
    *(
        Bar(cells.DECODE, ms * _SLACK, is_least=False, numbers=numbers, shape=cells.ROWS.format(rows, context))
        for (numbers, context), times_ms in _DECODES.items()
        for rows, ms in zip(_ROWS, times_ms, strict=True)
    ),
    *(
        Bar(
            cells.MIXED.format(512),
            ms * _MIXED_SLACK,
            is_least=False,
            numbers=numbers,
            shape=cells.ROWS.format(rows, context),
        )
        for (numbers, rows, context), ms in _MIXED.items()
    ),
    Bar(cells.PREFILL_RATE, 637.0, is_least=True, numbers="bf16", shape="tokens 2048"),
    Bar(cells.PREFILL_RATE, 1015.0, is_least=True, numbers="fp8", shape="tokens 2048"),
    Bar(cells.START, 30.0, is_least=False),
    Bar(cells.WARM_START, 30.0, is_least=False),
    Bar(cells.LOADING, 25.0, is_least=True, shape="from the page cache"),
    Bar(cells.LOADING_SHARE, 0.7, is_least=True),
    Bar(cells.GAP_SPREAD.format(32, 65536), 3.0, is_least=False),
    Bar(cells.GAP.format(32, 8192), 30.0, is_least=False),
    Bar(cells.VERIFY_COST, 1.12, is_least=False, numbers="bf16", shape=cells.drafts_at(1, 3)),
    *(Bar(cells.SPEEDUP_SHARE.format(acceptance), 0.9, is_least=True) for acceptance in cells.ACCEPTANCES),
    Bar(cells.BEST_SPEEDUP.format(0.8), 1.6, is_least=True, numbers="bf16", shape=cells.drafting_rows(1, cells.MODEL)),
    Bar(cells.BEST_SPEEDUP.format(0.8), 2.2, is_least=True, numbers="bf16", shape=cells.drafting_rows(1, cells.HEAD)),
)
"""Decode steps within 3 % of what kernels alone reached, mixed ones within 5 %."""
PEER_BARS = {cells.DECODE: 1.05, cells.THROUGHPUT.format(256): 1.1, cells.PREFILL: 1.1}
"""How many times as good as the peer."""


def read_peer(path: Path | None) -> Mapping[Place, float]:
    """The figures by their places; none without a file. Values that are no number are passed by. Raises GpuRunError."""
    found: dict[Place, float] = {}
    if path is None:
        return found
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                if any(line.get(column) is None for column in _COLUMNS):
                    raise GpuRunError(f"{path} is no table of {', '.join(_COLUMNS)}: look at its first line")
                with contextlib.suppress(ValueError):
                    found[line["numbers"], line["what"], line["shape"]] = float(line["value"])
    except OSError as error:
        raise GpuRunError(f"{path} cannot be read: {error.strerror}") from error
    return found


def ratio(figure: Figure, value: float, peer: float) -> float:
    """How many times as good as the peer a value is."""
    return value / peer if figure.unit in _MORE_IS_BETTER else peer / value


def table(figures: Sequence[Figure], peers: Mapping[Place, float]) -> Iterator[str]:
    """A line per figure: engine, system, the peer, how many times as good the two are, and each bar's outcome."""
    yield f"{'numbers, what, shape':<82} {'engine':>9} {'system':>9} {'peer':>9} {'x':>5} {'x':>5}  bars"
    for figure in figures:
        peer = peers.get((figure.numbers, figure.what, figure.shape))
        values = (figure.engine, figure.system)
        shown = " ".join(_number(value) for value in (*values, peer))
        ratios = " ".join(_ratio(figure, value, peer) for value in values)
        name = f"{', '.join(filter(None, [f'{figure.numbers} {figure.what}', figure.shape]))} ({figure.unit})"
        yield f"{name:<82} {shown} {ratios}  {'; '.join(verdicts(figure, peer))}".rstrip()


def verdicts(figure: Figure, peer: float | None) -> Iterator[str]:
    """Whether each bar about a figure is reached, by each side that has a value."""
    sides = [
        (name, value) for name, value in (("engine", figure.engine), ("system", figure.system)) if value is not None
    ]
    for bar in BARS:
        if bar.applies(figure):
            yield f"{bar}: {', '.join(_verdict(name, bar.is_reached(value)) for name, value in sides)}"
    if figure.what == cells.DECODE and figure.engine is not None and figure.system is not None:
        yield f"<= {_SLACK:g} x engine: {_verdict('system', figure.system <= _SLACK * figure.engine)}"
    wanted = PEER_BARS.get(figure.what)
    if wanted is not None and peer is not None:
        outcomes = [_verdict(name, ratio(figure, value, peer) >= wanted) for name, value in sides]
        yield f">= {wanted:g} x peer: {', '.join(outcomes)}"


def _verdict(side: str, is_reached: bool) -> str:
    return f"{side} {'reached' if is_reached else 'missed'}"


def _number(value: float | None) -> str:
    return " " * 9 if value is None else f"{value:>9.4g}"


def _ratio(figure: Figure, value: float | None, peer: float | None) -> str:
    return " " * 5 if value is None or peer is None else f"{ratio(figure, value, peer):>5.2f}"

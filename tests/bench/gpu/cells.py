"""What is measured of engine and system, at which shapes, the most important first. Knows no way to measure.

Apart from both sides, so that their figures land in the same rows; words are those of the peers' files.
"""

import enum
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

DECODE = "decode step"
PREFILL = "prefill, one prompt to its first token"
PREFILL_RATE = "prefill, rate of products and attention"
IDLE = "GPU idle, by its own clock, of a decode step"
START = "process start to first token, dummy weights, nothing compiled before"
START_PHASE = "phase of a start, nothing compiled before"
WARM_START_PHASE = "phase of a start, compiled before"
MODEL, HEAD = "a 1B model", "an EAGLE-3 head"  # what drafts
ACCEPTANCES = (0.8, 0.6, 0.9)
VERIFY = "step that verifies drafts"
VERIFY_COST = "step that verifies drafts, in plain steps"
LOADING = "weights to the device"
LOADING_SHARE = "weights from the disk to the device, of what the disk gives"
WARM_START = "process start to first token, dummy weights, compiled before"
# With what is filled in: numbers of rows or requests, tokens, an acceptance.
ROWS = "rows {} context {}"  # a shape
MIXED = "step of decodes and a prompt of {}"
THROUGHPUT = "throughput, {} requests"
GAP = "largest gap of {} streams when a prompt of {} arrives"
GAP_SPREAD = "inter-token p99 of {} streams in their p50, while a prompt of {} arrives"
SPEEDUP = "speed-up by drafts of acceptance {:g}"  # tokens per second with drafts, in those without
BEST_SPEEDUP = f"best {SPEEDUP}"
SPEEDUP_SHARE = f"{SPEEDUP}, of what they should bring"  # by the expected number of tokens and the step's time
_ATTENTION_TOKENS = 16_384  # of a prompt whose attention takes as long as all else
_ARRIVAL_COST = 4  # of a prompt in small chunks


def spread_of(gaps: Sequence[float]) -> float:
    """Their 99th percentile in their median; 0 for fewer than two."""
    return statistics.quantiles(gaps, n=100)[98] / statistics.median(gaps) if len(gaps) > 1 else 0.0


def drafts_at(num_rows: int, num_drafts: int, drafter: str = "") -> str:
    """A shape of steps that verify. drafter: what computes the drafts; empty where nothing does."""
    return f"rows {num_rows} drafts {num_drafts}{_by(drafter)}"


def drafting_rows(num_rows: int, drafter: str) -> str:
    """The shapes of so many rows."""
    return f"rows {num_rows}{_by(drafter)}"


def _by(drafter: str) -> str:
    return drafter and f" by {drafter}"


def _prompt_cost(num_tokens: int) -> float:
    """In tokens of a short one."""
    return num_tokens * (1 + num_tokens / _ATTENTION_TOKENS)


@dataclass(frozen=True, slots=True)
class Shapes:
    """Every cell of one type of numbers."""

    decodes: tuple[tuple[int, int], ...]  # rows, context
    num_steps: int  # that are timed, of a decode
    prompts: tuple[int, ...]
    num_repeats: int  # of a prompt
    arrivals: tuple[int, ...]  # tokens of a prompt that comes beside
    arrival_rows: int
    arrival_context: int
    num_requests: int
    drafted: tuple[tuple[int, int], ...]  # rows, drafts of each; by the engine alone
    modelled: tuple[tuple[int, int], ...]  # the same, where a model computes the drafts
    drafted_context: int
    num_drafted_rounds: int  # each of a script of its own
    requests: tuple[tuple[int, int], ...]  # tokens in, out
    mixed: tuple[tuple[int, int], ...]  # rows that decode, context; by the engine alone
    mixed_prompt: int  # beside them, in one step

    @property
    def max_len(self) -> int:
        """Of any row."""
        longest = max(*self.prompts, *self.arrivals, *(context for _, context in self.decodes))
        return longest + 2 * self.num_steps + 512

    @property
    def max_rows(self) -> int:
        """At a time."""
        return max(self.num_requests, *(rows for rows, _ in self.decodes))

    @property
    def max_slots(self) -> int:
        """Of the KV cache, in use at a time."""
        decodes = (rows * (context + 2 * self.num_steps + 64) for rows, context in self.decodes)
        requests = (self.num_requests * (tokens_in + tokens_out + 64) for tokens_in, tokens_out in self.requests)
        arriving = self.arrival_rows * (self.arrival_context + 2048) + max(self.arrivals)
        return max(*decodes, *requests, arriving, max(self.prompts)) + 4096

    def cells(self) -> list["Cell"]:
        """The quick ones first: they are measured while there is time."""
        repeats, beside = 1 + self.num_repeats, self.arrival_rows * self.arrival_context
        cells = [
            *((rows * context, Cell(Kind.DECODE, rows, context)) for rows, context in self.decodes),
            *((repeats * _prompt_cost(tokens), Cell(Kind.PREFILL, tokens)) for tokens in self.prompts),
            *((self.num_requests * (put + got), Cell(Kind.THROUGHPUT, put, got)) for put, got in self.requests),
            *((beside + _ARRIVAL_COST * _prompt_cost(got), Cell(Kind.ARRIVAL, got)) for got in self.arrivals),
        ]
        return [cell for _, cell in sorted(cells, key=lambda pair: pair[0])]

    def engine_cells(self) -> list["Cell"]:
        """Of the engine alone, behind the others."""
        return [Cell(Kind.MIXED, rows, context) for rows, context in self.mixed]

    def figures_of(self, cell: "Cell") -> tuple[tuple[str, str, str], ...]:
        """What is measured in a cell, in this order: what, shape and unit of each figure."""
        first, second = cell.first, cell.second
        match cell.kind:
            case Kind.DECODE:
                shape = ROWS.format(first, second)
                return (DECODE, shape, "ms"), (IDLE, shape, "%")
            case Kind.PREFILL:
                shape = f"tokens {first}"
                return (PREFILL, shape, "ms"), (PREFILL_RATE, shape, "TFLOP/s")
            case Kind.ARRIVAL:
                rows, shape = self.arrival_rows, ROWS.format(self.arrival_rows, self.arrival_context)
                return (GAP.format(rows, first), shape, "ms"), (GAP_SPREAD.format(rows, first), shape, "x")
            case Kind.THROUGHPUT:
                return ((THROUGHPUT.format(self.num_requests), f"{first} in {second} out", "output tok/s"),)
            case Kind.MIXED:
                return ((MIXED.format(self.mixed_prompt), ROWS.format(first, second), "ms"),)


class Kind(enum.Enum):
    """What is done in a cell."""

    DECODE = "decode"
    PREFILL = "prefill"
    ARRIVAL = "arrival"
    THROUGHPUT = "throughput"
    MIXED = "decodes beside a prompt"


@dataclass(frozen=True, slots=True)
class Cell:
    """One of them with its sizes: rows and context, tokens of a prompt, or tokens in and out."""

    kind: Kind
    first: int
    second: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.first, self.second) if self.second else (self.first,)

    def __str__(self) -> str:
        return f"{self.kind.value} {self.first}{f'/{self.second}' if self.second else ''}"


FULL = Shapes(
    decodes=tuple(itertools.product((1, 8, 32, 64, 128, 256), (512, 2048))),
    num_steps=96,
    prompts=(2048, 512, 8192, 32768),
    num_repeats=5,
    arrivals=(8192, 65536),
    arrival_rows=32,
    arrival_context=512,
    num_requests=256,
    drafted=(
        *((1, drafts) for drafts in (3, 7, 5, 1)),
        *itertools.product((8, 32), (1, 3, 5, 7)),
        *((1, drafts) for drafts in (2, 4, 6)),
    ),
    modelled=tuple((1, drafts) for drafts in (4, 5, 3, 7, 2, 6, 1)),
    drafted_context=512,
    num_drafted_rounds=3,
    requests=((128, 128), (512, 512)),
    mixed=((64, 512), (64, 2048), (255, 512)),
    mixed_prompt=512,
)
TINY = Shapes(
    decodes=((1, 8), (3, 12)),
    num_steps=6,
    prompts=(8, 24),
    num_repeats=2,
    arrivals=(40,),
    arrival_rows=3,
    arrival_context=8,
    num_requests=4,
    drafted=((1, 3), (3, 1)),
    modelled=((1, 2),),
    drafted_context=8,
    num_drafted_rounds=1,
    requests=((6, 5),),
    mixed=((2, 8),),
    mixed_prompt=8,
)

"""The seam between rows and drafters. Knows rows by number, tokens, blocks, and how tokens are drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import structlog

from paceline_executor.errors import DeviceError
from paceline_executor.profiling.profiler import Profiler
from paceline_executor.runner.interface import Int32Array, SamplingColumns
from paceline_executor.runner.row_rules import NO_TOKENS, RowRules
from paceline_executor.runner.rule_columns import Ruled, rule_columns

_log = structlog.get_logger()

MAX_NUM_DRAFT_TOKENS = 8
"""Of a row and step; MEASURED.md says why."""


@dataclass(frozen=True, slots=True)
class WantingRow:
    """Its arrays may change after the call. block_ids: slots for the known tokens and `num_wanted` more."""

    row: int
    token_ids: Int32Array  # [num_known]
    num_wanted: int  # at most, and at least 1
    block_ids: Int32Array
    num_prompt: int  # tokens; the others are output
    rules: RowRules | None = None


@dataclass(frozen=True, slots=True)
class WantedDrafts:
    """sampling: of each row's next token, without rules; the draw behind a draft has the next offset. min_chance: that
    a draft is right, for it to pay. spare_ns: what computing that lacks of rows may take, beside their drafts.
    """

    rows: Sequence[WantingRow]
    sampling: SamplingColumns
    min_chance: float = 0.0
    spare_ns: int = 0


def draws_behind(
    sampling: SamplingColumns, places: Sequence[int], num_drafted: Int32Array, ruled: Sequence[Ruled | None]
) -> SamplingColumns:
    """How the target will draw what follows the drafts of rows. places: of the rows in `sampling`, in any order."""
    drawn = sampling.of(places)
    return replace(
        drawn,
        offsets=drawn.offsets + num_drafted,
        num_logprobs=np.full(len(places), -1, dtype=np.int32),
        rules=rule_columns(ruled),
    )


def block_tables(rows: Sequence[WantingRow], num_blocks: int) -> Int32Array:
    """[len(rows), num_blocks], -1 behind the blocks that a row has."""
    tables = np.full((len(rows), num_blocks), -1, dtype=np.int32)
    for table, row in zip(tables, rows, strict=True):
        blocks = row.block_ids[:num_blocks]
        table[: blocks.size] = blocks
    return tables


class Drafter(Protocol):
    """Until a row is forgotten, its known tokens only grow.

    A KV cache of its own lies under the target's block ids. Nobody tells of copies, shared prefixes, releases or
    preemptions: it keeps which tokens each block holds (`block_contents`), and computes what a row lacks.
    """

    def draft(self, wanted: WantedDrafts) -> Sequence[Int32Array]:
        """A guess, or none, for each row. The impossible is dropped. Logits are drawn from with the target's noise."""
        ...

    def forget(self, row: int) -> None:
        """Its next tokens are another request's."""
        ...


class NoDrafter:
    """See Drafter."""

    def draft(self, wanted: WantedDrafts) -> Sequence[Int32Array]:
        return [NO_TOKENS] * len(wanted.rows)

    def forget(self, row: int) -> None:
        """See Drafter."""


class TimedDrafter:
    def __init__(self, inner: Drafter, clock_ns: Callable[[], int], profiler: Profiler) -> None:
        self._inner = inner
        self._clock_ns = clock_ns
        self._profiler = profiler
        self._spent_ns = 0

    def draft(self, wanted: WantedDrafts) -> Sequence[Int32Array]:
        start_ns = self._clock_ns()
        try:
            with self._profiler.span("draft"):
                return self._inner.draft(wanted)
        except DeviceError:
            raise
        except Exception:
            return self._none(wanted)
        finally:
            self._spent_ns += self._clock_ns() - start_ns

    def _none(self, wanted: WantedDrafts) -> Sequence[Int32Array]:
        """Drafts are guesses: the step goes on without."""
        _log.exception("draft_failed", num_rows=len(wanted.rows))
        return NoDrafter().draft(wanted)

    def forget(self, row: int) -> None:
        self._inner.forget(row)

    def take_ns(self) -> int:
        """Since it was asked last."""
        spent_ns, self._spent_ns = self._spent_ns, 0
        return spent_ns

"""Which rows run in the next step of an executor, and with how many tokens. Decides; changes nothing.

One rule: every request moves its scheduled tokens towards its target under a token budget. Decodes go first, one token
each; prefill chunks fill what the budget leaves, running requests before waiting ones, oldest first. The budget is a
number of tokens and a time, predicted from what steps took.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from paceline_scheduler.core.blocks import BlockPool
from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.plan import NO_COLUMN
from paceline_scheduler.core.request import Int32Array, RequestKey
from paceline_scheduler.core.rows import RUNNING, RowColumns, RowIndex
from paceline_scheduler.core.step_time import StepTimeModel, num_chunk_pairs

MAX_PREEMPTIONS = 3
MAX_PLACED_BYTES = 8 << 20  # of prompts and contexts in one plan, which is one message
_MIN_CHUNK = 16
_NO_ROWS: RowIndex = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, slots=True)
class ExecutorView:
    """What the planner reads of an executor, after what had ended was let go."""

    description: ExecutorDescription
    rows: RowColumns
    pool: BlockPool
    step_time: StepTimeModel
    leaving_keys: Set[RequestKey]  # an older placement of these is still on its way out


@dataclass(frozen=True, slots=True)
class Waiting:
    """The requests that wait for the executor's model, oldest first, and how many of them it may admit."""

    line: Sequence[LiveRequest]
    share: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting request put on a row, with the cached blocks it shares and the number of new ones it needs."""

    live: LiveRequest
    row: int
    hits: tuple[int, ...]
    num_new_blocks: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What the next step does."""

    decode_rows: RowIndex
    growing_rows: RowIndex  # decoding rows that need their next block
    chunk_rows: RowIndex
    chunk_tokens: Int32Array
    preemptions: tuple[int, ...]
    admissions: tuple[Admission, ...]
    num_tokens: int
    num_pairs: int
    predicted_ns: int

    @property
    def is_empty(self) -> bool:
        """Tell whether there is nothing to run and nobody to preempt."""
        return not (len(self.decode_rows) or len(self.chunk_rows) or self.preemptions)


class StepBudget:
    """What a step may still take on, in tokens and in predicted time."""

    def __init__(self, step_time: StepTimeModel, limits: CoreLimits, max_num_tokens: int) -> None:
        self.num_tokens = 0
        self.num_pairs = 0
        self._step_time = step_time
        self._limits = limits
        self.max_num_tokens = max_num_tokens
        self._target_ns = limits.max_step_s * 1e9
        self._has_chunk = False

    def add_decodes(self, positions: Int32Array, max_num_decodes: int) -> int:
        """Take on one token at each position, as many as fit, in place of those of the call before; returns how many.

        At least one always fits.
        """
        fitting = min(len(positions), max_num_decodes)
        if not fitting:
            return 0
        num_pairs = int(positions[:fitting].sum()) + fitting
        max_ns = self._limits.max_step_s * 1e9
        if self._step_time.predict_ns(fitting, num_pairs) > max_ns:
            fitting, num_pairs = self._step_time.max_decodes_within(max_ns, positions[:fitting])
        self.num_tokens, self.num_pairs = fitting, num_pairs
        self._target_ns = min(self._limits.target_step_s, self._limits.max_step_s) * 1e9
        return fitting

    def add_chunk(self, start: int, wanted: int) -> int:
        """Take on up to `wanted` tokens from position `start`; returns how many.

        The first chunk of a step gets a few tokens beyond the target, else prompts would starve behind decodes; only a
        lone token gets a step past `max_step_s`.
        """
        room = min(wanted, self.max_num_tokens - self.num_tokens)
        if room <= 0:
            return 0
        spent = (self.num_tokens, self.num_pairs)
        count = self._step_time.max_tokens_within(self._target_ns, spent, start, room)
        least = min(_MIN_CHUNK, room)
        if count < least and not self._has_chunk:
            count = self._step_time.max_tokens_within(self._limits.max_step_s * 1e9, spent, start, least)
            count = max(count, 1 if self.num_tokens == 0 else 0)
        self._has_chunk = self._has_chunk or count > 0
        self.num_tokens += count
        self.num_pairs += num_chunk_pairs(start, count)
        return count

    def predicted_ns(self) -> int:
        """Return the expected time of the step as it stands."""
        return int(self._step_time.predict_ns(self.num_tokens, self.num_pairs))


def decide(view: ExecutorView, waiting: Waiting, limits: CoreLimits) -> Decision:
    """Return the next step."""
    rows = view.rows
    max_num_tokens = min(
        limits.max_num_batched_tokens or view.description.max_num_batched_tokens,
        view.description.max_num_batched_tokens,
    )
    budget = StepBudget(view.step_time, limits, max_num_tokens)
    decoding, prefilling = rows.decoding_and_prefilling()
    preemptions, decode_rows, num_available = _fit_blocks(view, decoding)
    decode_rows = _fit_budget(rows, decode_rows, budget, len(prefilling))
    growing_rows = decode_rows[rows.num_scheduled[decode_rows] >= rows.num_slots[decode_rows]]
    num_available -= len(growing_rows)
    chunks = _continue_prefills(rows, prefilling, preemptions, budget)
    # Who was just preempted for want of blocks would be the first to be admitted again.
    admissions = () if preemptions or not waiting.line else _admit(view, waiting, budget, num_available, chunks)
    return Decision(
        preemptions=preemptions,
        decode_rows=decode_rows,
        growing_rows=growing_rows,
        chunk_rows=np.array([row for row, _ in chunks], dtype=np.intp) if chunks else _NO_ROWS,
        chunk_tokens=np.array([count for _, count in chunks], dtype=np.int32) if chunks else NO_COLUMN,
        admissions=admissions,
        num_tokens=budget.num_tokens,
        num_pairs=budget.num_pairs,
        predicted_ns=budget.predicted_ns(),
    )


def _fit_blocks(view: ExecutorView, decode_rows: RowIndex) -> tuple[tuple[int, ...], RowIndex, int]:
    """Choose whom to preempt so that every decoding row left has the block it needs.

    Returns the preempted rows, the rows that decode and the number of blocks available before they grow.
    """
    rows, num_available = view.rows, view.pool.num_available
    if len(decode_rows) <= num_available:
        return (), decode_rows, num_available
    needy = rows.num_scheduled[decode_rows] >= rows.num_slots[decode_rows]
    if int(np.count_nonzero(needy)) <= num_available:
        return (), decode_rows, num_available
    preempted: list[int] = []
    needing = set(decode_rows[needy].tolist())
    for row in _victims(rows):
        if len(needing) <= num_available:
            break
        preempted.append(row)
        needing.discard(row)
        num_available += view.pool.num_freed_by(rows.tables[row])
    keep = ~np.isin(decode_rows, preempted)
    if len(needing) > num_available:
        # Even the oldest finds no block although its limit fits the pool: it sits out until the pool is repaired.
        keep &= ~np.isin(decode_rows, list(needing))
    return tuple(preempted), decode_rows[keep], num_available


def _victims(rows: RowColumns) -> list[int]:
    """Return who may be preempted, first the newest; never the oldest, so that somebody always gets on."""
    running = (rows.state == RUNNING).nonzero()[0]
    by_age = running[np.argsort(-rows.arrival_number[running], kind="stable")].tolist()[:-1]

    def is_protected(row: int) -> bool:
        live = rows.live[row]
        return live is not None and live.num_preemptions >= MAX_PREEMPTIONS

    return sorted(by_age, key=is_protected)


def _fit_budget(rows: RowColumns, decode_rows: RowIndex, budget: StepBudget, num_prefilling: int) -> RowIndex:
    """Take on as many decodes as fit; when not all do, those that waited longest for a step, so that all take turns."""
    max_num_decodes = budget.max_num_tokens
    if num_prefilling and len(decode_rows) > max_num_decodes - _MIN_CHUNK:
        # A bound on tokens so tight that decodes alone reach it must not keep prompts out for ever.
        max_num_decodes -= min(_MIN_CHUNK, max_num_decodes // 2)
    fitting = budget.add_decodes(rows.num_scheduled[decode_rows], max_num_decodes)
    if fitting < len(decode_rows):
        decode_rows = decode_rows[np.argsort(rows.last_turn[decode_rows], kind="stable")]
        fitting = budget.add_decodes(rows.num_scheduled[decode_rows], max_num_decodes)
    return decode_rows[:fitting]


def _continue_prefills(
    rows: RowColumns, prefilling: RowIndex, preempted: tuple[int, ...], budget: StepBudget
) -> list[tuple[int, int]]:
    """Return (row, num_tokens) of running requests that still have known tokens to compute."""
    chunks = []
    for row in prefilling.tolist():
        if row in preempted:
            continue
        start = int(rows.num_scheduled[row])
        count = budget.add_chunk(start, int(rows.target[row]) - start)
        if not count:
            break
        chunks.append((row, count))
    return chunks


def _admit(
    view: ExecutorView,
    waiting: Waiting,
    budget: StepBudget,
    num_available: int,
    chunks: list[tuple[int, int]],
) -> tuple[Admission, ...]:
    """Admit from the head of the queue while rows, blocks and budget last; appends the first chunks to `chunks`.

    A request is admitted only if its known tokens and one block for every running request fit now. The head is not
    passed over, since a big request would starve behind small ones, unless it could never run on this executor.
    """
    admissions: list[Admission] = []
    num_running = view.rows.num_running
    hit_before: set[int] = set()
    num_placed_bytes = 0
    free_rows = view.rows.free_rows(min(waiting.share, view.rows.num_free))
    for live in waiting.line if free_rows else ():
        if not live.fits(view.description):
            continue  # it waits for another executor: nothing here would ever make room for it
        num_placed_bytes += live.num_placed_bytes
        is_full = len(admissions) == len(free_rows) or (num_placed_bytes > MAX_PLACED_BYTES and len(admissions) > 0)
        if is_full or live.request.key in view.leaving_keys:
            break
        hits = find_hits(view, live)
        num_new = -(-live.num_known_tokens // view.description.block_size) - len(hits)
        revived = {block for block in hits if view.pool.is_cached(block)} - hit_before
        if num_new + len(revived) + num_running > num_available:
            break
        start = len(hits) * view.description.block_size
        count = budget.add_chunk(start, live.num_known_tokens - start)
        if not count:
            break
        row = free_rows[len(admissions)]
        chunks.append((row, count))
        admissions.append(Admission(live, row, hits, num_new))
        hit_before |= revived
        num_available -= num_new + len(revived)
        num_running += 1
    return tuple(admissions)


def find_hits(view: ExecutorView, live: LiveRequest) -> tuple[int, ...]:
    """Return the cached blocks of the longest known prefix; at least one token is left to compute."""
    if live.request.bypass_prefix_cache:
        return ()
    description = view.description
    chain = live.prefix_chain(description.tag_key, description.block_size)
    known = live.known_token_ids()
    hits = []
    for index in range((len(known) - 1) // description.block_size):
        block = view.pool.find(chain.key(index, known))
        if block is None:
            break
        hits.append(block)
    return tuple(hits)

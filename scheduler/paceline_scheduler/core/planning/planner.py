"""Which rows run in the next step of an executor, and with how many tokens. Decides; changes nothing.

One rule: every request moves its scheduled tokens towards its target under a token budget. Decodes go first, one token
each; prefill chunks fill what the budget leaves, running requests before waiting ones, the most urgent first; drafts
come last, where there is nothing but decodes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

import numpy as np

from paceline.plan.values import Int32Array
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest, Meant
from paceline_scheduler.core.planning.capacity import Capacity
from paceline_scheduler.core.planning.drafts import NO_DRAFTING, Drafting, fit_drafts
from paceline_scheduler.core.planning.preemption import fit_blocks, fit_shares
from paceline_scheduler.core.planning.resources import Blocker, Fit
from paceline_scheduler.core.planning.shares import Shares
from paceline_scheduler.core.planning.step_budget import MIN_CHUNK, StepBudget
from paceline_scheduler.core.planning.view import ExecutorView
from paceline_scheduler.core.suspects import in_order_of_trial
from paceline_scheduler.core.tables.rows import RowColumns, RowIndex

MAX_LOOKED_AT = 16
"""Of the queue, beyond those it admits."""

MAX_SCANNED = 4096
"""Of the queue, were all too large for this executor."""

MAX_MOVES = 8
"""Given away in one plan by a draining executor."""

_NO_ROWS: RowIndex = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, slots=True)
class Waiting:
    """The most urgent request is first. `was_left`: another executor was chosen for it before. `meant` are those chosen
    now. `takes`, of a draining executor, tells whether another one has room for a request that runs here.
    """

    queue: Sequence[LiveRequest]
    is_for_others: Callable[[LiveRequest], bool] = lambda _: False
    was_left: Callable[[LiveRequest], bool] = lambda _: False
    meant: Mapping[LiveRequest, Meant] = field(default_factory=dict)
    takes: Callable[[LiveRequest], bool] | None = None


_NOBODY = Waiting(())


@dataclass(frozen=True, slots=True)
class Admission:
    live: LiveRequest
    fit: Fit
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    rows: RowIndex  # that run, those that decode first
    num_scheduled_tokens: Int32Array  # of each
    num_draft_tokens: Int32Array  # of these; empty when nobody drafts
    min_draft_chance: float
    draft_spare_ns: int
    growing_rows: RowIndex  # once for each block they need
    preemptions: tuple[int, ...]
    share_preemptions: tuple[int, ...]  # because their tenants' shares of the blocks are full
    moves: tuple[int, ...]  # given away because the executor drains
    admissions: tuple[Admission, ...]
    left_to_others: tuple[LiveRequest, ...]  # could run here, better on another executor
    full_tenants: frozenset[str]  # whose requests were passed over, as their share is full
    num_tokens: int
    num_pairs: int
    predicted_ns: int

    @property
    def is_empty(self) -> bool:
        return not (len(self.rows) or self.preemptions or self.share_preemptions or self.moves)


def decide(view: ExecutorView, waiting: Waiting, limits: CoreLimits) -> Decision:
    """Suspects get steps of their own, before all others. After one failed alone, a step of others tells the request
    from the executor. Each suspect is tried once before any is tried twice.
    """
    if not (view.is_doubted or view.suspect_rows or any(live.is_suspect for live in waiting.queue[:1])):
        return _decide(view, *view.rows.decoding_and_prefilling(), waiting, limits)
    left: list[LiveRequest] = []
    for decision, is_done in _candidates(view, waiting, limits):
        left += decision.left_to_others  # also by candidates that are not chosen
        if is_done:
            return (
                decision if len(left) == len(decision.left_to_others) else replace(decision, left_to_others=tuple(left))
            )
    raise AssertionError("the last candidate is done")


def _candidates(view: ExecutorView, waiting: Waiting, limits: CoreLimits) -> Iterator[tuple[Decision, bool]]:
    """In order of preference, each with whether it has anything to do."""
    decoding, prefilling = view.rows.decoding_and_prefilling()
    if view.is_doubted:
        without = _without_suspects(view, decoding, prefilling, waiting, limits)
        yield without, without.num_tokens > 0
    on_rows = [(row, view.rows.live_on(row)) for row in sorted(view.suspect_rows)]
    suspects = list(takewhile(lambda live: live.is_suspect, islice(waiting.queue, MAX_LOOKED_AT)))
    for row, live in in_order_of_trial(on_rows, suspects) if on_rows or suspects else ():
        if row is None:
            alone = _decide(view, _NO_ROWS, _NO_ROWS, replace(waiting, queue=[live], takes=None), limits)
        else:
            alone = _decide(view, decoding[decoding == row], prefilling[prefilling == row], _NOBODY, limits)
        yield alone, not alone.is_empty
    yield _decide(view, decoding, prefilling, waiting, limits), True


def _without_suspects(
    view: ExecutorView, decoding: RowIndex, prefilling: RowIndex, waiting: Waiting, limits: CoreLimits
) -> Decision:
    suspects = sorted(view.suspect_rows)
    decoding, prefilling = (index[~np.isin(index, suspects)] for index in (decoding, prefilling))
    queue = [live for live in islice(waiting.queue, MAX_SCANNED) if not live.is_suspect]
    return _decide(view, decoding, prefilling, replace(waiting, queue=queue), limits)


@dataclass(frozen=True, slots=True)
class _Room:
    """What those that run leave of the step and the blocks, once they decode or gave way."""

    budget: StepBudget
    shares: Shares
    moves: tuple[int, ...]
    share_preemptions: tuple[int, ...]
    preemptions: tuple[int, ...]
    decode_rows: RowIndex
    growing_rows: RowIndex
    num_available: int  # blocks
    num_sitting_out: int  # that could decode as well
    prefilling: RowIndex

    @property
    def leaving(self) -> tuple[int, ...]:
        return (*self.moves, *self.share_preemptions)


@dataclass(frozen=True, slots=True)
class _Work:
    """What of prompts is computed beside the decodes."""

    chunks: Sequence[tuple[int, int]] = ()  # rows and tokens
    admissions: tuple[Admission, ...] = ()
    left_to_others: tuple[LiveRequest, ...] = ()
    full_tenants: frozenset[str] = frozenset()


_NO_WORK = _Work()


def _decide(
    view: ExecutorView, decoding: RowIndex, prefilling: RowIndex, waiting: Waiting, limits: CoreLimits
) -> Decision:
    room = _room(view, decoding, prefilling, waiting, limits)
    # Who was just preempted would be admitted again first.
    queue = () if room.preemptions else waiting.queue
    work = _work(view, room, queue, waiting, limits) if queue or len(room.prefilling) else _NO_WORK
    drafting = _drafting(view, room, work, queue, limits)
    rows, num_scheduled, num_drafts = _columns(room.decode_rows, drafting.num_drafts, work.chunks)
    return Decision(
        rows=rows,
        num_scheduled_tokens=num_scheduled,
        num_draft_tokens=num_drafts,
        min_draft_chance=drafting.min_chance,
        draft_spare_ns=drafting.spare_ns,
        growing_rows=np.concatenate((room.growing_rows, drafting.growing_rows)),
        preemptions=room.preemptions,
        share_preemptions=room.share_preemptions,
        moves=room.moves,
        admissions=work.admissions,
        left_to_others=work.left_to_others,
        full_tenants=work.full_tenants,
        num_tokens=room.budget.num_tokens,
        num_pairs=room.budget.num_pairs,
        predicted_ns=room.budget.predicted_ns(),
    )


def _room(view: ExecutorView, decoding: RowIndex, prefilling: RowIndex, waiting: Waiting, limits: CoreLimits) -> _Room:
    rows, description = view.rows, view.description
    most = description.max_num_batched_tokens
    max_num_tokens = min(limits.max_num_batched_tokens or most, most)
    budget = StepBudget(view.step_time, limits, max_num_tokens, description.graph_tokens)
    moves = () if waiting.takes is None else _moves(rows, waiting.takes)
    if moves:
        decoding, prefilling = (index[~np.isin(index, moves)] for index in (decoding, prefilling))
    shares = Shares(rows, description, limits.tenants)
    share_preemptions, decode_rows = fit_shares(view, shares, decoding, moves)
    preemptions, decode_rows, num_available = fit_blocks(view, decode_rows, (*moves, *share_preemptions))
    decode_rows = _fit_budget(rows, decode_rows, budget, len(prefilling))
    growing_rows = decode_rows[rows.num_scheduled[decode_rows] >= rows.num_slots[decode_rows]]
    shares.grow(growing_rows.tolist())
    return _Room(
        budget=budget,
        shares=shares,
        moves=moves,
        share_preemptions=share_preemptions,
        preemptions=preemptions,
        decode_rows=decode_rows,
        growing_rows=growing_rows,
        num_available=num_available - len(growing_rows),
        num_sitting_out=len(decoding) - len(decode_rows),
        prefilling=prefilling,
    )


def _work(view: ExecutorView, room: _Room, queue: Sequence[LiveRequest], waiting: Waiting, limits: CoreLimits) -> _Work:
    rows, prefilling = view.rows, room.prefilling
    given_up = (*room.preemptions, *room.share_preemptions)
    if not queue:
        return _Work(_continue_prefills(rows, prefilling, given_up, room.budget))
    capacity = Capacity(view, limits, room.shares, len(room.growing_rows))
    capacity.give_back(room.leaving)
    admitting = _Admissions(capacity, waiting, room.budget, _tenants_of(rows, room.share_preemptions))
    num_first = _num_ahead(rows, prefilling, queue)
    if num_first:
        admitting.admit(queue[:num_first])
    chunks = _continue_prefills(rows, prefilling, given_up, room.budget)
    if len(admitting.admissions) + admitting.num_passed_over == num_first:
        admitting.admit(queue[num_first:] if num_first else queue)
    chunks += [(admission.fit.row, admission.num_tokens) for admission in admitting.admissions]
    return _Work(
        chunks, tuple(admitting.admissions), tuple(admitting.left_to_others), frozenset(admitting.full_tenants)
    )


def _drafting(
    view: ExecutorView, room: _Room, work: _Work, queue: Sequence[LiveRequest], limits: CoreLimits
) -> Drafting:
    if not (limits.max_num_draft_tokens and np.count_nonzero(view.rows.max_drafts)):
        return NO_DRAFTING
    is_busy = room.preemptions or room.share_preemptions or view.suspect_rows or view.is_doubted
    if is_busy or not _all_decode(room, work):
        return NO_DRAFTING
    # A block for each row's next token stays, and all that somebody waits for.
    num_spare = 0 if queue else max(0, min(room.num_available - len(room.decode_rows), room.shares.least_room()))
    return fit_drafts(view, room.decode_rows, room.growing_rows, num_spare, room.budget, limits)


def _all_decode(room: _Room, work: _Work) -> bool:
    return not work.chunks and not len(room.prefilling) and not room.num_sitting_out


def _columns(
    decode_rows: RowIndex, drafts: Int32Array, chunks: Sequence[tuple[int, int]]
) -> tuple[RowIndex, Int32Array, Int32Array]:
    """Returns rows, their numbers of tokens, and how many of these are drafts."""
    counts = 1 + drafts if len(drafts) else np.ones(len(decode_rows), dtype=np.int32)
    if not chunks:
        return decode_rows, counts, drafts
    chunk_tokens = np.array([count for _, count in chunks], dtype=np.int32)
    rows = np.concatenate((decode_rows, np.array([row for row, _ in chunks], dtype=np.intp)))
    if len(drafts):
        drafts = np.concatenate((drafts, np.zeros_like(chunk_tokens)))
    return rows, np.concatenate((counts, chunk_tokens)), drafts


def _moves(rows: RowColumns, takes: Callable[[LiveRequest], bool]) -> tuple[int, ...]:
    """Starts with the rows that are cheapest to compute again."""
    running = rows.running()
    by_length = running[np.argsort(rows.num_known[running], kind="stable")][:MAX_MOVES].tolist()
    return tuple(row for row in by_length if takes(rows.live_on(row).off_row_with(rows.output_token_ids(row))))


def _tenants_of(rows: RowColumns, index: Sequence[int]) -> set[str]:
    return {rows.live_on(row).request.key.tenant for row in index}


def _num_ahead(rows: RowColumns, prefilling: RowIndex, queue: Sequence[LiveRequest]) -> int:
    """More urgent than every running request with known tokens to compute."""
    if not len(prefilling):
        return 0
    first = prefilling[0]
    key = (float(rows.urgency[first]), int(rows.arrival_number[first]))
    return sum(1 for _ in takewhile(lambda live: live.queue_key < key, queue))


def _fit_budget(rows: RowColumns, decode_rows: RowIndex, budget: StepBudget, num_prefilling: int) -> RowIndex:
    """If not all fit, those that waited longest."""
    max_num_decodes = budget.max_num_tokens
    if num_prefilling and len(decode_rows) > max_num_decodes - MIN_CHUNK:
        # So tight a bound must not keep prompts out for ever.
        max_num_decodes -= min(MIN_CHUNK, max_num_decodes // 2)
    fitting = budget.add_decodes(rows.num_scheduled[decode_rows], max_num_decodes)
    if fitting < len(decode_rows):
        decode_rows = decode_rows[np.argsort(rows.last_turn[decode_rows], kind="stable")]
        fitting = budget.add_decodes(rows.num_scheduled[decode_rows], max_num_decodes)
    return decode_rows[:fitting]


def _continue_prefills(
    rows: RowColumns, prefilling: RowIndex, preempted: tuple[int, ...], budget: StepBudget
) -> list[tuple[int, int]]:
    chunks = []
    for row in prefilling.tolist():
        if row in preempted:
            continue
        start = int(rows.num_scheduled[row])
        count = budget.add_chunk(start, _wanted(rows, row))
        if not count:
            break
        chunks.append((row, count))
    return chunks


def _wanted(rows: RowColumns, row: int) -> int:
    return min(int(rows.target[row] - rows.num_scheduled[row]), rows.live_on(row).largest_chunk)


class _Admissions:
    def __init__(
        self,
        capacity: Capacity,
        waiting: Waiting,
        budget: StepBudget,
        full_tenants: set[str],
    ) -> None:
        self.admissions: list[Admission] = []
        self.left_to_others: list[LiveRequest] = []
        self.full_tenants = full_tenants
        self.num_passed_over = 0
        self._capacity = capacity
        self._waiting = waiting
        self._budget = budget
        self._num_passed = 0

    def admit(self, queue: Sequence[LiveRequest]) -> None:
        """Stops at a head without room: a big request would starve behind small ones."""
        if self._capacity.shortage:
            return
        for live in islice(queue, MAX_SCANNED):
            if self._num_passed > MAX_LOOKED_AT:
                return
            if live.request.key.tenant in self.full_tenants or self._waiting.was_left(live):
                self.num_passed_over += 1
                continue
            if not self._capacity.could_ever_hold(live):
                continue
            if self._waiting.is_for_others(live):
                self._num_passed += 1
                self.left_to_others.append(live)
                continue
            if live.is_suspect and self._budget.num_tokens:
                return
            fit = self._capacity.fit(live)
            if isinstance(fit, Blocker):
                if fit.is_of_tenant:
                    self.full_tenants.add(live.request.key.tenant)
                    self.num_passed_over += 1
                    continue
                if not fit.is_own:
                    return
                self._num_passed += 1
            elif not self._place(live, fit) or live.is_suspect or self._capacity.shortage:
                return

    def _place(self, live: LiveRequest, fit: Fit) -> bool:
        wanted = min(live.num_known_tokens - fit.blocks.num_cached_tokens, live.largest_chunk)
        count = self._budget.add_chunk(fit.blocks.num_cached_tokens, wanted)
        if count:
            self.admissions.append(Admission(live, fit, count))
            self._capacity.take(live, fit)
        return count > 0

"""Which rows run in the next step of an executor, and with how many tokens. Decides; changes nothing.

One rule: every request moves its scheduled tokens towards its target under a token budget. Decodes go first, one token
each; prefill chunks fill what the budget leaves, running requests before waiting ones, the most urgent first; drafts
come last, where there is nothing but decodes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

import numpy as np

from paceline.plan.values import Int32Array
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest, Meant
from paceline_scheduler.core.planning.capacity import Blocker, Capacity, ExecutorView, Fit
from paceline_scheduler.core.planning.drafts import NO_DRAFTING, DraftPlan, fit_drafts
from paceline_scheduler.core.planning.preemption import fit_blocks, fit_shares
from paceline_scheduler.core.planning.shares import Shares
from paceline_scheduler.core.planning.step_budget import MIN_CHUNK, StepBudget
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


class Room:
    """What those who run leave of the step and of the blocks, when they decode or give way."""

    def __init__(
        self, view: ExecutorView, decoding: RowIndex, prefilling: RowIndex, waiting: Waiting, limits: CoreLimits
    ) -> None:
        rows, most = view.rows, view.description.max_num_batched_tokens
        max_num_tokens = min(limits.max_num_batched_tokens or most, most)
        self.budget = StepBudget(view.step_time, limits, max_num_tokens, view.description.graph_tokens)
        self.shares = Shares(rows, view.description, limits.tenants)
        # Given away because the executor drains.
        self.moves = () if waiting.takes is None else _moves(rows, waiting.takes)
        if self.moves:
            decoding, prefilling = (index[~np.isin(index, self.moves)] for index in (decoding, prefilling))
        # Because their tenants' shares of the blocks are full, and because all blocks are taken.
        self.share_preemptions, decode_rows = fit_shares(view, self.shares, decoding, self.moves)
        self.leaving = (*self.moves, *self.share_preemptions)
        self.preemptions, decode_rows, num_available = fit_blocks(view, decode_rows, self.leaving)
        self.decode_rows = _fit_budget(rows, decode_rows, self.budget, len(prefilling))
        self.growing_rows = self.decode_rows[rows.num_scheduled[self.decode_rows] >= rows.num_slots[self.decode_rows]]
        self.shares.grow(self.growing_rows.tolist())
        self.num_available = num_available - len(self.growing_rows)
        self.all_decode = not len(prefilling) and len(self.decode_rows) == len(decoding)
        self.prefilling = prefilling
        # Who was just preempted would be admitted again first.
        self.queue = () if self.preemptions else waiting.queue


class Work:
    """What is computed of prompts beside the decodes: chunks of those who run, and of newcomers."""

    def __init__(self, view: ExecutorView, room: Room) -> None:
        self.chunks: list[tuple[int, int]] = []  # rows and tokens
        self.admissions: list[Admission] = []
        self.left_to_others: list[LiveRequest] = []  # could run here, better on another executor
        self.full_tenants: set[str] = set()  # whose requests were passed over, as their share is full
        self.num_passed_over = 0
        self._num_passed = 0
        self._view = view
        self._room = room

    def continue_prefills(self) -> None:
        rows, room = self._view.rows, self._room
        for row in room.prefilling.tolist():
            if row in room.preemptions or row in room.share_preemptions:
                continue
            start = int(rows.num_scheduled[row])
            count = room.budget.add_chunk(start, min(int(rows.target[row]) - start, rows.live_on(row).largest_chunk))
            if not count:
                break
            self.chunks.append((row, count))

    def admit(self, queue: Iterable[LiveRequest], capacity: Capacity, waiting: Waiting) -> None:
        """Stops at a head without room: a big request would starve behind small ones."""
        if capacity.shortage:
            return
        for live in islice(queue, MAX_SCANNED):
            if self._num_passed > MAX_LOOKED_AT:
                return
            if live.request.key.tenant in self.full_tenants or waiting.was_left(live):
                self.num_passed_over += 1
                continue
            if not live.fits(self._view.description):
                continue
            if waiting.is_for_others(live):
                self._num_passed += 1
                self.left_to_others.append(live)
                continue
            if live.is_suspect and self._room.budget.num_tokens:
                return
            fit = capacity.fit(live)
            if isinstance(fit, Blocker):
                if fit.is_of_tenant:
                    self.full_tenants.add(live.request.key.tenant)
                    self.num_passed_over += 1
                    continue
                if not fit.is_own:
                    return
                self._num_passed += 1
            elif not self._place(live, fit, capacity) or live.is_suspect or capacity.shortage:
                return

    def _place(self, live: LiveRequest, fit: Fit, capacity: Capacity) -> bool:
        wanted = min(live.num_known_tokens - fit.blocks.num_cached_tokens, live.largest_chunk)
        count = self._room.budget.add_chunk(fit.blocks.num_cached_tokens, wanted)
        if count:
            self.admissions.append(Admission(live, fit, count))
            capacity.take(live, fit)
        return count > 0


@dataclass(frozen=True, slots=True)
class Decision:
    """`room.budget` has what the step computes, and how long that is expected to take."""

    room: Room
    work: Work
    drafting: DraftPlan
    rows: RowIndex  # that run, those that decode first
    num_scheduled_tokens: Int32Array  # of each
    num_draft_tokens: Int32Array  # of these; empty when nobody drafts

    @property
    def is_empty(self) -> bool:
        return not (len(self.rows) or self.room.preemptions or self.room.leaving)


def decide(view: ExecutorView, waiting: Waiting, limits: CoreLimits) -> Decision:
    """Suspects get steps of their own, before all others. After one failed alone, a step of others tells the request
    from the executor. Each suspect is tried once before any is tried twice.
    """
    if not (view.is_doubted or view.suspect_rows or any(live.is_suspect for live in waiting.queue[:1])):
        return _decide(view, *view.rows.decoding_and_prefilling(), waiting, limits)
    left: list[LiveRequest] = []
    for decision, is_done in _candidates(view, waiting, limits):
        left += decision.work.left_to_others
        if is_done:
            decision.work.left_to_others = left  # also by candidates that are not chosen
            return decision
    raise AssertionError("the last candidate is done")


def _candidates(view: ExecutorView, waiting: Waiting, limits: CoreLimits) -> Iterator[tuple[Decision, bool]]:
    """In order of preference, each with whether it has anything to do."""
    decoding, prefilling = view.rows.decoding_and_prefilling()
    if view.is_doubted:
        without = _without_suspects(view, decoding, prefilling, waiting, limits)
        yield without, without.room.budget.num_tokens > 0
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


def _decide(
    view: ExecutorView, decoding: RowIndex, prefilling: RowIndex, waiting: Waiting, limits: CoreLimits
) -> Decision:
    room = Room(view, decoding, prefilling, waiting, limits)
    work = _work(view, room, waiting, limits)
    drafting = _drafting(view, room, work, limits)
    return Decision(room, work, drafting, *_columns(room.decode_rows, drafting.num_drafts, work.chunks))


def _work(view: ExecutorView, room: Room, waiting: Waiting, limits: CoreLimits) -> Work:
    work, rows, queue = Work(view, room), view.rows, room.queue
    if not queue:
        work.continue_prefills()
        return work
    work.full_tenants.update(rows.live_on(row).request.key.tenant for row in room.share_preemptions)
    capacity = Capacity(view, limits, room.shares, len(room.growing_rows))
    capacity.give_back(room.leaving)
    num_first = _num_ahead(rows, room.prefilling, queue)
    work.admit(queue[:num_first], capacity, waiting)
    work.continue_prefills()
    if len(work.admissions) + work.num_passed_over == num_first:
        work.admit(islice(queue, num_first, None), capacity, waiting)
    work.chunks += [(admission.fit.row, admission.num_tokens) for admission in work.admissions]
    return work


def _drafting(view: ExecutorView, room: Room, work: Work, limits: CoreLimits) -> DraftPlan:
    if not (limits.max_num_draft_tokens and np.count_nonzero(view.rows.max_drafts)):
        return NO_DRAFTING
    is_busy = room.preemptions or room.share_preemptions or view.suspect_rows or view.is_doubted
    if is_busy or not (len(room.decode_rows) and _all_decode(room, work)):
        return NO_DRAFTING
    # A block for each row's next token stays, and all that somebody waits for.
    num_spare = 0 if room.queue else max(0, min(room.num_available - len(room.decode_rows), room.shares.least_room()))
    return fit_drafts(view, room.decode_rows, room.growing_rows, num_spare, room.budget, limits)


def _all_decode(room: Room, work: Work) -> bool:
    return room.all_decode and not work.chunks


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

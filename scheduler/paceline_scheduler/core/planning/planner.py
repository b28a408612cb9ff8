"""Which rows run in the next step of an executor, and with how many tokens. Decides; changes nothing.

One rule: every request moves its scheduled tokens towards its target under a token budget. Decodes go first, one token
each; prefill chunks fill what the budget leaves, running requests before waiting ones, the most urgent first; drafts
come last, where there is nothing but decodes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile

import numpy as np

from paceline.plan.values import NO_COLUMN, Int32Array
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest, Meant
from paceline_scheduler.core.planning.capacity import Blocker, Capacity, ExecutorView, Fit
from paceline_scheduler.core.planning.drafts import NO_DRAFTING, fit_drafts
from paceline_scheduler.core.planning.preemption import fit_blocks, fit_shares, live_on
from paceline_scheduler.core.planning.shares import Shares
from paceline_scheduler.core.planning.step_budget import MIN_CHUNK, StepBudget
from paceline_scheduler.core.suspects import in_order_of_trial
from paceline_scheduler.core.tables.rows import RUNNING, RowColumns, RowIndex

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
    row: int
    fit: Fit
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Decision:
    decode_rows: RowIndex
    decode_drafts: Int32Array  # beside its one token; empty when nobody drafts
    min_draft_chance: float
    draft_spare_ns: int
    growing_rows: RowIndex  # once for each block they need
    chunk_rows: RowIndex
    chunk_tokens: Int32Array
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
        given_up = self.preemptions or self.share_preemptions or self.moves
        return not (len(self.decode_rows) or len(self.chunk_rows) or given_up)


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
    on_rows = [(row, live_on(view.rows, row)) for row in sorted(view.suspect_rows)]
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


def _all_decode(
    decode_rows: RowIndex, decoding: RowIndex, prefilling: RowIndex, chunks: Sequence[tuple[int, int]]
) -> bool:
    return not chunks and not len(prefilling) and len(decode_rows) == len(decoding)


def _decide(
    view: ExecutorView, decoding: RowIndex, prefilling: RowIndex, waiting: Waiting, limits: CoreLimits
) -> Decision:
    rows = view.rows
    max_num_tokens = min(
        limits.max_num_batched_tokens or view.description.max_num_batched_tokens,
        view.description.max_num_batched_tokens,
    )
    budget = StepBudget(view.step_time, limits, max_num_tokens, view.description.graph_tokens)
    moves = () if waiting.takes is None else _moves(rows, waiting.takes)
    if moves:
        decoding, prefilling = (index[~np.isin(index, moves)] for index in (decoding, prefilling))
    shares = Shares(rows, view.description, limits.tenants)
    share_preemptions, decode_rows = fit_shares(view, shares, decoding, moves)
    preemptions, decode_rows, num_available = fit_blocks(view, decode_rows, (*moves, *share_preemptions))
    decode_rows = _fit_budget(rows, decode_rows, budget, len(prefilling))
    growing_rows = decode_rows[rows.num_scheduled[decode_rows] >= rows.num_slots[decode_rows]]
    num_available -= len(growing_rows)
    shares.grow(growing_rows.tolist())
    # Who was just preempted would be admitted again first.
    queue = () if preemptions else waiting.queue
    admitting = None
    if queue:
        room = Capacity(view, num_available, limits, shares)
        admitting = _Admissions(room, waiting, budget, _tenants_of(rows, share_preemptions))
    num_first = _num_ahead(rows, prefilling, queue)
    if admitting is not None and num_first:
        admitting.admit(queue[:num_first])
    chunks = _continue_prefills(rows, prefilling, (*preemptions, *share_preemptions), budget)
    if admitting is not None and len(admitting.admissions) + admitting.num_passed_over == num_first:
        admitting.admit(islice(queue, num_first, None))
    admissions = () if admitting is None else tuple(admitting.admissions)
    chunks += [(admission.row, admission.num_tokens) for admission in admissions]
    drafting = NO_DRAFTING
    if limits.max_num_draft_tokens and np.count_nonzero(rows.max_drafts):
        is_busy = preemptions or share_preemptions or view.suspect_rows or view.is_doubted
        if not is_busy and _all_decode(decode_rows, decoding, prefilling, chunks):
            # A block for each row's next token stays, and all that somebody waits for.
            num_spare = 0 if queue else max(0, min(num_available - len(decode_rows), shares.least_room()))
            drafting = fit_drafts(view, decode_rows, growing_rows, num_spare, budget, limits)
            growing_rows = np.concatenate((growing_rows, drafting.growing_rows))
    return Decision(
        preemptions=preemptions,
        share_preemptions=share_preemptions,
        moves=moves,
        decode_rows=decode_rows,
        decode_drafts=drafting.num_drafts,
        min_draft_chance=drafting.min_chance,
        draft_spare_ns=drafting.spare_ns,
        growing_rows=growing_rows,
        chunk_rows=np.array([row for row, _ in chunks], dtype=np.intp) if chunks else _NO_ROWS,
        chunk_tokens=np.array([count for _, count in chunks], dtype=np.int32) if chunks else NO_COLUMN,
        admissions=admissions,
        left_to_others=() if admitting is None else tuple(admitting.left_to_others),
        full_tenants=frozenset() if admitting is None else frozenset(admitting.full_tenants),
        num_tokens=budget.num_tokens,
        num_pairs=budget.num_pairs,
        predicted_ns=budget.predicted_ns(),
    )


def _moves(rows: RowColumns, takes: Callable[[LiveRequest], bool]) -> tuple[int, ...]:
    """Starts with the rows that are cheapest to compute again."""
    running = (rows.state == RUNNING).nonzero()[0]
    by_length = running[np.argsort(rows.num_known[running], kind="stable")][:MAX_MOVES].tolist()
    return tuple(row for row in by_length if takes(_off_row(rows, row)))


def _off_row(rows: RowColumns, row: int) -> LiveRequest:
    return live_on(rows, row).off_row_with(rows.output_token_ids(row))


def _tenants_of(rows: RowColumns, index: Sequence[int]) -> set[str]:
    return {live_on(rows, row).request.key.tenant for row in index}


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
    return min(int(rows.target[row] - rows.num_scheduled[row]), live_on(rows, row).largest_chunk)


class _Admissions:
    def __init__(
        self,
        room: Capacity,
        waiting: Waiting,
        budget: StepBudget,
        full_tenants: set[str],
    ) -> None:
        self.admissions: list[Admission] = []
        self.left_to_others: list[LiveRequest] = []
        self.full_tenants = full_tenants
        self.num_passed_over = 0
        self._room = room
        self._waiting = waiting
        self._budget = budget
        self._num_passed = 0

    def admit(self, queue: Iterable[LiveRequest]) -> None:
        """Stops at a head without room: a big request would starve behind small ones."""
        for live in islice(queue, MAX_SCANNED):
            if not self._room.has_rows or self._num_passed > MAX_LOOKED_AT:
                return
            if live.request.key.tenant in self.full_tenants or self._waiting.was_left(live):
                self.num_passed_over += 1
                continue
            if not self._room.could_ever_hold(live):
                continue
            if self._waiting.is_for_others(live):
                self._num_passed += 1
                self.left_to_others.append(live)
                continue
            if live.is_suspect and self._budget.num_tokens:
                return
            fit = self._room.fit(live)
            if isinstance(fit, Blocker):
                if fit.is_of_tenant:
                    self.full_tenants.add(live.request.key.tenant)
                    self.num_passed_over += 1
                    continue
                if not fit.is_own:
                    return
                self._num_passed += 1
            elif not self._place(live, fit) or live.is_suspect:
                return

    def _place(self, live: LiveRequest, fit: Fit) -> bool:
        wanted = min(live.num_known_tokens - fit.num_cached_tokens, live.largest_chunk)
        count = self._budget.add_chunk(fit.num_cached_tokens, wanted)
        if count:
            self.admissions.append(Admission(live, self._room.next_row, fit, count))
            self._room.take(live, fit)
        return count > 0

"""What keeps a waiting request off an executor now: the one place that knows, for planning and for explaining alike."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from paceline.plan.values import RecordId
from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.planning.growth import Growth, Int64Array, OutputLengths
from paceline_scheduler.core.planning.shares import Shares, max_tokens_within
from paceline_scheduler.core.planning.speculation import Speculation
from paceline_scheduler.core.planning.step_time import StepTimeModel
from paceline_scheduler.core.tables.blocks import BlockPool
from paceline_scheduler.core.tables.rows import RUNNING, RowColumns, RowIndex

MAX_PREEMPTIONS = 3
_COMPANY = 1.5  # what a step may take, in steps of the longest request alone, where those are slow
_AWAITS_PROMPT = "its prompt is being computed for another of its completions"
MAX_PLACED_TOKENS = 8192  # known ones in one plan: each is hashed, and looked up in the prefix cache
MAX_PLACED_BYTES = 8 << 20  # prompts and contexts of one plan, which is one message


@dataclass(frozen=True, slots=True)
class ExecutorView:
    """Read after `settle` has released what ended."""

    description: ExecutorDescription
    rows: RowColumns
    pool: BlockPool
    step_time: StepTimeModel
    output_lengths: OutputLengths
    speculation: Speculation
    leaving_keys: Set[RecordId]  # an older placement of these still leaves
    suspect_rows: Set[int] = frozenset()  # they run in steps of their own
    is_doubted: bool = False  # the last step, of one request, failed: others go first
    version: tuple[int, ...] = ()  # of rows and blocks: what plans, `settle`, results and ends of rows have come to

    @property
    def num_plans(self) -> int:
        return self.version[0]

    def expected_rest(self, running: RowIndex) -> Int64Array:
        num_output = (self.rows.num_known[running] - self.rows.num_prompt[running]).astype(np.int64)
        at_most = np.maximum((self.rows.limit[running] + 1 - self.rows.num_known[running]).astype(np.int64), 0)
        return self.output_lengths.expected_rest(num_output, at_most)


@dataclass(frozen=True, slots=True)
class Blocker:
    """`is_own`: only this request is concerned, so those behind it may go first. `is_of_tenant`: all requests of its
    tenant are, and no others. `is_brief`: waiting beats going elsewhere.
    """

    sentence: str
    is_own: bool = False
    is_of_tenant: bool = False
    is_brief: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    hits: tuple[int, ...]
    num_new_blocks: int
    num_cached_tokens: int
    num_revived: int  # of the hits: nobody else owns them
    max_tokens: int  # of its output
    copied_block: int | None = None  # of another completion, filled in part: copied to the first new block


class Capacity:
    """What is left for newcomers in one plan; `take` counts them in one by one."""

    def __init__(
        self, view: ExecutorView, num_available: int, limits: CoreLimits, shares: Shares | None = None
    ) -> None:
        self._view = view
        self._limits = limits
        self._num_available = num_available
        running = view.rows.running()
        self._num_running = len(running)
        self._free_rows = view.rows.free_rows(view.rows.num_free)
        self._num_taken = 0
        self._num_placed_bytes = self._num_placed_tokens = 0
        contexts = view.rows.num_scheduled[running]
        self._num_pairs, self._longest = int(contexts.sum()), int(contexts.max(initial=0))
        self._revived: set[int] = set()
        self._new_groups: set[tuple[str, str]] = set()  # whose prompt is computed from here on
        self._tenant_growth: dict[str, Growth] = {}
        self._shares = shares or Shares(view.rows, view.description, limits.tenants)

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def next_row(self) -> int:
        return self._free_rows[self._num_taken]

    @property
    def has_rows(self) -> bool:
        return self._num_taken < len(self._free_rows)

    def could_ever_hold(self, live: LiveRequest) -> bool:
        return live.fits(self._view.description)

    def fit(self, live: LiveRequest) -> Fit | Blocker:
        """Changes nothing."""
        description = self._view.description
        if not self.could_ever_hold(live):
            return Blocker(f"{description.address} can never hold it", is_own=True)
        if not self.has_rows:
            return Blocker(f"every row of {description.address} is taken ({description.max_num_rows})")
        step_s, allowed_s = self._step_s(live), self._allowed_step_s(live)
        if self._num_running and step_s > allowed_s:
            return Blocker(
                f"steps of {description.address} would take {step_s * 1e3:.0f} ms with it, "
                f"{allowed_s * 1e3:.0f} ms are allowed between tokens"
            )
        if self._num_taken and self._is_full(live):
            return Blocker(f"the next plan of {description.address} has no room for another prompt")
        if live.request.key in self._view.leaving_keys:
            return Blocker(f"an earlier request of this id is still leaving {description.address}")
        if self._awaits_prompt(live):
            return Blocker(_AWAITS_PROMPT, is_own=True, is_brief=True)
        hits = find_hits(self._view, live)
        num_reserved = live.num_known_tokens
        if is_protected(live):
            num_reserved = self._reservation(live, hits)
            if not num_reserved:
                sentence = f"it was preempted {MAX_PREEMPTIONS} times and another such request runs first"
                return Blocker(sentence, is_own=True)
        fit = self._fit_blocks(live, hits, num_reserved)
        return fit if isinstance(fit, Blocker) else self._tenant_blocker(live, fit) or fit

    def take(self, live: LiveRequest, fit: Fit) -> None:
        self._num_taken += 1
        self._num_running += 1
        self._num_pairs += live.num_known_tokens
        self._num_available -= fit.num_new_blocks + fit.num_revived
        self._shares.take(live.request.key.tenant, fit.num_new_blocks + fit.num_revived)
        self._num_placed_bytes += live.num_placed_bytes
        self._num_placed_tokens += live.num_known_tokens
        self._revived.update(block for block in fit.hits if self._view.pool.is_cached(block))
        if live.request.num_completions > 1 and fit.num_cached_tokens < live.num_prompt_tokens - 1:
            self._new_groups.add(live.request.key.whole)
        held_and_rest = self._held_and_rest(live, len(fit.hits) - fit.num_revived)
        self._growth.add(*held_and_rest)
        tenant = live.request.key.tenant
        if (most := self._shares.max_num_blocks(tenant)) is not None:
            self._growth_of(tenant, most).add(*held_and_rest)
        num_slots = (len(fit.hits) + fit.num_new_blocks) * self._view.description.block_size
        if is_protected(live) and num_slots < self._whole(live):
            self._has_unreserved = True

    def _fit_blocks(self, live: LiveRequest, hits: tuple[int, ...], num_reserved: int) -> Fit | Blocker:
        description = self._view.description
        num_new = -(-num_reserved // description.block_size) - len(hits)
        revived = {block for block in hits if self._view.pool.is_cached(block)} - self._revived
        max_tokens = self._max_tokens(live)
        fit = self._with_copy(live, Fit(hits, num_new, len(hits) * description.block_size, len(revived), max_tokens))
        needed = num_new + len(revived) + self._num_running
        if needed > self._num_available:
            return Blocker(
                f"{description.address} needs {needed} free blocks, {self._num_running} of them for running requests; "
                f"{self._num_available} of {description.num_blocks} are free"
            )
        if self._num_running and not self._growth.has_room_for(*self._held_and_rest(live, len(hits) - len(revived))):
            return Blocker(
                f"the {self._num_running} running requests of {description.address} are expected to need all "
                f"{description.num_blocks} blocks"
            )
        return fit

    def _tenant_blocker(self, live: LiveRequest, fit: Fit) -> Blocker | None:
        """As in the pool, each running request keeps a block."""
        tenant, description = live.request.key.tenant, self._view.description
        most, num_running = self._shares.max_num_blocks(tenant), self._shares.num_requests(tenant)
        if most is None or not num_running:
            return None
        num_held = self._shares.num_held(tenant)
        needed = num_held + fit.num_new_blocks + fit.num_revived + num_running
        num_shared = len(fit.hits) - fit.num_revived
        if needed <= most and self._growth_of(tenant, most).has_room_for(*self._held_and_rest(live, num_shared)):
            return None
        sentence = f"its tenant holds {num_held} of the {most} blocks of {description.address} that are its share"
        return Blocker(f"{sentence}, and what it runs there is expected to need the rest", is_of_tenant=True)

    def _growth_of(self, tenant: str, most: int) -> Growth:
        if tenant not in self._tenant_growth:
            running = np.array(self._shares.rows_of.get(tenant, ()), dtype=np.intp)
            num_held = len({block for row in running.tolist() for block in self._view.rows.tables[row]})
            self._tenant_growth[tenant] = self._growth_within(running, most, num_held)
        return self._tenant_growth[tenant]

    def take_if_fits(self, live: LiveRequest) -> bool:
        fit = self.fit(live)
        if isinstance(fit, Blocker):
            return False
        self.take(live, fit)
        return True

    def _is_full(self, live: LiveRequest) -> bool:
        num_bytes = self._num_placed_bytes + live.num_placed_bytes
        return num_bytes > MAX_PLACED_BYTES or self._num_placed_tokens + live.num_known_tokens > MAX_PLACED_TOKENS

    def _step_s(self, live: LiveRequest) -> float:
        num_pairs = self._num_pairs + live.num_known_tokens
        return self._view.step_time.predict_ns(self._num_running + 1, num_pairs) / 1e9

    def _allowed_step_s(self, live: LiveRequest) -> float:
        longest = max(self._longest, live.num_known_tokens)
        return max(self._limits.decode_only_step_s, _COMPANY * self._view.step_time.predict_ns(1, longest) / 1e9)

    def _awaits_prompt(self, live: LiveRequest) -> bool:
        if live.request.num_completions == 1 or live.computes_all:
            return False
        return live.request.key.whole in self._new_groups or any(
            self._view.rows.num_computed[row] < live.num_prompt_tokens for row in self._siblings(live)
        )

    def _with_copy(self, live: LiveRequest, fit: Fit) -> Fit:
        """Lets it start in a copy of another completion's last prompt block."""
        num_prompt, block_size = live.num_prompt_tokens, self._view.description.block_size
        num_cached = min(num_prompt, live.num_known_tokens - 1)
        if live.computes_all or len(fit.hits) != num_cached // block_size or not num_cached % block_size:
            return fit
        for row in self._siblings(live):
            if self._view.rows.num_computed[row] >= num_prompt:
                copied = self._view.rows.tables[row][len(fit.hits)]
                return replace(fit, num_cached_tokens=num_cached, copied_block=copied)
        return fit

    def _siblings(self, live: LiveRequest) -> list[int]:
        if live.request.num_completions == 1:
            return []
        found = ((row, self._view.rows.live[row]) for row in self._view.rows.running().tolist())
        whole = live.request.key.whole
        return [row for row, other in found if other is not None and other.request.key.whole == whole]

    def _held_and_rest(self, live: LiveRequest, num_shared: int) -> tuple[int, int]:
        num_output = live.num_output_tokens
        at_most = self._max_tokens(live) - num_output
        held = live.num_known_tokens - num_shared * self._view.description.block_size
        return held, self._view.output_lengths.expected_rest_of(num_output, at_most)

    def _reservation(self, live: LiveRequest, hits: tuple[int, ...]) -> int:
        """Returns how many tokens a request that must not be preempted again gets blocks for now, 0 for not yet. One at
        a time may grow like any other, since the rest give way to it; two could block each other for ever.
        """
        whole = self._whole(live)
        num_new = -(-whole // self._view.description.block_size) - len(hits)
        num_revived = sum(map(self._view.pool.is_cached, hits))
        if num_new + num_revived + self._num_running <= self._num_available:
            return whole
        return 0 if self._has_unreserved else live.num_known_tokens

    def _whole(self, live: LiveRequest) -> int:
        return live.num_prompt_tokens + self._max_tokens(live) - 1

    def _max_tokens(self, live: LiveRequest) -> int:
        return max_tokens_within(live, self._view.description, self._limits.tenants)

    @cached_property
    def _growth(self) -> Growth:
        running, num_blocks = self._view.rows.running(), self._view.description.num_blocks
        return self._growth_within(running, num_blocks, self._view.pool.counts().used)

    @cached_property
    def _has_unreserved(self) -> bool:
        """Such a request must not be preempted, and lacks some of its blocks."""
        rows = self._view.rows
        growing = ((rows.state == RUNNING) & (rows.num_slots < rows.limit)).nonzero()[0]
        return any(is_protected(rows.live[row]) for row in growing.tolist())

    def _growth_within(self, running: RowIndex, num_blocks: int, num_used: int) -> Growth:
        rows, block_size = self._view.rows, self._view.description.block_size
        held = np.maximum(rows.num_scheduled[running], rows.target[running]).astype(np.int64)
        num_counted_twice = int(rows.num_slots[running].sum()) - num_used * block_size
        num_slots = num_blocks * block_size + max(0, num_counted_twice)
        return Growth(num_slots, block_size, held, self._view.expected_rest(running))


def is_protected(live: LiveRequest | None) -> bool:
    return live is not None and live.preemptions.count >= MAX_PREEMPTIONS


def find_hits(view: ExecutorView, live: LiveRequest) -> tuple[int, ...]:
    """At least one token is left to compute."""
    if live.computes_all:
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


def num_cached_on(views: Sequence[ExecutorView], live: LiveRequest) -> list[int]:
    """Tokens. Most prefix caches lack the first block already."""
    firsts: dict[tuple[bytes, int], bytes] = {}
    counts = [0] * len(views)
    for index, view in enumerate(views):
        tag_key, block_size = form = view.description.tag_key, view.description.block_size
        if form not in firsts and live.num_known_tokens > block_size:
            firsts[form] = live.prefix_chain(tag_key, block_size).key(0, live.known_token_ids())
        if form in firsts and view.pool.find(firsts[form]) is not None:
            counts[index] = len(find_hits(view, live)) * block_size
    return counts

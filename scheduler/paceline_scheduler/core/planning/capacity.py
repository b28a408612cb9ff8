"""What keeps a waiting request off an executor now: the one place that knows, for planning and for explaining alike.

What every request on an executor holds some of, as rows and blocks, is a resource. `Capacity` asks all of them, and
knows what else may be in the way.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

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
MAX_PLACED_TOKENS = 8192  # known ones in one plan: each is hashed, and looked up in the prefix cache
MAX_PLACED_BYTES = 8 << 20  # prompts and contexts of one plan, which is one message
NeedT = TypeVar("NeedT")


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


class Resource(Protocol[NeedT]):
    """As one plan leaves it. Which row and which blocks become whose is the ledger's."""

    @property
    def shortage(self) -> Blocker | None:
        """Why nobody gets any."""

    def need(self, live: LiveRequest, /) -> NeedT | Blocker:
        """What it would take, or why it cannot. Changes nothing."""

    def take(self, live: LiveRequest, need: NeedT, /) -> None: ...

    def give_back(self, rows: Iterable[int], /) -> None:
        """Those on them leave with this plan."""

    def num_more(self, num_tokens: float, /) -> int:
        """Further requests of this length that it is enough for; of length 0 is what nobody knows."""


class FreeRows:
    def __init__(self, view: ExecutorView) -> None:
        self._view = view
        self._num_taken = 0

    @property
    def shortage(self) -> Blocker | None:
        if self.num_more(0):
            return None
        description = self._view.description
        return Blocker(f"every row of {description.address} is taken ({description.max_num_rows})")

    def need(self, _: LiveRequest) -> int:
        return self._view.rows.free_row(self._num_taken)

    def take(self, _: LiveRequest, __: int) -> None:
        self._num_taken += 1

    def give_back(self, rows: Iterable[int]) -> None:
        """They are free when a result confirms it."""

    def num_more(self, _: float) -> int:
        return self._view.rows.num_free - self._num_taken


@dataclass(frozen=True, slots=True)
class BlockNeed:
    hits: tuple[int, ...]
    num_new: int
    num_cached_tokens: int
    num_revived: int  # of the hits: nobody else owns them
    max_tokens: int  # of its output
    copied: int | None = None  # of another completion, filled in part: copied to the first new block


class FreeBlocks:
    """Each running request keeps one for its next token, and what it is expected to grow by."""

    shortage: Blocker | None = None  # it depends on the request: its blocks may be there already

    def __init__(self, view: ExecutorView, limits: CoreLimits, shares: Shares | None, num_due: int) -> None:
        self._view = view
        self._bounds = limits.tenants
        self._shares = shares or Shares(view.rows, view.description, limits.tenants)
        self._num_available = view.pool.num_available - num_due
        self._num_running = view.rows.num_running
        self._revived: set[int] = set()
        self._growths: dict[str | None, Growth] = {}  # None: in the whole pool

    def need(self, live: LiveRequest) -> BlockNeed | Blocker:
        description, hits = self._view.description, find_hits(self._view, live)
        block_size, cached = description.block_size, set(filter(self._view.pool.is_cached, hits))
        max_tokens = max_tokens_within(live, description, self._bounds)
        num_reserved = live.num_known_tokens
        if is_protected(live):
            whole = live.num_prompt_tokens + max_tokens - 1
            if -(-whole // block_size) - len(hits) + len(cached) + self._num_running <= self._num_available:
                num_reserved = whole
            elif self._has_unreserved:
                # One at a time may grow like any other, as the rest give way to it; two could block each other.
                sentence = f"it was preempted {MAX_PREEMPTIONS} times and another such request runs first"
                return Blocker(sentence, is_own=True)
        num_new = -(-num_reserved // block_size) - len(hits)
        need = BlockNeed(hits, num_new, len(hits) * block_size, len(cached - self._revived), max_tokens)
        need = self._with_copy(live, need)
        return self._pool_blocker(live, need) or self._tenant_blocker(live, need) or need

    def take(self, live: LiveRequest, need: BlockNeed) -> None:
        tenant, num_blocks = live.request.key.tenant, need.num_new + need.num_revived
        self._num_running += 1
        self._num_available -= num_blocks
        self._shares.take(tenant, num_blocks)
        self._revived.update(filter(self._view.pool.is_cached, need.hits))
        self._growth(None).add(*self._held_and_rest(live, need))
        if self._shares.max_num_blocks(tenant) is not None:
            self._growth(tenant).add(*self._held_and_rest(live, need))
        num_slots = (len(need.hits) + need.num_new) * self._view.description.block_size
        if is_protected(live) and num_slots < live.num_prompt_tokens + need.max_tokens - 1:
            self._has_unreserved = True

    def give_back(self, rows: Iterable[int]) -> None:
        pool, tables = self._view.pool, self._view.rows.tables
        self._num_available += sum(pool.num_freed_by(tables[row]) for row in rows)

    def num_more(self, num_tokens: float) -> int:
        description = self._view.description
        num_slots = self._num_available * description.block_size
        return int(num_slots / num_tokens) if num_tokens else description.max_num_rows

    def _with_copy(self, live: LiveRequest, need: BlockNeed) -> BlockNeed:
        """Lets it start in a copy of another completion's last prompt block."""
        num_prompt, block_size = live.num_prompt_tokens, self._view.description.block_size
        num_cached = min(num_prompt, live.num_known_tokens - 1)
        if live.computes_all or len(need.hits) != num_cached // block_size or not num_cached % block_size:
            return need
        for row in _siblings(self._view, live):
            if self._view.rows.num_computed[row] >= num_prompt:
                copied = self._view.rows.tables[row][len(need.hits)]
                return replace(need, num_cached_tokens=num_cached, copied=copied)
        return need

    def _pool_blocker(self, live: LiveRequest, need: BlockNeed) -> Blocker | None:
        address, num_blocks = self._view.description.address, self._view.description.num_blocks
        num_needed = need.num_new + need.num_revived + self._num_running
        if num_needed > self._num_available:
            return Blocker(
                f"{address} needs {num_needed} free blocks, {self._num_running} of them for running requests; "
                f"{self._num_available} of {num_blocks} are free"
            )
        if self._num_running and not self._growth(None).has_room_for(*self._held_and_rest(live, need)):
            return Blocker(
                f"the {self._num_running} running requests of {address} are expected to need all {num_blocks} blocks"
            )
        return None

    def _tenant_blocker(self, live: LiveRequest, need: BlockNeed) -> Blocker | None:
        """As in the pool, each running request keeps a block."""
        tenant = live.request.key.tenant
        most, num_running = self._shares.max_num_blocks(tenant), self._shares.num_requests(tenant)
        if most is None or not num_running:
            return None
        num_held = self._shares.num_held(tenant)
        num_needed = num_held + need.num_new + need.num_revived + num_running
        if num_needed <= most and self._growth(tenant).has_room_for(*self._held_and_rest(live, need)):
            return None
        address = self._view.description.address
        sentence = f"its tenant holds {num_held} of the {most} blocks of {address} that are its share"
        return Blocker(f"{sentence}, and what it runs there is expected to need the rest", is_of_tenant=True)

    def _held_and_rest(self, live: LiveRequest, need: BlockNeed) -> tuple[int, int]:
        num_output, num_shared = live.num_output_tokens, len(need.hits) - need.num_revived
        held = live.num_known_tokens - num_shared * self._view.description.block_size
        return held, self._view.output_lengths.expected_rest_of(num_output, need.max_tokens - num_output)

    def _growth(self, tenant: str | None) -> Growth:
        if tenant not in self._growths:
            rows, block_size = self._view.rows, self._view.description.block_size
            if tenant is None:
                num_blocks, num_used = self._view.pool.num_blocks, self._view.pool.counts().used
                running = rows.running()
            else:
                num_blocks = self._shares.max_num_blocks(tenant) or 0
                running = np.array(self._shares.rows_of.get(tenant, ()), dtype=np.intp)
                num_used = len({block for row in running.tolist() for block in rows.tables[row]})
            held = np.maximum(rows.num_scheduled[running], rows.target[running]).astype(np.int64)
            num_counted_twice = int(rows.num_slots[running].sum()) - num_used * block_size
            num_slots = num_blocks * block_size + max(0, num_counted_twice)
            self._growths[tenant] = Growth(num_slots, block_size, held, self._view.expected_rest(running))
        return self._growths[tenant]

    @cached_property
    def _has_unreserved(self) -> bool:
        """Such a request must not be preempted, and lacks some of its blocks."""
        rows = self._view.rows
        growing = ((rows.state == RUNNING) & (rows.num_slots < rows.limit)).nonzero()[0]
        return any(is_protected(rows.live_on(row)) for row in growing.tolist())


class Fit(NamedTuple):
    """What a request takes of each resource, in the order of `resources_of`."""

    row: int
    blocks: BlockNeed


def resources_of(
    view: ExecutorView, limits: CoreLimits, shares: Shares | None = None, num_due: int = 0
) -> tuple[Resource[Any], ...]:
    """`num_due` blocks go to running requests in this plan, as the shares know."""
    return FreeRows(view), FreeBlocks(view, limits, shares, num_due)


class Capacity:
    """What is left for newcomers in one plan; `take` counts them in one by one."""

    def __init__(self, view: ExecutorView, limits: CoreLimits, shares: Shares | None = None, num_due: int = 0) -> None:
        self._view = view
        self._limits = limits
        self._resources = resources_of(view, limits, shares, num_due)
        contexts = view.rows.num_scheduled[view.rows.running()]
        self.num_running = len(contexts)
        self._num_pairs, self._longest = int(contexts.sum()), int(contexts.max(initial=0))
        self._num_placed_bytes = self._num_placed_tokens = 0
        self._new_groups: set[tuple[str, str]] = set()  # whose prompt is computed from here on

    @property
    def shortage(self) -> Blocker | None:
        return next(filter(None, (resource.shortage for resource in self._resources)), None)

    def fit(self, live: LiveRequest) -> Fit | Blocker:
        """Changes nothing."""
        address, needs = self._view.description.address, []
        if not live.fits(self._view.description):
            return Blocker(f"{address} can never hold it", is_own=True)
        if (shortage := self.shortage) is not None:
            return shortage
        predict_ns = self._view.step_time.predict_ns
        step_s = predict_ns(self.num_running + 1, self._num_pairs + live.num_known_tokens) / 1e9
        longest_s = predict_ns(1, max(self._longest, live.num_known_tokens)) / 1e9
        allowed_s = max(self._limits.decode_only_step_s, _COMPANY * longest_s)
        if self.num_running and step_s > allowed_s:
            return Blocker(
                f"steps of {address} would take {step_s * 1e3:.0f} ms with it, "
                f"{allowed_s * 1e3:.0f} ms are allowed between tokens"
            )
        if self._num_placed_tokens and self._is_full(live):
            return Blocker(f"the next plan of {address} has no room for another prompt")
        if live.request.key in self._view.leaving_keys:
            return Blocker(f"an earlier request of this id is still leaving {address}")
        if self._awaits_prompt(live):
            return Blocker("its prompt is being computed for another of its completions", is_own=True, is_brief=True)
        for resource in self._resources:
            need = resource.need(live)
            if isinstance(need, Blocker):
                return need
            needs.append(need)
        return Fit(*needs)

    def take(self, live: LiveRequest, fit: Fit) -> None:
        for resource, need in zip(self._resources, fit, strict=True):
            resource.take(live, need)
        self.num_running += 1
        self._num_pairs += live.num_known_tokens
        self._num_placed_bytes += live.num_placed_bytes
        self._num_placed_tokens += live.num_known_tokens
        if live.request.num_completions > 1 and fit.blocks.num_cached_tokens < live.num_prompt_tokens - 1:
            self._new_groups.add(live.request.key.whole)

    def take_if_fits(self, live: LiveRequest) -> bool:
        fit = self.fit(live)
        if isinstance(fit, Fit):
            self.take(live, fit)
        return isinstance(fit, Fit)

    def give_back(self, rows: Iterable[int]) -> None:
        """What is on them leaves with this plan."""
        for resource in self._resources:
            resource.give_back(rows)

    def _is_full(self, live: LiveRequest) -> bool:
        num_bytes = self._num_placed_bytes + live.num_placed_bytes
        return num_bytes > MAX_PLACED_BYTES or self._num_placed_tokens + live.num_known_tokens > MAX_PLACED_TOKENS

    def _awaits_prompt(self, live: LiveRequest) -> bool:
        if live.request.num_completions == 1 or live.computes_all:
            return False
        return live.request.key.whole in self._new_groups or any(
            self._view.rows.num_computed[row] < live.num_prompt_tokens for row in _siblings(self._view, live)
        )


def is_protected(live: LiveRequest) -> bool:
    return live.preemptions.count >= MAX_PREEMPTIONS


def _siblings(view: ExecutorView, live: LiveRequest) -> list[int]:
    """Rows of other completions of its request."""
    if live.request.num_completions == 1:
        return []
    whole = live.request.key.whole
    return [row for row in view.rows.running().tolist() if view.rows.live_on(row).request.key.whole == whole]


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

"""What an executor has only so much of, and every request on it holds: rows and blocks, as one plan leaves them.

Refuses to know what else may keep a request waiting (capacity), and which of them become whose (the ledger).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.planning.growth import Growth
from paceline_scheduler.core.planning.shares import Shares, max_tokens_within
from paceline_scheduler.core.planning.view import ExecutorView, find_hits, siblings
from paceline_scheduler.core.tables.rows import RUNNING, RowIndex

MAX_PREEMPTIONS = 3


@dataclass(frozen=True, slots=True)
class Blocker:
    """`is_own`: only this request is concerned, so those behind it may go first. `is_of_tenant`: all requests of its
    tenant are, and no others. `is_brief`: waiting beats going elsewhere.
    """

    sentence: str
    is_own: bool = False
    is_of_tenant: bool = False
    is_brief: bool = False


NeedT = TypeVar("NeedT")


class Resource(Protocol[NeedT]):
    @property
    def shortage(self) -> Blocker | None:
        """Why nobody gets any more of it."""
        ...

    def need(self, live: LiveRequest) -> NeedT | Blocker:
        """What the request would take, or why it cannot. Changes nothing."""
        ...

    def take(self, live: LiveRequest, need: NeedT) -> None: ...

    def give_back(self, rows: Iterable[int]) -> None:
        """What is on them leaves with this plan."""
        ...

    def num_more(self, num_tokens: float) -> int:
        """How many further requests of so many tokens it is enough for; 0 where nothing tells how long they are."""
        ...


class FreeRows:
    def __init__(self, view: ExecutorView) -> None:
        self._view = view
        self._num_taken = 0

    @property
    def shortage(self) -> Blocker | None:
        if self._num_taken < self._view.rows.num_free:
            return None
        description = self._view.description
        return Blocker(f"every row of {description.address} is taken ({description.max_num_rows})")

    def need(self, live: LiveRequest) -> int:
        del live  # all need one
        return self._view.rows.free_row(self._num_taken)

    def take(self, live: LiveRequest, need: int) -> None:
        del live, need
        self._num_taken += 1

    def give_back(self, rows: Iterable[int]) -> None:
        """They are free when a result confirms it, and not in this plan."""

    def num_more(self, num_tokens: float) -> int:
        del num_tokens
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
    """Each running request keeps one for its next token, and enough for what it is expected to grow by."""

    def __init__(
        self, view: ExecutorView, limits: CoreLimits, shares: Shares | None = None, num_growing: int = 0
    ) -> None:
        """num_growing: blocks that running requests get in this plan; the shares know of them."""
        self._view = view
        self._bounds = limits.tenants
        self._shares = shares or Shares(view.rows, view.description, limits.tenants)
        self._num_available = view.pool.num_available - num_growing
        self._num_running = view.rows.num_running
        self._revived: set[int] = set()
        self._tenant_growth: dict[str, Growth] = {}

    @property
    def shortage(self) -> Blocker | None:
        """It depends on the request: its blocks may be there already."""
        return None

    def need(self, live: LiveRequest) -> BlockNeed | Blocker:
        hits = find_hits(self._view, live)
        num_reserved = live.num_known_tokens
        if is_protected(live):
            num_reserved = self._reservation(live, hits)
            if not num_reserved:
                sentence = f"it was preempted {MAX_PREEMPTIONS} times and another such request runs first"
                return Blocker(sentence, is_own=True)
        need = self._need_of(live, hits, num_reserved)
        return self._pool_blocker(live, need) or self._tenant_blocker(live, need) or need

    def take(self, live: LiveRequest, need: BlockNeed) -> None:
        tenant, num_blocks = live.request.key.tenant, need.num_new + need.num_revived
        self._num_running += 1
        self._num_available -= num_blocks
        self._shares.take(tenant, num_blocks)
        self._revived.update(block for block in need.hits if self._view.pool.is_cached(block))
        held_and_rest = self._held_and_rest(live, need)
        self._growth.add(*held_and_rest)
        if (most := self._shares.max_num_blocks(tenant)) is not None:
            self._growth_of(tenant, most).add(*held_and_rest)
        num_slots = (len(need.hits) + need.num_new) * self._view.description.block_size
        if is_protected(live) and num_slots < self._whole(live):
            self._has_unreserved = True

    def give_back(self, rows: Iterable[int]) -> None:
        pool, tables = self._view.pool, self._view.rows.tables
        self._num_available += sum(pool.num_freed_by(tables[row]) for row in rows)

    def num_more(self, num_tokens: float) -> int:
        description = self._view.description
        if not num_tokens:
            return description.max_num_rows
        return int(self._num_available * description.block_size / num_tokens)

    def _need_of(self, live: LiveRequest, hits: tuple[int, ...], num_reserved: int) -> BlockNeed:
        block_size = self._view.description.block_size
        num_new = -(-num_reserved // block_size) - len(hits)
        num_revived = len({block for block in hits if self._view.pool.is_cached(block)} - self._revived)
        need = BlockNeed(hits, num_new, len(hits) * block_size, num_revived, self._max_tokens(live))
        return self._with_copy(live, need)

    def _pool_blocker(self, live: LiveRequest, need: BlockNeed) -> Blocker | None:
        description = self._view.description
        num_needed = need.num_new + need.num_revived + self._num_running
        if num_needed > self._num_available:
            return Blocker(
                f"{description.address} needs {num_needed} free blocks, {self._num_running} of them for running "
                f"requests; {self._num_available} of {description.num_blocks} are free"
            )
        if self._num_running and not self._growth.has_room_for(*self._held_and_rest(live, need)):
            return Blocker(
                f"the {self._num_running} running requests of {description.address} are expected to need all "
                f"{description.num_blocks} blocks"
            )
        return None

    def _tenant_blocker(self, live: LiveRequest, need: BlockNeed) -> Blocker | None:
        """As in the pool, each running request keeps a block."""
        tenant, description = live.request.key.tenant, self._view.description
        most, num_running = self._shares.max_num_blocks(tenant), self._shares.num_requests(tenant)
        if most is None or not num_running:
            return None
        num_held = self._shares.num_held(tenant)
        num_needed = num_held + need.num_new + need.num_revived + num_running
        if num_needed <= most and self._growth_of(tenant, most).has_room_for(*self._held_and_rest(live, need)):
            return None
        sentence = f"its tenant holds {num_held} of the {most} blocks of {description.address} that are its share"
        return Blocker(f"{sentence}, and what it runs there is expected to need the rest", is_of_tenant=True)

    def _with_copy(self, live: LiveRequest, need: BlockNeed) -> BlockNeed:
        """Lets it start in a copy of another completion's last prompt block."""
        num_prompt, block_size = live.num_prompt_tokens, self._view.description.block_size
        num_cached = min(num_prompt, live.num_known_tokens - 1)
        if live.computes_all or len(need.hits) != num_cached // block_size or not num_cached % block_size:
            return need
        for row in siblings(self._view, live):
            if self._view.rows.num_computed[row] >= num_prompt:
                copied = self._view.rows.tables[row][len(need.hits)]
                return replace(need, num_cached_tokens=num_cached, copied=copied)
        return need

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
        return max_tokens_within(live, self._view.description, self._bounds)

    def _held_and_rest(self, live: LiveRequest, need: BlockNeed) -> tuple[int, int]:
        num_output, num_shared = live.num_output_tokens, len(need.hits) - need.num_revived
        held = live.num_known_tokens - num_shared * self._view.description.block_size
        return held, self._view.output_lengths.expected_rest_of(num_output, need.max_tokens - num_output)

    @cached_property
    def _has_unreserved(self) -> bool:
        """Such a request must not be preempted, and lacks some of its blocks."""
        rows = self._view.rows
        growing = ((rows.state == RUNNING) & (rows.num_slots < rows.limit)).nonzero()[0]
        return any(is_protected(rows.live_on(row)) for row in growing.tolist())

    @cached_property
    def _growth(self) -> Growth:
        running, num_blocks = self._view.rows.running(), self._view.description.num_blocks
        return self._growth_within(running, num_blocks, self._view.pool.counts().used)

    def _growth_of(self, tenant: str, most: int) -> Growth:
        if tenant not in self._tenant_growth:
            running = np.array(self._shares.rows_of.get(tenant, ()), dtype=np.intp)
            num_held = len({block for row in running.tolist() for block in self._view.rows.tables[row]})
            self._tenant_growth[tenant] = self._growth_within(running, most, num_held)
        return self._tenant_growth[tenant]

    def _growth_within(self, running: RowIndex, num_blocks: int, num_used: int) -> Growth:
        rows, block_size = self._view.rows, self._view.description.block_size
        held = np.maximum(rows.num_scheduled[running], rows.target[running]).astype(np.int64)
        num_counted_twice = int(rows.num_slots[running].sum()) - num_used * block_size
        num_slots = num_blocks * block_size + max(0, num_counted_twice)
        return Growth(num_slots, block_size, held, self._view.expected_rest(running))


class Fit(NamedTuple):
    """What a request takes of each resource, in the order of `resources_of`."""

    row: int
    blocks: BlockNeed


def resources_of(
    view: ExecutorView, limits: CoreLimits, shares: Shares | None = None, num_growing: int = 0
) -> tuple[Resource[Any], ...]:
    """Those that are cheap to ask come first."""
    return FreeRows(view), FreeBlocks(view, limits, shares, num_growing)


def is_protected(live: LiveRequest) -> bool:
    return live.preemptions.count >= MAX_PREEMPTIONS

"""What tenants with a KV share hold of an executor's blocks, and what they may, in one plan.

Blocks that several requests read count once, cached ones for nobody. Alone on an executor a tenant's request runs
whatever its share is.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property

from paceline_scheduler.access.tenant_limits import TenantBounds
from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.tables.rows import RowColumns


class Shares:
    def __init__(self, rows: RowColumns, description: ExecutorDescription, bounds: TenantBounds) -> None:
        self._rows = rows
        self._description = description
        self._bounds = bounds
        self._added: dict[str, int] = {}
        self._num_added_requests: dict[str, int] = {}
        if not bounds.has_kv_shares:
            self.rows_of = {}

    @cached_property
    def rows_of(self) -> Mapping[str, list[int]]:
        """Running ones, by tenant."""
        found: dict[str, list[int]] = {}
        for row in self._rows.running().tolist():
            tenant = self._rows.live_on(row).request.key.tenant
            if self._bounds.of(tenant).max_kv_share is not None:
                found.setdefault(tenant, []).append(row)
        return found

    def max_num_blocks(self, tenant: str) -> int | None:
        """None: all."""
        return self._bounds.max_num_blocks(tenant, self._description.num_blocks)

    def num_held(self, tenant: str) -> int:
        tables = [self._rows.tables[row] for row in self.rows_of.get(tenant, ())]
        return len(set().union(*tables)) + self._added.get(tenant, 0)

    def num_requests(self, tenant: str) -> int:
        return len(self.rows_of.get(tenant, ())) + self._num_added_requests.get(tenant, 0)

    def room(self, tenant: str, at_least: int) -> int:
        """In blocks; exact below `at_least`."""
        most = self.max_num_blocks(tenant)
        if most is None:
            return at_least
        num_with_doubles = sum(len(self._rows.tables[row]) for row in self.rows_of.get(tenant, ()))
        if num_with_doubles + self._added.get(tenant, 0) + at_least <= most:
            return at_least
        return most - self.num_held(tenant)

    def least_room(self) -> int:
        bounds = ((tenant, self.max_num_blocks(tenant)) for tenant in self.rows_of)
        room = (most - self.num_held(tenant) for tenant, most in bounds if most is not None)
        return min(room, default=self._description.num_blocks)

    def grow(self, rows: Iterable[int]) -> None:
        for tenant, own in self.rows_of.items():
            self._added[tenant] = self._added.get(tenant, 0) + len({*own} & {*rows})

    def take(self, tenant: str, num_blocks: int) -> None:
        self._added[tenant] = self._added.get(tenant, 0) + num_blocks
        self._num_added_requests[tenant] = self._num_added_requests.get(tenant, 0) + 1


def max_request_tokens(description: ExecutorDescription, tenant: str, bounds: TenantBounds) -> int:
    """Prompt and output."""
    num_blocks = bounds.max_num_blocks(tenant, description.num_blocks)
    if num_blocks is None:
        return description.max_request_tokens
    return min(description.max_request_tokens, num_blocks * description.block_size + 1)


def max_tokens_within(live: LiveRequest, description: ExecutorDescription, bounds: TenantBounds) -> int:
    """Of output: those it asks for, else all that its share holds."""
    if live.request.max_tokens is not None:
        return live.request.max_tokens
    room = max_request_tokens(description, live.request.key.tenant, bounds) - live.num_prompt_tokens
    return max(room, live.num_output_tokens + 1)

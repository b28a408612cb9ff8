"""The bounds of tenants, as values. Apart from the core that keeps them: the file that says them is read before."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

MAX_LIMIT = 1 << 40


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """None: there is none but those of all."""

    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    max_kv_share: float | None = None  # of each executor's blocks, above 0 up to 1
    max_num_streams: int | None = None

    def or_else(self, others: "TenantLimits") -> "TenantLimits":
        pairs = {field.name: (getattr(self, field.name), getattr(others, field.name)) for field in fields(self)}
        return TenantLimits(**{name: other if own is None else own for name, (own, other) in pairs.items()})


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class TenantBounds:
    """Of all tenants: where one has none of its own, those of any hold."""

    own: Mapping[str, TenantLimits] = field(default_factory=dict)
    any_tenant: TenantLimits = NO_LIMITS

    def of(self, tenant: str) -> TenantLimits:
        own = self.own.get(tenant)
        return self.any_tenant if own is None else own.or_else(self.any_tenant)

    @property
    def has_kv_shares(self) -> bool:
        return any(limits.max_kv_share is not None for limits in (self.any_tenant, *self.own.values()))

    def max_num_blocks(self, tenant: str, num_blocks: int) -> int | None:
        """None: all."""
        share = self.of(tenant).max_kv_share
        return None if share is None or share >= 1 else max(1, int(share * num_blocks))

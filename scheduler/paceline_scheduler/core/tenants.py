"""What each tenant may queue, and ask for in a minute, so that one of them leaves room to the others.

Refuses to know requests.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from paceline_scheduler.errors import InvalidRequestError, TenantLimitError
from paceline_scheduler.tenant_limits import TenantLimits

_BURST_S = 2.0
_QUEUE_RETRY_S = 1.0
_MIN_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class _Meter:
    """It fills up evenly; what is taken may leave a debt."""

    left: float
    at_s: float


class _Rate:
    def __init__(self, what: str) -> None:
        self._what = what
        self._meters: dict[str, _Meter] = {}

    def check(self, tenant: str, per_minute: int, now: float) -> None:
        left = self._left(tenant, per_minute, now)
        if left < 1:
            retry_s = max(_MIN_RETRY_S, (1 - left) * 60 / per_minute)
            raise TenantLimitError(f"this tenant has used up its {per_minute} {self._what} per minute", retry_s)

    def take(self, tenant: str, number: int, per_minute: int, now: float) -> None:
        self._meters[tenant] = _Meter(self._left(tenant, per_minute, now) - number, now)

    def keep(self, tenants: Collection[str]) -> None:
        """Forgets all others."""
        self._meters = {tenant: meter for tenant, meter in self._meters.items() if tenant in tenants}

    def _left(self, tenant: str, per_minute: int, now: float) -> float:
        most = max(1.0, per_minute * _BURST_S / 60)
        meter = self._meters.get(tenant)
        return most if meter is None else min(most, meter.left + (now - meter.at_s) * per_minute / 60)


class Tenants:
    """A tenant without bounds costs nothing."""

    def __init__(self) -> None:
        self._limits: Mapping[str, TenantLimits] = {}
        self._requests, self._tokens = _Rate("requests"), _Rate("tokens")

    def set(self, limits: Mapping[str, TenantLimits]) -> None:
        """What was taken before still counts."""
        self._limits = dict(limits)
        for rate in (self._requests, self._tokens):
            rate.keep(self._limits)

    def check_rates(self, tenant: str, now: float) -> None:
        """Raises TenantLimitError while a tenant has used up its minute."""
        for rate, per_minute in self._rates(tenant):
            rate.check(tenant, per_minute, now)

    def _rates(self, tenant: str) -> list[tuple[_Rate, int]]:
        limits = self._limits.get(tenant)
        if limits is None:
            return []
        pairs = (self._requests, limits.max_requests_per_minute), (self._tokens, limits.max_tokens_per_minute)
        return [(rate, per_minute) for rate, per_minute in pairs if per_minute is not None]

    def check_queue(self, tenant: str, waiting: tuple[int, int], new: tuple[int, int]) -> None:
        """Counts are in requests and prompt tokens. Raises TenantLimitError, or InvalidRequestError if `new` never
        fits.
        """
        limits = self._limits.get(tenant)
        if limits is None:
            return
        if limits.max_num_queued_tokens is not None and new[1] > limits.max_num_queued_tokens:
            raise InvalidRequestError(
                "prompt", f"has {new[1]} tokens; the queue takes at most {limits.max_num_queued_tokens} of this tenant"
            )
        bounds = limits.max_num_queued_reqs, limits.max_num_queued_tokens
        for what, before, more, at_most in zip(("requests", "prompt tokens"), waiting, new, bounds, strict=True):
            if at_most is not None and before + more > at_most:
                raise TenantLimitError(
                    f"{before} {what} of this tenant are waiting, its limit is {at_most}", _QUEUE_RETRY_S
                )

    def take(self, tenant: str, num_requests: int, num_tokens: int, now: float) -> None:
        """Output counts when it is complete."""
        for rate, per_minute in self._rates(tenant):
            rate.take(tenant, num_requests if rate is self._requests else num_tokens, per_minute, now)

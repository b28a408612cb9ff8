"""What each tenant may queue, and ask for in a minute, so that one of them leaves room to the others.

Refuses to know requests.
"""

from collections.abc import Callable
from dataclasses import dataclass

from paceline_scheduler.access.tenant_limits import TenantBounds
from paceline_scheduler.errors import InvalidRequestError, TenantLimitError

_BURST_S = 2.0
_QUEUE_RETRY_S = 1.0
_MIN_RETRY_S = 0.1
_MANY_METERS = 1024


@dataclass(frozen=True, slots=True)
class _Meter:
    """It fills up evenly; what is taken may leave a debt."""

    left: float
    at_s: float


class _Rate:
    def __init__(self, what: str) -> None:
        self._what = what
        self._meters: dict[str, _Meter] = {}
        self._max_meters = _MANY_METERS

    def check(self, tenant: str, per_minute: int, now: float) -> None:
        left = self._left(tenant, per_minute, now)
        if left < 1:
            retry_s = max(_MIN_RETRY_S, (1 - left) * 60 / per_minute)
            raise TenantLimitError(f"this tenant has used up its {per_minute} {self._what} per minute", retry_s)

    def take(self, tenant: str, number: int, per_minute: int, now: float) -> None:
        self._meters[tenant] = _Meter(self._left(tenant, per_minute, now) - number, now)

    @property
    def is_crowded(self) -> bool:
        return len(self._meters) > self._max_meters

    def tidy(self, rate_of: Callable[[str], int | None], now: float) -> None:
        """Forgets those that have all of their rate left."""
        found = ((tenant, rate_of(tenant)) for tenant in self._meters)
        kept = [tenant for tenant, rate in found if rate is not None and self._left(tenant, rate, now) < _most(rate)]
        self._meters = {tenant: self._meters[tenant] for tenant in kept}
        self._max_meters = max(_MANY_METERS, 2 * len(kept))

    def _left(self, tenant: str, per_minute: int, now: float) -> float:
        most, meter = _most(per_minute), self._meters.get(tenant)
        return most if meter is None else min(most, meter.left + (now - meter.at_s) * per_minute / 60)


def _most(per_minute: int) -> float:
    return max(1.0, per_minute * _BURST_S / 60)


class Tenants:
    """A tenant without bounds costs nothing."""

    def __init__(self) -> None:
        self._bounds = TenantBounds()
        self._requests, self._tokens = _Rate("requests"), _Rate("tokens")

    def set(self, bounds: TenantBounds, now: float) -> None:
        """What was taken before still counts."""
        self._bounds = bounds
        self._tidy(now)

    def _tidy(self, now: float) -> None:
        self._requests.tidy(lambda tenant: self._bounds.of(tenant).max_requests_per_minute, now)
        self._tokens.tidy(lambda tenant: self._bounds.of(tenant).max_tokens_per_minute, now)

    @property
    def bounds(self) -> TenantBounds:
        return self._bounds

    def check_rates(self, tenant: str, now: float) -> None:
        """Raises TenantLimitError while a tenant has used up its minute."""
        for rate, per_minute in self._rates(tenant):
            rate.check(tenant, per_minute, now)

    def _rates(self, tenant: str) -> list[tuple[_Rate, int]]:
        limits = self._bounds.of(tenant)
        pairs = (self._requests, limits.max_requests_per_minute), (self._tokens, limits.max_tokens_per_minute)
        return [(rate, per_minute) for rate, per_minute in pairs if per_minute is not None]

    def check_queue(self, tenant: str, waiting: tuple[int, int], new: tuple[int, int]) -> None:
        """Counts are in requests and prompt tokens. Raises TenantLimitError, or InvalidRequestError if `new` never
        fits.
        """
        limits = self._bounds.of(tenant)
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
        if self._requests.is_crowded or self._tokens.is_crowded:
            self._tidy(now)

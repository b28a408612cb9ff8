"""The bounds of one tenant, as a value. Apart from the core that keeps them: the file that says them is read before."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """None: there is none but those of all."""

    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    max_num_streams: int | None = None

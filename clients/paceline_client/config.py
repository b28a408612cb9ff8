"""The client's settings: small frozen values with their units in their names.

Knows defaults and ranges. Refuses to know the environment and gRPC; `wire` turns these into channel options.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_SHARE_OF_OUTAGE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeout:
    """How long to wait for what. Running out raises `ConnectFailedError` or `RequestTimeoutError`."""

    connect_seconds: float = 10.0
    """Until a connection stands, over all attempts to make one."""
    refused_seconds: float = 2.0
    """The same where every address refuses the connection: nothing is there, and nobody is only slow. A request that
    was running is not given up so soon; see `Retry.max_outage_seconds`."""
    call_seconds: float = 10.0
    """For each short call: listing models, tokenising, cancelling."""
    total_seconds: float | None = None
    """For a whole request, from the call to its last token. None, or infinity: no limit."""

    def __post_init__(self) -> None:
        _require_positive("connect_seconds", self.connect_seconds)
        _require_positive("refused_seconds", self.refused_seconds)
        _require_positive("call_seconds", self.call_seconds)
        if self.total_seconds is not None:
            _require_positive("total_seconds", self.total_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How often and how fast to try again: a refused request, a connection that cannot be made, one that was lost."""

    max_attempts: int = 3
    """Attempts at a request that is refused for lack of room before its first token, and at a short call whose
    connection is lost; 1 never tries again."""
    initial_delay_seconds: float = 0.1
    multiplier: float = 1.5
    max_delay_seconds: float = 5.0
    """The longest pause. A server that refuses a request and asks for a longer one is not tried again: its error is
    raised at once."""
    max_outage_seconds: float = 60.0
    """How long a request that was sent waits for a server to go on with it, from its last output on, or before that for
    an executor to begin it, where it has no `Timeout.total_seconds`; with one, that is the limit. May be infinite."""
    jitter: float = 0.2
    """Each pause is drawn from this fraction below to this fraction above its nominal length."""
    draw: Callable[[], float] = field(default=random.random, repr=False)
    """Draws the jitter from [0, 1); for tests."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError(f"max_attempts must be at least 1, not {self.max_attempts}")
        _require_positive("initial_delay_seconds", self.initial_delay_seconds)
        _require_positive("max_delay_seconds", self.max_delay_seconds)
        _require_positive("max_outage_seconds", self.max_outage_seconds)
        if self.multiplier < 1:
            raise ValueError(f"multiplier must be at least 1, not {self.multiplier}")
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), not {self.jitter}")

    def delay_seconds(self, num_failures: int, *, outage_seconds: float = math.inf) -> float:
        """The pause after this many failures in a row, 1 or more.

        At most a tenth of the outage so far, but for the first pause: what comes back soon is soon found.
        """
        # 64 multiplications pass any sensible cap; the bound keeps the power from overflowing.
        nominal = self.initial_delay_seconds * self.multiplier ** min(num_failures - 1, 64)
        nominal = min(nominal, max(self.initial_delay_seconds, _SHARE_OF_OUTAGE * outage_seconds))
        spread = 1 + self.jitter * (2 * self.draw() - 1)
        return min(nominal * spread, self.max_delay_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepalive:
    """How each side tells that the other is there."""

    heartbeat_seconds: float = 0.5
    """The pause between two heartbeats in a session. Acknowledgements of finished requests travel with them."""
    silence_seconds: float = 1.5
    """A server that sends nothing for this long, not even a heartbeat, counts as lost."""

    def __post_init__(self) -> None:
        _require_positive("heartbeat_seconds", self.heartbeat_seconds)
        if self.silence_seconds < 2 * self.heartbeat_seconds:
            raise ValueError("silence_seconds must be at least twice heartbeat_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Encryption. Three texts in PEM, or a folder; unset takes the system's roots and presents no certificate."""

    root_certificates: bytes | None = None
    private_key: bytes | None = field(default=None, repr=False)
    certificate_chain: bytes | None = None
    server_name: str | None = None
    """The name the server's certificate is checked against, where it is not the one that is dialled."""
    folder: str | Path | None = None
    """In place of the three: `ca.crt`, and `tls.crt` with `tls.key` for a certificate of one's own. Each connection has
    what is in these files then."""

    def __post_init__(self) -> None:
        if self.folder is not None and (self.root_certificates or self.private_key or self.certificate_chain):
            raise ValueError("folder stands for root_certificates, private_key and certificate_chain: set either")
        if (self.private_key is None) != (self.certificate_chain is None):
            raise ValueError("private_key and certificate_chain belong together: set both or neither")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client holds at most."""

    max_concurrent_requests: int = 4096
    """Requests running at once in one session; one more raises `OverloadedError` without being sent."""
    max_buffered_tokens: int = 4096
    """Tokens of one completion that have arrived and were not read; one more raises `SlowConsumerError`."""
    max_request_bytes: int = 4 * 1024 * 1024 - 65536
    """The largest request that is sent: below what gRPC servers accept, because a larger one would cost the session."""

    def __post_init__(self) -> None:
        for name in ("max_concurrent_requests", "max_buffered_tokens", "max_request_bytes"):
            _require_positive(name, getattr(self, name))


def _require_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be above 0, not {value}")

"""Which address is tried next, and when. Pure: it is told what happened and what time it is, and does nothing.

Addresses are tried in rounds, each once in a round and without a pause; a round in which nobody took the client in is
followed by one. A round begins with the address that served last. Times are seconds of the caller's clock.
"""

import math
from collections.abc import Collection

from paceline_client.config import Retry

# A host that drops packets must not use up the whole time.
_ATTEMPT_SECONDS = 3.0
_ATTEMPT_BESIDE_OTHERS_SECONDS = 1.0
HEAD_START_SECONDS = 0.15
"""An address is tried alone for so long, as in RFC 8305, and then the next one beside it.

One that is frozen holds up nobody, and one that is only slow still answers first: its server may have the requests,
while a standby would wait to see whether it has died.
"""


class AddressPicker:
    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._first: str | None = None  # where a round begins
        self._referral: str | None = None
        self._guest: str | None = None  # the one address that is tried although the target does not have it
        self._failures: dict[str, float] = {}  # in this round, with the pause that the server asked for
        self._last_failure_at_s = -math.inf
        self._num_failed_rounds = 0
        self._outage_began_s: float | None = None
        self._resume_at_s = -math.inf

    @property
    def resume_at_s(self) -> float:
        return self._resume_at_s

    def next_address(self, known: tuple[str, ...], beside: Collection[str] = ()) -> str | None:
        """None when no address is left; those in `beside` are being tried."""
        tried = {*self._failures, *beside}
        referral, self._referral = self._referral, None
        if referral in known and referral not in tried:
            return referral
        start = known.index(self._first) if self._first in known else 0
        in_turn = known[start:] + known[:start]
        if self._guest is not None:
            # What the target says comes first, unless the guest has shown that it serves.
            in_turn = (self._guest, *in_turn) if self._guest == self._first else (*in_turn, self._guest)
        return next((one for one in in_turn if one not in tried), None)

    def attempt_seconds(self, known: tuple[str, ...]) -> float:
        return _ATTEMPT_SECONDS if len(known) == 1 else _ATTEMPT_BESIDE_OTHERS_SECONDS

    def end_round(self, now_s: float) -> None:
        """Nobody took the client in."""
        self._num_failed_rounds += 1
        began_s = now_s if self._outage_began_s is None else self._outage_began_s
        asked_seconds = min(self._failures.values(), default=0.0)
        pause = self._retry.delay_seconds(self._num_failed_rounds, outage_seconds=now_s - began_s)
        self._resume_at_s = max(self._last_failure_at_s, began_s) + max(asked_seconds, pause)
        self._failures.clear()
        if self._guest != self._first:
            # Whoever named it may name it again.
            self._guest = None

    # What happened

    def served(self, address: str) -> None:
        """The right server answered: earlier failures no longer count."""
        self._first = address
        if address != self._guest:
            self._guest = None
        self._failures.clear()
        self._num_failed_rounds = 0
        self._outage_began_s = None
        self._resume_at_s = -math.inf

    def broke(self, address: str, at_s: float) -> None:
        """A server that had served is tried once more, and then the others."""
        self.served(address)
        self._outage_began_s = at_s

    def went_away(self, address: str, known: tuple[str, ...], at_s: float) -> None:
        """A server that had served goes: the next address is tried first."""
        self.served(address)
        self._outage_began_s = at_s
        if address in known:
            self._first = known[(known.index(address) + 1) % len(known)]
        else:
            self._first = self._guest = None

    def failed(self, address: str, at_s: float, *, asked_seconds: float = 0.0) -> None:
        """Also for a wrong server, which may say when to ask again."""
        self._failures[address] = asked_seconds
        self._last_failure_at_s = at_s
        if self._outage_began_s is None:
            self._outage_began_s = at_s

    def referred_to(self, address: str) -> None:
        """It is tried next, unless it was in this round."""
        self._referral = address

    def named_outside(self, address: str) -> None:
        """A server of the target named one outside it: it is tried after all of the target, one such at a time."""
        self._guest = address

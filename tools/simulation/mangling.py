"""What a network may do to single messages: lose, double, delay and change them, or bring those of an earlier stream.

Knows which messages there are. Refuses to know who sends them, and why.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from paceline.plan.values import BatchPlan, SnapshotPart
from paceline.v1 import inference_pb2 as pb
from simulation.executors import ATTACH
from simulation.network import Call, Inbox, Network
from simulation.scenario import FEWEST_BLOCKS

_NUM_REMEMBERED = 60
_MANGLED_SHARE = 0.15
_LATE_S = (0.15, 1.0)

PastPlans = dict[tuple[str, int], tuple[int, BatchPlan]]
"""The last plan that arrived at an executor by its step, and the number of the call it came by."""

Arrivals = list[tuple[float, object]]
"""What arrives instead of a message, each after a delay in seconds."""


class Mangler:
    """Loses, doubles and delays messages of plan streams, and brings those of earlier streams."""

    def __init__(self, random: Random, tell: Callable[[str], None]) -> None:
        self._random = random
        self._tell = tell
        self._seen: list[tuple[Call, bool, object]] = []

    def __call__(self, call: Call, inbox: Inbox, message: object) -> Arrivals | None:
        """Return what arrives instead, or None: the message, as it should."""
        if call.method != ATTACH:
            return None
        is_to_server = inbox is call.to_server
        self._seen.append((call, is_to_server, message))
        del self._seen[:-_NUM_REMEMBERED]
        if self._random.random() >= _MANGLED_SHARE:
            return None
        call.tampered()
        match self._random.randrange(5):
            case 0:
                self._tell(f"a message of {call.method} {call.number} is lost")
                return []
            case 1:
                self._tell(f"a message of {call.method} {call.number} is doubled")
                return [(0.0, message), (0.01 * self._random.random(), message)]
            case 2:
                self._tell(f"a message of {call.method} {call.number} is late")
                return [(0.1 * self._random.random(), message)]
            case _:
                return self._confuse(call, message, is_to_server)

    def _confuse(self, call: Call, message: object, is_to_server: bool) -> Arrivals | None:
        """Take the plan of the same number, or anything, from an earlier stream to the same executor."""
        earlier = [
            each
            for other, way, each in self._seen
            if other is not call
            and other.server.name == call.server.name
            and way is is_to_server
            # A snapshot says of no stream that it is of it: it belongs to the welcome that came before it.
            and not isinstance(each, SnapshotPart)
        ]
        if isinstance(message, BatchPlan):
            same: list[object] = [
                each for each in earlier if isinstance(each, BatchPlan) and each.step_id == message.step_id
            ]
            earlier = same or earlier
        if not earlier:
            return None
        self._tell(f"a message of an earlier stream comes to {call.method} {call.number}")
        return [(0.0, self._random.choice(earlier)), (0.001, message)]


class Replay:
    """Brings a plan of an earlier stream in place of the one with its number, once. `past` has those that arrived."""

    def __init__(self, past: PastPlans, tell: Callable[[str], None]) -> None:
        self._past = past
        self._tell = tell
        self._is_done = False

    def __call__(self, call: Call, inbox: Inbox, message: object) -> Arrivals | None:
        """Return an old plan, or None: the message, as it should."""
        del inbox
        if self._is_done or not isinstance(message, BatchPlan):
            return None
        number, plan = self._past.get((call.server.name, message.step_id), (call.number, message))
        if number == call.number:
            return None
        self._is_done = True
        call.tampered()
        self._tell(f"plan {plan.epoch}.{plan.step_id} comes to {call.method} {call.number} in place of the next")
        return [(0.0, plan)]


class GrantChanger:
    """Lets an executor use another block than the one it is granted, once."""

    def __init__(self, random: Random, tell: Callable[[str], None]) -> None:
        self._random = random
        self._tell = tell
        self._is_done = False

    def __call__(self, call: Call, inbox: Inbox, message: object) -> Arrivals | None:
        """Return a plan with another block, or None: the message, as it should."""
        del inbox
        if self._is_done or not isinstance(message, BatchPlan) or not len(message.grants.block_ids):
            return None
        block_ids = message.grants.block_ids.copy()
        others = [block for block in range(FEWEST_BLOCKS) if block not in block_ids]
        if not others:
            return None
        self._is_done = True
        call.tampered()
        block_ids[-1] = self._random.choice(others)
        self._tell(f"step {message.step_id} of {call.method} {call.number} grants block {block_ids[-1]} instead")
        return [(0.0, replace(message, grants=replace(message.grants, block_ids=block_ids)))]


class LateRequest:
    """Breaks a session for its client when it has sent a request, which arrives after the client has come back."""

    def __init__(self, random: Random, network: Network, tell: Callable[[str], None]) -> None:
        self._random = random
        self._network = network
        self._seen: set[str] = set()  # requests that were late once
        self._tell = tell

    def __call__(self, call: Call, inbox: Inbox, message: object) -> None:
        """Let the message arrive, only late."""
        del inbox
        if not isinstance(message, pb.SessionRequest) or not message.HasField("generate"):
            return
        if message.generate.request_id not in self._seen:
            self._seen.add(message.generate.request_id)
            late_s = self._random.uniform(*_LATE_S)
            self._tell(
                f"{call.method} {call.number} breaks for {call.client.name}; the rest arrives {late_s:.1f} s late"
            )
            self._network.lose_client(call, late_s)

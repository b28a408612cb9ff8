"""What a network may do to single messages: lose, double, delay and change them, or bring those of an earlier stream.

Knows which messages there are. Refuses to know who sends them, and why.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random

from paceline.plan.codec import decode_request, decode_response, encode_request
from paceline.plan.codec.bounds import BoundError
from paceline.plan.values import BatchPlan, FromExecutor, SnapshotPart, ToExecutor
from paceline.v1 import inference_pb2 as pb
from simulation.executors import ATTACH
from simulation.network import Call, Inbox, Network
from simulation.scenario import FEWEST_BLOCKS, ROGUE

_NUM_REMEMBERED = 60
_MANGLED_SHARE = 0.15
_LATE_S = (0.15, 1.0)


class PastPlans:
    """The plans that arrived at executors."""

    def __init__(self) -> None:
        self._unread: list[tuple[str, int, bytes]] = []
        self._last: dict[tuple[str, int], tuple[int, BatchPlan]] = {}

    def add(self, executor: str, call_number: int, data: bytes) -> None:
        self._unread.append((executor, call_number, data))

    def last(self, executor: str, step_id: int) -> tuple[int, BatchPlan] | None:
        """Return the last plan of a step that arrived at an executor, and the number of the call it came by."""
        for name, number, data in self._unread:
            with suppress(BoundError):  # spoilt
                for plan in decode_request(data):
                    if isinstance(plan, BatchPlan):
                        self._last[name, plan.step_id] = number, plan
        self._unread.clear()
        return self._last.get((executor, step_id))


Arrivals = list[tuple[float, object]]
"""What arrives instead of a message, each after a delay in seconds."""


def read(call: Call, inbox: Inbox, data: bytes) -> list[ToExecutor] | list[FromExecutor]:
    return decode_request(data) if inbox is call.to_server else decode_response(data)


class Mangler:
    """Loses, doubles and delays messages of plan streams, and brings those of earlier streams."""

    def __init__(self, random: Random, tell: Callable[[str], None]) -> None:
        self._random = random
        self._tell = tell
        self._seen: list[tuple[Call, Inbox, bytes]] = []

    def __call__(self, call: Call, inbox: Inbox, message: object) -> Arrivals | None:
        """Return what arrives instead, or None: the message, as it should."""
        if call.method != ATTACH or not isinstance(message, bytes) or call.client.name == ROGUE:
            return None
        self._seen.append((call, inbox, message))
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
                return self._confuse(call, inbox, message)

    def _confuse(self, call: Call, inbox: Inbox, message: bytes) -> Arrivals | None:
        """Take the plan of the same number, or anything, from an earlier stream to the same executor."""
        earlier = [
            (first, data)
            for other, way, data in self._seen
            if other is not call
            and other.server.name == call.server.name
            and (way is other.to_server) is (inbox is call.to_server)
            # A snapshot says of no stream that it is of it: it belongs to the welcome that came before it.
            and not isinstance(first := read(other, way, data)[0], SnapshotPart)
        ]
        said = read(call, inbox, message)[0]
        if isinstance(said, BatchPlan):
            plans = [(plan, data) for plan, data in earlier if isinstance(plan, BatchPlan)]
            earlier = [(plan, data) for plan, data in plans if plan.step_id == said.step_id] or earlier
        if not earlier:
            return None
        self._tell(f"a message of an earlier stream comes to {call.method} {call.number}")
        return [(0.0, self._random.choice(earlier)[1]), (0.001, message)]


class Replay:
    """Brings a plan of an earlier stream in place of the one with its number, once. `past` has those that arrived."""

    def __init__(self, past: PastPlans, tell: Callable[[str], None]) -> None:
        self._past = past
        self._tell = tell
        self._is_done = False

    def __call__(self, call: Call, inbox: Inbox, message: object) -> Arrivals | None:
        """Return an old plan, or None: the message, as it should."""
        due = None if self._is_done else plans_in(call, inbox, message)
        found = self._past.last(call.server.name, due[0].step_id) if due else None
        if found is None or found[0] == call.number:
            return None
        plan = found[1]
        self._is_done = True
        call.tampered()
        self._tell(f"plan {plan.epoch}.{plan.step_id} comes to {call.method} {call.number} in place of the next")
        return [(0.0, encode_request(plan))]


class GrantChanger:
    """Lets an executor use another block than the one it is granted, once."""

    def __init__(self, random: Random, tell: Callable[[str], None]) -> None:
        self._random = random
        self._tell = tell
        self._is_done = False

    def __call__(self, call: Call, inbox: Inbox, message: object) -> Arrivals | None:
        """Return a plan with another block, or None: the message, as it should."""
        plans = [] if self._is_done else plans_in(call, inbox, message)
        index = next((index for index, plan in enumerate(plans) if plan.grants.block_ids.size), None)
        if index is None:
            return None
        plan = plans[index]
        block_ids = plan.grants.block_ids.copy()
        others = [block for block in range(FEWEST_BLOCKS) if block not in block_ids]
        if not others:
            return None
        self._is_done = True
        call.tampered(len(plans))
        block_ids[-1] = self._random.choice(others)
        self._tell(f"step {plan.step_id} of {call.method} {call.number} grants block {block_ids[-1]} instead")
        plans[index] = replace(plan, grants=replace(plan.grants, block_ids=block_ids))
        return [(0.0, encode_request(*plans))]


def plans_in(call: Call, inbox: Inbox, message: object) -> list[BatchPlan]:
    if call.method != ATTACH or inbox is not call.to_server or not isinstance(message, bytes):
        return []
    if call.client.name == ROGUE:
        return []
    return [plan for plan in decode_request(message) if isinstance(plan, BatchPlan)]


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

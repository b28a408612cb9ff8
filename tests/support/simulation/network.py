"""Calls between nodes over a network with latency, and the ways in which it fails.

A call is two one-way pipes; what is sent arrives in order, or not at all. Knows hosts, paths between them and calls.
Refuses to know what the messages mean, except that somebody may want to mangle them.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any

from simulation.loop import WORLD, Node, NodeState, SimulationLoop, keep_failure

_LATENCY_S = (0.0001, 0.002)
_MAX_EXCUSED_PLANS = 4  # more are not sent before the answer to what was changed, or doubled, can be there


class End(Enum):
    """Why nothing more comes, where it is not a status."""

    HALF_CLOSED = "half-closed"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    BROKEN = "broken"
    REFUSED = "refused"


class CallEndedError(Exception):
    """Nothing more comes. `end` is an End, or what the server ended the call with."""

    def __init__(self, end: object) -> None:
        super().__init__(str(end))
        self.end = end


class PathState(Enum):
    """What becomes of what is sent between two hosts."""

    OPEN = "open"
    HELD = "held"  # it arrives when the path opens again
    SWALLOWING = "swallowing"  # it is gone, and nobody is told


class Path:
    """The way between two hosts, both directions alike."""

    def __init__(self) -> None:
        self.state = PathState.OPEN
        self.lag_s = (0.0, 0.0)
        self.is_reset_after = False  # whether connections that miss bytes are reset when it opens again
        self.held: list[Callable[[], None]] = []


@dataclass(slots=True)
class _Ended:
    end: object


class Inbox:
    """Where one end of a call finds what has arrived."""

    def __init__(self, owner: Node, sender: Node) -> None:
        self.owner = owner
        self.sender = sender
        self.last_arrival_s = 0.0
        self.misses_bytes = False
        self.end: object = None
        self.on_end: Callable[[object], None] | None = None
        self._messages: deque[object] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def arrive(self, message: object) -> None:
        """Take what came; after the end nothing counts."""
        if self.end is not None and not (self.end is End.HALF_CLOSED and isinstance(message, _Ended)):
            return
        if isinstance(message, _Ended):
            self.end = message.end
            if self.on_end is not None:
                self.on_end(message.end)
        else:
            self._messages.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> object:
        """Return the next message; CallEndedError behind the last one."""
        while not self._messages:
            if self.end is not None:
                raise CallEndedError(self.end)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._messages.popleft()


class Call:
    """A call as both ends see it; each uses its own half."""

    def __init__(self, network: "Network", number: int, method: str, client: Node, server: Node) -> None:
        self.number = number
        self.method = method
        self.client = client
        self.server = server
        self.to_client = Inbox(client, server)
        self.to_server = Inbox(server, client)
        self.num_excused_plans = 0  # that may break a rule, since a fault changed what was said before them
        self._network = network

    # The client's half

    def ask(self, message: object) -> None:
        if self.to_client.end is not None:
            raise CallEndedError(self.to_client.end)
        self._network.send(self, self.to_server, message)

    async def answer(self) -> object:
        return await self.to_client.receive()

    def half_close(self) -> None:
        """Send nothing more."""
        self._network.send(self, self.to_server, _Ended(End.HALF_CLOSED))

    def cancel(self) -> None:
        """End the call; a second time does nothing."""
        if self.to_client.end is None:
            self.to_client.arrive(_Ended(End.CANCELLED))
            self._network.send(self, self.to_server, _Ended(End.CANCELLED))
            self._network.forget(self)

    # The server's half

    def tell(self, message: object) -> None:
        self._network.send(self, self.to_client, message)

    async def question(self) -> object:
        return await self.to_server.receive()

    def finish(self, end: object = End.FINISHED) -> None:
        self._network.send(self, self.to_client, _Ended(end))
        self._network.forget(self)

    def cut(self, end: object, *inboxes: Inbox) -> None:
        """Let ends of the call find it ended, after what is on its way."""
        for inbox in inboxes:
            self._network.send(self, inbox, _Ended(end))

    def tampered(self, num_plans: int = 1) -> None:
        """A message, with so many plans, was changed: until that can be known the peers may say what does not fit."""
        self.num_excused_plans = num_plans + _MAX_EXCUSED_PLANS


Serve = Callable[[Call], Coroutine[Any, Any, None]]
Mangle = Callable[[Call, Inbox, object], list[tuple[float, object]] | None]


class Network:
    """Hosts by name, the paths between them, and every open call."""

    def __init__(self, loop: SimulationLoop, random: Random, on_arrival: Callable[[Call, Inbox, object], None]) -> None:
        self._loop = loop
        self._random = random
        self._on_arrival = on_arrival
        self._listeners: dict[str, tuple[Node, Serve]] = {}
        self._paths: dict[tuple[str, str], Path] = {}
        self._calls: dict[int, Call] = {}
        self._num_calls = 0
        self.mangle: Mangle | None = None

    def listen(self, node: Node, serve: Serve) -> None:
        self._listeners[node.name] = (node, serve)

    def path(self, one: str, other: str) -> Path:
        key = (one, other) if one < other else (other, one)
        path = self._paths.get(key)
        if path is None:
            path = self._paths[key] = Path()
        return path

    def open_path(self, path: Path) -> None:
        """End whatever is wrong with a path; what was held is sent on."""
        path.state, path.lag_s = PathState.OPEN, (0.0, 0.0)
        held, path.held = path.held, []
        for send in held:
            send()

    def break_path(self, one: str, other: str) -> int:
        """Reset every call between two hosts; returns how many there were."""
        calls = [call for call in self._calls.values() if {call.client.name, call.server.name} == {one, other}]
        for call in calls:
            self._break(call)
        return len(calls)

    def gone(self, node: Node) -> None:
        """A node was killed: its peers find their calls broken, and nothing listens there."""
        found = self._listeners.get(node.name)
        if found is not None and found[0] is node:
            del self._listeners[node.name]
        for call in [call for call in self._calls.values() if node in (call.client, call.server)]:
            self._break(call)

    def calls(self, method: str) -> list[Call]:
        """Return the open calls of a method, oldest first."""
        return [call for call in self._calls.values() if call.method == method]

    def call(self, client: Node, name: str, method: str) -> Call:
        """Begin a call. It is refused if nothing listens there."""
        self._num_calls += 1
        found = self._listeners.get(name)
        if found is None:
            call = Call(self, self._num_calls, method, client, Node(name))
            self.send(call, call.to_client, _Ended(End.REFUSED))
            return call
        server, serve = found
        call = Call(self, self._num_calls, method, client, server)
        self._calls[call.number] = call

        def begin() -> None:
            task = self._loop.create_task(serve(call), name=f"{method} {call.number}")
            task.add_done_callback(keep_failure)

            def ended(end: object) -> None:
                if end is not End.HALF_CLOSED:
                    task.cancel()

            call.to_server.on_end = ended
            if call.to_server.end is not None:
                ended(call.to_server.end)

        self._send(call, call.to_server, begin, None)
        return call

    def lose_client(self, call: Call, late_s: float) -> None:
        """Break a call for its client now; what it has sent reaches the server late, and later the break does too."""
        self.forget(call)
        call.to_server.last_arrival_s = max(call.to_server.last_arrival_s, self._loop.now_s + late_s)
        self._loop.call_on(WORLD, self._loop.now_s, call.cut, End.BROKEN, call.to_client)
        self._loop.call_on(WORLD, self._loop.now_s + 2 * late_s, call.cut, End.BROKEN, call.to_server)

    def send(self, call: Call, inbox: Inbox, message: object) -> None:
        if self.mangle is not None and not isinstance(message, _Ended):
            mangled = self.mangle(call, inbox, message)
            if mangled is not None:
                for delay_s, each in mangled:
                    self._out_of_order(call, inbox, each, delay_s)
                return
        self._send(call, inbox, None, message)

    def forget(self, call: Call) -> None:
        """A call is over for one of its ends, and soon for the other."""
        self._calls.pop(call.number, None)

    def _break(self, call: Call) -> None:
        if self.path(call.client.name, call.server.name).state is not PathState.SWALLOWING:
            self.forget(call)  # else neither end hears of it, and the call is reset later
        call.cut(End.BROKEN, call.to_client, call.to_server)

    def _send(self, call: Call, inbox: Inbox, run: Callable[[], None] | None, message: object) -> None:
        path = self.path(inbox.owner.name, inbox.sender.name)
        if path.state is PathState.SWALLOWING:
            inbox.misses_bytes = True
            return
        if inbox.misses_bytes and not isinstance(message, _Ended):
            return  # nothing can follow what is lost, but a reset
        if path.state is PathState.HELD:
            path.held.append(lambda: self._send(call, inbox, run, message))
            return
        low_s, high_s = _LATENCY_S
        delay_s = low_s + (high_s - low_s) * self._random.random()
        if path.lag_s[1]:
            delay_s += self._random.uniform(*path.lag_s)
        arrival_s = inbox.last_arrival_s = max(inbox.last_arrival_s, self._loop.now_s + delay_s)
        if run is not None:
            self._loop.call_on(inbox.owner, arrival_s, run)
        else:
            self._loop.call_on(inbox.owner, arrival_s, self._arrive, call, inbox, message)

    def _out_of_order(self, call: Call, inbox: Inbox, message: object, delay_s: float) -> None:
        at_s = self._loop.now_s + _LATENCY_S[0] + delay_s
        self._loop.call_on(inbox.owner, at_s, self._arrive, call, inbox, message)

    def _arrive(self, call: Call, inbox: Inbox, message: object) -> None:
        if inbox.end is None:
            self._on_arrival(call, inbox, message.end if isinstance(message, _Ended) else message)
        inbox.arrive(message)


@dataclass(frozen=True, slots=True)
class Site:
    """What a host is called, runs on and draws from."""

    name: str
    loop: SimulationLoop
    network: Network
    random: Random


class Host:
    """A host on which one process after another runs."""

    def __init__(self, site: Site) -> None:
        self.name, self._loop, self._network, self._random = site.name, site.loop, site.network, site.random
        self.node = Node(site.name)
        self.node.state = NodeState.DEAD
        self.is_draining = False

    def kill(self) -> None:
        """End the process at once."""
        self._loop.kill(self.node)
        self._network.gone(self.node)

    def _next_node(self) -> Node:
        assert self.node.is_dead, "one process at a time"
        self.node = self._loop.add_node(self.name)
        self.is_draining = False
        return self.node

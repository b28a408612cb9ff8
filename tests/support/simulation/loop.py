"""An event loop with virtual time and with nodes, which can be killed, frozen, or have their clock set.

Knows callbacks and the node each belongs to. Refuses to know what runs on them.
"""

import asyncio
import heapq
import sys
from asyncio import _set_running_loop
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from typing import Any, TypeVar, TypeVarTuple

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_MAX_CALLBACKS_AT_ONCE = 100_000
_MAX_LAST_SECONDS = 40


class LivelockError(Exception):
    """Virtual time does not pass any more."""


class NodeState(Enum):
    """Whether the callbacks of a node run."""

    RUNNING = "running"
    FROZEN = "frozen"
    DEAD = "dead"


_NODE: ContextVar["Node"] = ContextVar("node")


class Node:
    """One process. A restarted process is another node."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = NodeState.RUNNING
        self.clock_ahead_s = 0.0
        self.context = copy_context()
        self.context.run(_NODE.set, self)
        self.kept: list[Event] = []  # what is to run when it thaws, or when a run is over and cleans up
        self.tasks: list[asyncio.Task[Any]] = []  # a killed node's tasks must not be collected: that runs their cleanup

    @property
    def is_dead(self) -> bool:
        return self.state is NodeState.DEAD


WORLD = Node("world")


class Event(asyncio.TimerHandle):
    """A callback and whose it is."""

    __slots__ = ("arguments", "context", "is_cancelled", "node", "run", "when_s")

    def __init__(
        self, node: Node, run: Callable[..., object], arguments: tuple[Any, ...], context: Context, when_s: float
    ) -> None:
        self.node, self.run, self.arguments, self.context, self.when_s = node, run, arguments, context, when_s
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        """Return when it is due, on its node's clock."""
        return self.when_s + self.node.clock_ahead_s

    def __repr__(self) -> str:
        return f"<Event of {self.node.name}: {self.run!r}>"


class SimulationLoop(asyncio.BaseEventLoop):
    """Runs what is ready in order, then lets time jump to the next timer. No sockets, threads or signals."""

    def __init__(self) -> None:
        self._is_running = self._is_stopping = False  # before asyncio's own, which asks
        super().__init__()
        self.now_s = 0.0
        self.node = WORLD
        self.failures: list[BaseException | str] = []  # that nobody caught: mistakes of the code under test
        self._due: deque[Event] = deque()
        self._timers: list[tuple[float, int, Event]] = []
        self._num_timers = 0
        self._generators: list[AsyncGenerator[Any, Any]] = []
        self._nodes: list[Node] = []
        self._is_over = False

    # Nodes

    def add_node(self, name: str) -> Node:
        self._nodes.append(Node(name))
        return self._nodes[-1]

    def spawn(self, node: Node, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        return self.create_task(coroutine, context=node.context.copy())

    def call_on(self, node: Node, at_s: float, run: Callable[..., object], *arguments: object) -> None:
        """Run a callback on a node at a virtual time; of equal times in the order of the calls."""
        self._push_timer(Event(node, run, arguments, node.context, max(self.now_s, at_s)))

    def run_as(self, node: Node, run: Callable[[], _T]) -> _T:
        """Call something as a node, at once."""
        before, self.node = self.node, node
        try:
            return node.context.copy().run(run)
        finally:
            self.node = before

    def kill(self, node: Node) -> None:
        """Let nothing of a node run ever again."""
        node.state = NodeState.DEAD

    def freeze(self, node: Node) -> None:
        """Keep what a node should run until it thaws."""
        if node.state is NodeState.RUNNING:
            node.state = NodeState.FROZEN

    def thaw(self, node: Node) -> None:
        """Run what was kept, in order, and go on."""
        if node.state is NodeState.FROZEN:
            node.state = NodeState.RUNNING
            self._due.extend(node.kept)
            node.kept.clear()

    def set_clock(self, node: Node, seconds: float) -> None:
        """Let a node's monotonic clock jump ahead: its timers are due so much earlier."""
        node.clock_ahead_s += seconds
        moved = []
        for when_s, number, event in self._timers:
            if event.node is node:
                event.when_s = max(self.now_s, when_s - seconds)
            moved.append((event.when_s, number, event))
        self._timers = moved
        heapq.heapify(self._timers)

    # What asyncio calls

    def time(self) -> float:
        """Return the time on the clock of the node that is running."""
        return self.now_s + self.node.clock_ahead_s

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        context = copy_context() if context is None else context
        event = Event(context.get(_NODE, WORLD), callback, args, context, self.now_s)
        self._due.append(event)
        return event

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """The same: there are no threads."""
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        context = copy_context() if context is None else context
        node = context.get(_NODE, WORLD)
        event = Event(node, callback, args, context, max(self.now_s, when - node.clock_ahead_s))
        self._push_timer(event)
        return event

    def call_later(
        self,
        delay: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def create_task(
        self,
        coro: Generator[Any, None, _T] | Coroutine[Any, Any, _T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[_T]:
        task_name = None if name is None else str(name)
        task: asyncio.Task[_T] = asyncio.Task(coro, loop=self, name=task_name, context=context)
        (_NODE.get(WORLD) if context is None else context.get(_NODE, WORLD)).tasks.append(task)
        return task

    def run_in_executor(self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts) -> asyncio.Future[_T]:
        del executor
        done: asyncio.Future[_T] = self.create_future()
        done.set_result(func(*args))
        return done

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what nobody caught."""
        if not self._is_over:
            self.failures.append(context.get("exception") or str(context["message"]))

    def is_running(self) -> bool:
        return self._is_running

    def stop(self) -> None:
        """Return from `run_forever` after this callback."""
        self._is_stopping = True

    def get_debug(self) -> bool:
        """Never: asyncio's debug mode looks at real clocks."""
        return False

    # Running

    def run_forever(self) -> None:
        """Run callbacks until stopped, or until nothing is left to run."""
        hooks = sys.get_asyncgen_hooks()
        # Kept until the end: where the collector finds an abandoned one must not decide what happens when.
        sys.set_asyncgen_hooks(firstiter=self._generators.append, finalizer=_ignore)
        _set_running_loop(self)
        self._is_running, self._is_stopping = True, False
        try:
            while not self._is_stopping and (self._due or self._timers):
                self._run_ready()
                if not self._is_stopping:
                    self._advance()
        finally:
            self._is_running, self.node = False, WORLD
            _set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def end(self) -> None:
        """Cancel every task of every node and let it end; call it from outside, when the run is over."""
        self._is_over = True
        for node in self._nodes:
            node.state = NodeState.RUNNING
            self._due.extend(node.kept)
            node.kept.clear()
        for _ in range(_MAX_LAST_SECONDS):
            tasks = [task for node in (WORLD, *self._nodes) for task in node.tasks if not task.done()]
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            self.call_at(self.now_s + 1.0, self.stop)
            self.run_forever()
        self._due.clear()
        self._timers.clear()
        self._generators.clear()
        self._nodes.clear()
        WORLD.tasks.clear()
        self.close()

    def _push_timer(self, event: Event) -> None:
        self._num_timers += 1
        heapq.heappush(self._timers, (event.when_s, self._num_timers, event))

    def _run_ready(self) -> None:
        ready = self._due
        for _ in range(_MAX_CALLBACKS_AT_ONCE):
            if not ready or self._is_stopping:
                return
            event = ready.popleft()
            if event.is_cancelled:
                continue
            node = self.node = event.node
            if node.state is not NodeState.RUNNING:
                node.kept.append(event)
                continue
            try:
                event.context.run(event.run, *event.arguments)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                if not self._is_over:
                    self.failures.append(error)
        raise LivelockError(f"{_MAX_CALLBACKS_AT_ONCE} callbacks ran at {self.now_s:.3f} s; last: {event!r}")

    def _advance(self) -> None:
        """Let time pass until the next timer, and make ready what is due then."""
        timers = self._timers
        while timers and timers[0][2].is_cancelled:
            heapq.heappop(timers)
        if not timers:
            return
        self.now_s = max(self.now_s, timers[0][0])
        while timers and timers[0][0] <= self.now_s:
            self._due.append(heapq.heappop(timers)[2])


def keep_failure(task: asyncio.Task[Any]) -> None:
    """A task is over that nobody waits for: its loop keeps what it failed with."""
    loop = task.get_loop()
    assert isinstance(loop, SimulationLoop), "it runs nowhere else"
    if not task.cancelled() and (error := task.exception()) is not None:
        loop.failures.append(error)


def _ignore(_: object) -> None:
    """Do nothing."""

"""What goes wrong in a run, and how it is put right again. Knows hosts and the network; refuses to know what they say.

Each fault is a coroutine that draws whom it hits when it happens, lasts for a while, and leaves things as they should
be. `calm` puts right whatever is left.
"""

import asyncio
from collections.abc import Callable, Coroutine, Set
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from paceline.plan.values import RecordId
from paceline_scheduler.link.claim import Approach
from paceline_scheduler.link.executor_record import LOST_AFTER_S
from paceline_scheduler.link.plan_stream import MAX_SILENCE_S
from simulation.clients import ClientHost
from simulation.executors import ExecutorHost
from simulation.loop import Node, NodeState, SimulationLoop
from simulation.mangling import GrantChanger, LateRequest, Mangler, PastPlans, Replay
from simulation.network import Mangle, Network, Path, PathState
from simulation.rogue import Rogue
from simulation.scenario import FORGETS_NOTHING, Fault, FaultKind
from simulation.schedulers import SchedulerHost
from simulation.spoiling import PlanSpoiler

_CLOCK_JUMP_S = 10.0
_MAX_LAG_S = 5.0
_POLL_S = 0.05
_MAX_POLLS = 20
_MANY_TOKENS = 8
_AT_WHO_DRIVES = 0.75  # of the faults of paths so many hit a scheduler that serves, if there is one
_SLOW_ANSWER_S = (0.1, 0.2)


class Stage(Protocol):
    """Whom faults can hit."""

    loop: SimulationLoop
    network: Network
    executors: list[ExecutorHost]
    schedulers: list[SchedulerHost]
    clients: list[ClientHost]
    rogue: Rogue
    past_plans: PastPlans
    failing: set[RecordId]

    def start_executor(self, host: ExecutorHost) -> None:
        """Start an executor's next process."""
        ...

    def start_scheduler(self, host: SchedulerHost, approach: Approach) -> None:
        """Start a scheduler's next process."""
        ...

    def client_died(self) -> None:
        """A client will not come back."""
        ...

    def tell(self, what: str) -> None:
        """Tell the story."""
        ...


@dataclass(frozen=True, slots=True)
class _Hit:
    """A fault that happens."""

    lasts_s: float
    random: Random


class Faults:
    """Lets faults happen. Two of a kind may overlap."""

    def __init__(self, stage: Stage, kinds: Set[FaultKind]) -> None:
        self._may_forget = not kinds <= FORGETS_NOTHING
        self._stage = stage
        self._loop = stage.loop
        self._network = stage.network
        self._paths: dict[int, tuple[Path, str, str]] = {}  # that are not as they should be
        self._kinds: dict[FaultKind, Callable[[_Hit], Coroutine[Any, Any, None]]] = {
            FaultKind.KILL_SCHEDULER: self._kill_scheduler,
            FaultKind.FREEZE_SCHEDULER: self._freeze_scheduler,
            FaultKind.KILL_EXECUTOR: self._kill_executor,
            FaultKind.FREEZE_EXECUTOR: self._freeze_executor,
            FaultKind.STALL: self._stall,
            FaultKind.ZOMBIE: self._zombie,
            FaultKind.SLOW_PATH: self._slow_path,
            FaultKind.MANGLE: self._mangle,
            FaultKind.CHANGE_GRANT: self._change_grant,
            FaultKind.REPLAY: self._replay,
            FaultKind.LATE_REQUEST: self._late_request,
            FaultKind.SPOIL: self._spoil,
            FaultKind.HALF_OPEN: self._half_open,
            FaultKind.HOLD: self._hold,
            FaultKind.TAKE_OVER: self._take_over,
            FaultKind.FAIL_STEPS: self._fail_steps,
            FaultKind.JUMP_CLOCK: self._jump_clock,
            FaultKind.CRASH_LOOP: self._crash_loop,
            FaultKind.DRAIN_SCHEDULER: self._drain_scheduler,
            FaultKind.DRAIN_EXECUTOR: self._drain_executor,
            FaultKind.BREAK_PATH: self._break_path,
            FaultKind.KILL_CLIENT: self._kill_client,
            FaultKind.BAD_RESUME: self._bad_resume,
            FaultKind.RETURN: self._return,
        }

    async def happen(self, fault: Fault) -> None:
        """Wait for a fault's time and let it happen."""
        await asyncio.sleep(fault.at_s)
        random = Random(f"fault {fault.seed}")  # noqa: S311 - nothing secret
        await self._kinds[fault.kind](_Hit(fault.lasts_s, random))

    def calm(self) -> None:
        """Put right what is still wrong."""
        self._network.mangle = None
        for path, one, other in self._paths.values():
            self._mend(path, one, other)
        self._paths.clear()
        for executor in self._stage.executors:
            if executor.is_draining:
                self._kill(executor)
            if executor.node is not None and executor.node.is_dead:
                self._stage.start_executor(executor)
        for scheduler in self._stage.schedulers:
            if scheduler.is_draining:
                self._kill(scheduler)
            if scheduler.node is not None and scheduler.node.is_dead:
                self._stage.start_scheduler(scheduler, Approach.WAIT)
        for node in self._nodes():
            self._loop.thaw(node)
        self._stage.tell("from here on nothing goes wrong any more")

    # Processes

    async def _kill_scheduler(self, hit: _Hit) -> None:
        host = hit.random.choice(self._stage.schedulers)
        self._kill(host)
        await asyncio.sleep(hit.lasts_s)
        self._restart_scheduler(host, Approach.WAIT)

    async def _crash_loop(self, hit: _Hit) -> None:
        host = hit.random.choice(self._stage.schedulers)
        for _ in range(hit.random.randint(2, 4)):
            self._kill(host)
            await asyncio.sleep(hit.random.uniform(0.01, 0.4))
            self._restart_scheduler(host, Approach.WAIT)
            await asyncio.sleep(hit.random.choice((0.003, 0.05, 0.4, 1.0)) * hit.random.random() + 0.001)

    async def _drain_scheduler(self, hit: _Hit) -> None:
        host = hit.random.choice(self._stage.schedulers)
        if host.node is None or host.node.state is not NodeState.RUNNING or host.is_draining:
            return
        self._stage.tell(f"{host.name} drains")
        await self._loop.spawn(host.node, host.drain(hit.lasts_s))
        self._kill(host)
        self._restart_scheduler(host, Approach.WAIT)

    async def _drain_executor(self, hit: _Hit) -> None:
        host = hit.random.choice(self._stage.executors)
        node = host.node
        if node is None or node.state is not NodeState.RUNNING or host.is_draining:
            return
        self._stage.tell(f"{host.name} drains")
        host.drain()
        await asyncio.sleep(hit.lasts_s)
        if host.node is node:
            self._kill(host)
            self._stage.start_executor(host)

    async def _take_over(self, hit: _Hit) -> None:
        host = hit.random.choice(self._stage.schedulers)
        self._kill(host)
        self._restart_scheduler(host, Approach.TAKE_OVER)

    async def _kill_executor(self, hit: _Hit) -> None:
        host = hit.random.choice(self._stage.executors)
        self._kill(host)
        await asyncio.sleep(hit.lasts_s)
        if host.node is not None and host.node.is_dead:
            self._stage.start_executor(host)

    async def _freeze_scheduler(self, hit: _Hit) -> None:
        await self._freeze(hit.random.choice(self._stage.schedulers).node, hit.lasts_s)

    async def _freeze_executor(self, hit: _Hit) -> None:
        await self._freeze(hit.random.choice(self._stage.executors).node, hit.lasts_s)

    async def _freeze(self, node: Node | None, seconds: float) -> None:
        if node is None or node.state is not NodeState.RUNNING:
            return
        self._stage.tell(f"{node.name} is frozen")
        self._loop.freeze(node)
        await asyncio.sleep(seconds)
        self._stage.tell(f"{node.name} thaws")
        self._loop.thaw(node)

    async def _stall(self, hit: _Hit) -> None:
        host = hit.random.choice(self._stage.executors)
        self._stage.tell(f"the next step of {host.name} takes {hit.lasts_s:.1f} s longer")
        host.stall(hit.lasts_s)

    async def _fail_steps(self, hit: _Hit) -> None:
        """Let every step with some requests fail, wherever they run from now on: nothing puts that right."""
        beside: tuple[RecordId, ...] = ()  # others they are harder to find
        for _ in range(_MAX_POLLS):
            beside = max((host.running_keys() for host in self._stage.executors), key=len)
            if beside:
                break
            await asyncio.sleep(_POLL_S)
        for key in hit.random.sample(beside, min(len(beside), hit.random.choice((1, 1, 2, 4)))):
            self._stage.tell(f"steps with {key.request_id}.{key.index} of {key.tenant} fail")
            self._stage.failing.add(key)

    async def _jump_clock(self, hit: _Hit) -> None:
        node = hit.random.choice(self._nodes())
        self._stage.tell(f"the clock of {node.name} jumps {_CLOCK_JUMP_S} s ahead")
        self._loop.set_clock(node, _CLOCK_JUMP_S)

    async def _kill_client(self, hit: _Hit) -> None:
        host = hit.random.choice(self._stage.clients)
        self._stage.tell(f"{host.name} dies")
        host.kill()
        self._stage.client_died()

    def _nodes(self) -> list[Node]:
        executors = [host.node for host in self._stage.executors]
        schedulers = [host.node for host in self._stage.schedulers]
        return [node for node in (*executors, *schedulers) if node is not None]

    def _kill(self, host: ExecutorHost | SchedulerHost) -> None:
        if host.node is not None and not host.node.is_dead:
            self._stage.tell(f"{host.name} is killed")
            host.kill()

    def _restart_scheduler(self, host: SchedulerHost, approach: Approach) -> None:
        if host.node is not None and host.node.is_dead:
            self._stage.start_scheduler(host, approach)

    # Paths

    async def _slow_path(self, hit: _Hit) -> None:
        path, one, other = self._some_path(hit.random)
        slowest_s = hit.random.choice((0.05, 0.5, _MAX_LAG_S))
        self._stage.tell(f"{one} and {other} are up to {slowest_s} s apart")
        path.lag_s = (0.0, slowest_s)
        await asyncio.sleep(hit.lasts_s)
        if hit.random.random() < 0.5:
            self._reset(one, other)
        path.lag_s = (0.0, 0.0)

    async def _hold(self, hit: _Hit) -> None:
        path, one, other = self._some_path(hit.random)
        if path.state is not PathState.OPEN:
            return
        self._stage.tell(f"nothing gets through between {one} and {other}")
        path.state = PathState.HELD
        await asyncio.sleep(hit.lasts_s)
        self._mend(path, one, other)

    async def _half_open(self, hit: _Hit) -> None:
        path, one, other = self._some_path(hit.random)
        if path.state is not PathState.OPEN:
            return
        self._stage.tell(f"what {one} and {other} send each other is lost")
        path.state = PathState.SWALLOWING
        path.is_reset_after = hit.random.random() < 0.5
        await asyncio.sleep(hit.lasts_s)
        self._mend(path, one, other)

    async def _zombie(self, hit: _Hit) -> None:
        """Cut off an executor that runs something until it counts as lost, and a little longer."""
        for _ in range(_MAX_POLLS):
            busy = [host for host in self._stage.executors if host.num_tokens_ahead >= _MANY_TOKENS]
            if busy:
                break
            await asyncio.sleep(_POLL_S)
        cut_off = hit.random.choice(busy or self._stage.executors).name
        names = [host.name for host in self._stage.schedulers]
        paths = [(self._network.path(name, cut_off), name, cut_off) for name in names]
        self._stage.tell(f"{cut_off} is cut off")
        for found in paths:
            if found[0].state is PathState.OPEN:
                found[0].state = PathState.HELD
                self._paths[id(found[0])] = found
        await asyncio.sleep(LOST_AFTER_S + MAX_SILENCE_S + hit.random.uniform(0.1, 0.5))
        for path, name, _ in paths:
            if path.state is PathState.HELD:
                self._mend(path, name, cut_off)

    async def _break_path(self, hit: _Hit) -> None:
        _, one, other = self._some_path(hit.random)
        for _ in range(hit.random.randint(1, 3)):
            self._reset(one, other)
            await asyncio.sleep(hit.random.uniform(0.05, 0.5))

    def _some_path(self, random: Random) -> tuple[Path, str, str]:
        stage = self._stage
        drivers = [host for host in stage.schedulers if host.drives]
        scheduler = random.choice(drivers if drivers and random.random() < _AT_WHO_DRIVES else stage.schedulers).name
        others = stage.executors if random.random() < 0.6 else stage.clients
        other = random.choice([host.name for host in others])
        found = self._network.path(scheduler, other), scheduler, other
        self._paths[id(found[0])] = found
        return found

    def _mend(self, path: Path, one: str, other: str) -> None:
        is_reset = path.state is PathState.SWALLOWING and path.is_reset_after
        self._stage.tell(f"{one} and {other} reach each other again")
        self._network.open_path(path)
        if is_reset:  # else the connections that miss bytes stay as dead as they are
            self._reset(one, other)

    def _reset(self, one: str, other: str) -> None:
        num_calls = self._network.break_path(one, other)
        self._stage.tell(f"{num_calls} calls between {one} and {other} are reset")

    # Clients without the library

    async def _bad_resume(self, _: _Hit) -> None:
        await self._stage.rogue.lie()

    async def _return(self, hit: _Hit) -> None:
        """Kill who drives; the executor that knows the request answers the successor last."""
        request, received = await self._stage.rogue.begin()
        knowing = [host for host in self._stage.executors if host.runs(request.request_id)]
        slow = hit.random.choice(knowing or self._stage.executors).name
        for host in self._stage.schedulers:
            path = self._network.path(host.name, slow)
            self._paths[id(path)] = (path, host.name, slow)
            path.lag_s = _SLOW_ANSWER_S
            if host.drives:
                self._kill(host)
        await asyncio.sleep(0.2 * hit.random.random())
        for host in self._stage.schedulers:
            self._restart_scheduler(host, Approach.WAIT)
        if received and not self._may_forget:
            await self._stage.rogue.come_back(request, received)

    # Messages

    async def _mangle(self, hit: _Hit) -> None:
        await self._with(Mangler(hit.random, self._stage.tell), hit.lasts_s)

    async def _change_grant(self, hit: _Hit) -> None:
        await self._with(GrantChanger(hit.random, self._stage.tell), hit.lasts_s)

    async def _spoil(self, hit: _Hit) -> None:
        await self._with(PlanSpoiler(hit.random, self._stage.tell), hit.lasts_s)

    async def _replay(self, hit: _Hit) -> None:
        for scheduler in self._stage.schedulers:
            self._reset(scheduler.name, hit.random.choice(self._stage.executors).name)
        await self._with(Replay(self._stage.past_plans, self._stage.tell), hit.lasts_s)

    async def _late_request(self, hit: _Hit) -> None:
        await self._with(LateRequest(hit.random, self._network, self._stage.tell), hit.lasts_s)

    async def _with(self, mangle: Mangle, seconds: float) -> None:
        self._network.mangle = mangle
        await asyncio.sleep(seconds)
        if self._network.mangle is mangle:
            self._network.mangle = None

"""What goes wrong in a run, and how it is put right again. Knows hosts and the network; refuses to know what they say.

Each fault is a coroutine that draws whom it hits when it happens, lasts for a while, and leaves things as they should
be. `calm` puts right whatever is left.
"""

import asyncio
from collections.abc import Callable, Coroutine, Set
from random import Random
from typing import Any

from paceline.plan.values import Approach, RecordId
from simulation.executors import ExecutorHost
from simulation.loop import Node, NodeState
from simulation.path_faults import PathFaults
from simulation.scenario import FORGETS_NOTHING, Fault, FaultKind
from simulation.schedulers import SchedulerHost
from simulation.stage import Hit, Stage

_CLOCK_JUMP_S = 10.0
_POLL_S = 0.05
_MAX_POLLS = 20
_SLOW_ANSWER_S = (0.1, 0.2)
_LEASE_RUNS_OUT_S = (1.0, 1.2)  # FenceTimes.lease_ns, the plan stream's MAX_SILENCE_S


class Faults:
    """Lets faults happen. Two of a kind may overlap."""

    def __init__(self, stage: Stage, kinds: Set[FaultKind]) -> None:
        self._may_forget = not kinds <= FORGETS_NOTHING
        self._stage = stage
        self._loop = stage.loop
        self._paths = PathFaults(stage)
        self._kinds: dict[FaultKind, Callable[[Hit], Coroutine[Any, Any, None]]] = {
            FaultKind.KILL_SCHEDULER: self._kill_scheduler,
            FaultKind.FREEZE_SCHEDULER: self._freeze_scheduler,
            FaultKind.KILL_EXECUTOR: self._kill_executor,
            FaultKind.FREEZE_EXECUTOR: self._freeze_executor,
            FaultKind.STALL: self._stall,
            FaultKind.SPOIL: self._paths.spoil,
            FaultKind.ZOMBIE: self._paths.cut_off,
            FaultKind.SLOW_PATH: self._paths.slow,
            FaultKind.MANGLE: self._paths.mangle,
            FaultKind.CHANGE_GRANT: self._paths.change_grant,
            FaultKind.REPLAY: self._paths.replay,
            FaultKind.LATE_REQUEST: self._paths.late_request,
            FaultKind.HALF_OPEN: self._paths.half_open,
            FaultKind.HOLD: self._paths.hold,
            FaultKind.TAKE_OVER: self._take_over,
            FaultKind.FAIL_STEPS: self._fail_steps,
            FaultKind.JUMP_CLOCK: self._jump_clock,
            FaultKind.CRASH_LOOP: self._crash_loop,
            FaultKind.DRAIN_SCHEDULER: self._drain_scheduler,
            FaultKind.DRAIN_EXECUTOR: self._drain_executor,
            FaultKind.BREAK_PATH: self._paths.break_path,
            FaultKind.KILL_CLIENT: self._kill_client,
            FaultKind.BAD_RESUME: self._bad_resume,
            FaultKind.RETURN: self._return,
        }

    async def happen(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        random = Random(f"fault {fault.seed}")  # noqa: S311 - nothing secret
        await self._kinds[fault.kind](Hit(fault.lasts_s, random))

    def calm(self) -> None:
        self._paths.calm()
        for executor in self._stage.executors:
            if executor.is_draining:
                self._kill(executor)
            if executor.node.is_dead:
                self._stage.start_executor(executor)
        for scheduler in self._stage.schedulers:
            if scheduler.is_draining:
                self._kill(scheduler)
            if scheduler.node.is_dead:
                self._stage.start_scheduler(scheduler, Approach.WAIT)
        for node in self._nodes():
            self._loop.thaw(node)
        self._stage.tell("from here on nothing goes wrong any more")

    # Processes

    async def _kill_scheduler(self, hit: Hit) -> None:
        host = hit.random.choice(self._stage.schedulers)
        self._kill(host)
        await asyncio.sleep(hit.lasts_s)
        self._restart_scheduler(host, Approach.WAIT)

    async def _crash_loop(self, hit: Hit) -> None:
        host = hit.random.choice(self._stage.schedulers)
        for _ in range(hit.random.randint(2, 4)):
            self._kill(host)
            await asyncio.sleep(hit.random.uniform(0.01, 0.4))
            self._restart_scheduler(host, Approach.WAIT)
            await asyncio.sleep(hit.random.choice((0.003, 0.05, 0.4, 1.0)) * hit.random.random() + 0.001)

    async def _drain_scheduler(self, hit: Hit) -> None:
        host = hit.random.choice(self._stage.schedulers)
        if host.node.state is not NodeState.RUNNING or host.is_draining:
            return
        self._stage.tell(f"{host.name} drains")
        await self._loop.spawn(host.node, host.drain(hit.lasts_s))
        self._kill(host)
        self._restart_scheduler(host, Approach.WAIT)

    async def _drain_executor(self, hit: Hit) -> None:
        host = hit.random.choice(self._stage.executors)
        node = host.node
        if node.state is not NodeState.RUNNING or host.is_draining:
            return
        self._stage.tell(f"{host.name} drains")
        host.drain()
        await asyncio.sleep(hit.lasts_s)
        if host.node is node:
            self._kill(host)
            self._stage.start_executor(host)

    async def _take_over(self, hit: Hit) -> None:
        host = hit.random.choice(self._stage.schedulers)
        self._kill(host)
        self._restart_scheduler(host, Approach.TAKE_OVER)

    async def _kill_executor(self, hit: Hit) -> None:
        host = hit.random.choice(self._stage.executors)
        self._kill(host)
        await asyncio.sleep(hit.lasts_s)
        if host.node.is_dead:
            self._stage.start_executor(host)

    async def _freeze_scheduler(self, hit: Hit) -> None:
        await self._freeze(hit.random.choice(self._stage.schedulers).node, hit.lasts_s)

    async def _freeze_executor(self, hit: Hit) -> None:
        """Often just so long that it wakes when a lease has run out and its scheduler has not given it up yet."""
        node = hit.random.choice(self._stage.executors).node
        await self._freeze(node, hit.random.choice((hit.lasts_s, hit.random.uniform(*_LEASE_RUNS_OUT_S))))

    async def _freeze(self, node: Node, seconds: float) -> None:
        if node.state is not NodeState.RUNNING:
            return
        self._stage.tell(f"{node.name} is frozen")
        self._loop.freeze(node)
        await asyncio.sleep(seconds)
        self._stage.tell(f"{node.name} thaws")
        self._loop.thaw(node)

    async def _stall(self, hit: Hit) -> None:
        host = hit.random.choice(self._stage.executors)
        self._stage.tell(f"the next step of {host.name} takes {hit.lasts_s:.1f} s longer")
        host.stall(hit.lasts_s)

    async def _fail_steps(self, hit: Hit) -> None:
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

    async def _jump_clock(self, hit: Hit) -> None:
        node = hit.random.choice(self._nodes())
        self._stage.tell(f"the clock of {node.name} jumps {_CLOCK_JUMP_S} s ahead")
        self._loop.set_clock(node, _CLOCK_JUMP_S)

    async def _kill_client(self, hit: Hit) -> None:
        host = hit.random.choice(self._stage.clients)
        self._stage.tell(f"{host.name} dies")
        host.kill()
        self._stage.client_died()

    def _nodes(self) -> list[Node]:
        return [host.node for host in (*self._stage.executors, *self._stage.schedulers)]

    def _kill(self, host: ExecutorHost | SchedulerHost) -> None:
        if not host.node.is_dead:
            self._stage.tell(f"{host.name} is killed")
            host.kill()

    def _restart_scheduler(self, host: SchedulerHost, approach: Approach) -> None:
        if host.node.is_dead:
            self._stage.start_scheduler(host, approach)

    # Clients without the library

    async def _bad_resume(self, _: Hit) -> None:
        rogue = self._stage.rogue
        await rogue.do(rogue.lie())
        await rogue.do(rogue.knock([host.name for host in self._stage.executors]))

    async def _return(self, hit: Hit) -> None:
        """Kill who drives; the executor that knows the request answers the successor last."""
        rogue = self._stage.rogue
        request, received = await rogue.do(rogue.begin())
        knowing = [host for host in self._stage.executors if host.runs(request.request_id)]
        slow = hit.random.choice(knowing or self._stage.executors).name
        for host in self._stage.schedulers:
            self._paths.delay(host.name, slow, _SLOW_ANSWER_S)
            if host.drives:
                self._kill(host)
        await asyncio.sleep(0.2 * hit.random.random())
        for host in self._stage.schedulers:
            self._restart_scheduler(host, Approach.WAIT)
        if received and not self._may_forget:
            await rogue.do(rogue.come_back(request, received))

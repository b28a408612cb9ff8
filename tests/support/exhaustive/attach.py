"""What goes wrong in the attach world, and a run of it."""

from functools import partial

from exhaustive.attach_world import SILENCE_S, AttachWorld, Executor, Scheduler, Stream
from exhaustive.clockwork import LATE, Budget, Fault
from exhaustive.gen import Gen
from paceline.plan.values import Approach
from paceline_scheduler.errors import StreamEndedError

CRASH, CUT, TAKEOVER = "crash", "cut", "takeover"
DOWN_S = (0.0, 2.0)
_WINDOW_S = 3.0


class Faults:
    """What may go wrong."""

    def __init__(self, world: AttachWorld) -> None:
        self._world = world

    def possible(self) -> list[Fault]:
        found: list[Fault] = []
        for executor in self._world.executors:
            if self._world.left[CRASH] and executor.is_up:
                for down_s in DOWN_S:
                    name = f"{executor.address} dies, and is back after {down_s:g} s"
                    found.append((CRASH, name, partial(self._kill_executor, executor, down_s)))
        for scheduler in self._world.schedulers:
            if scheduler.leadership is None:
                continue
            for down_s in DOWN_S if self._world.left[CRASH] else ():
                name = f"{scheduler.name} dies, and is back after {down_s:g} s"
                found.append((CRASH, name, partial(self._kill_scheduler, scheduler, down_s, Approach.WAIT)))
            if self._world.left[TAKEOVER]:
                name = f"{scheduler.name} is started anew, to take over"
                found.append((TAKEOVER, name, partial(self._kill_scheduler, scheduler, 0.0, Approach.TAKE_OVER)))
            for stream in scheduler.streams.values() if self._world.left[CUT] else ():
                found.append((CUT, f"{stream} breaks", partial(self._break, stream)))
                found.append((CUT, f"{stream} falls silent", partial(self._silence, stream)))
        return found

    def _kill_executor(self, executor: Executor, down_s: float) -> None:
        executor.is_up, executor.is_hit = False, True
        executor.streams.clear()
        for stream in [each for scheduler in self._world.schedulers for each in scheduler.streams.values()]:
            if stream.executor is executor:
                self._world.to_scheduler(
                    stream, partial(self._world.scheduling.close, stream, StreamEndedError("reset"))
                )
        self._world.later(down_s, executor.begin)

    def _kill_scheduler(self, scheduler: Scheduler, down_s: float, approach: Approach) -> None:
        scheduler.leadership, scheduler.is_hit = None, True
        for each in self._world.schedulers if approach is Approach.TAKE_OVER else ():
            each.is_hit = True
        for stream in list(scheduler.streams.values()):
            stream.is_open = False
            self._world.to_executor(stream, partial(self._world.executing.leave, stream))
        scheduler.streams.clear()
        self._world.later(down_s, lambda: self._world.scheduling.begin(scheduler, approach))

    def _break(self, stream: Stream) -> None:
        stream.scheduler.is_hit = True
        self._world.scheduling.close(stream, StreamEndedError("cut"))

    def _silence(self, stream: Stream) -> None:
        """Neither side sees an end. The scheduler notices, the executor only when somebody else wants to drive."""
        stream.is_silent = stream.scheduler.is_hit = True
        self._world.notice(stream, SILENCE_S)


def attach_run(gen: Gen, budget: Budget, *, is_settled: bool) -> None:
    """Run once: from the boot of all or from a settled system, what may go wrong, and what becomes of it."""
    world = AttachWorld(gen, budget)
    if is_settled:
        world.settle()
    drivers, before = world.driven_by(), world.epochs()
    world.run(_WINDOW_S, Faults(world).possible)
    world.settle()
    if is_settled and world.left[LATE] == budget.get(LATE, 0):
        (driver,) = (each for each, num in zip(world.schedulers, drivers, strict=True) if num)
        for executor, then, now in zip(world.executors, before, world.epochs(), strict=True):
            is_left_alone = then == now or executor.is_hit or driver.is_hit
            world.require(is_left_alone, "who is not hit goes on as before")

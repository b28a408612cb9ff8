"""What goes wrong in the resume world, and a run of it."""

from functools import partial

from exhaustive.clockwork import Budget, Fault
from exhaustive.gen import Gen
from exhaustive.resume_parts import Host, Link, Scheduler, World
from exhaustive.resume_world import ADDRESSES, AGAIN_S, BACK_S, ResumeWorld
from paceline_scheduler.core.events import BeginAnew, DrainExecutor, ExecutorLost, ExpectExecutors, UndrainExecutor

CRASH, CUT, PLAN_CUT, LOSS, MOVE, CANCEL, DISPLACE = "crash", "cut", "plan_cut", "loss", "move", "cancel", "displace"


class Faults:
    """What may go wrong."""

    def __init__(self, world: ResumeWorld) -> None:
        self._world = world

    def possible(self) -> list[Fault]:
        found: list[Fault] = []
        call = self._world.client.call
        if call is not None:
            found.append((CUT, "the client's stream breaks", partial(self._world.caller.cut, call)))
        if self._world.client.attachment and self._world.client.end is None:
            found.append((CANCEL, "the client cancels", self._world.caller.cancel))
        found += [
            (CRASH, f"{host.address} dies and comes back", partial(self._kill, host))
            for host in self._world.hosts.values()
        ]
        for scheduler in self._world.schedulers:
            if scheduler.is_standby:
                for address in ADDRESSES if self._world.left[DISPLACE] else ():
                    found.append(
                        (
                            DISPLACE,
                            f"{scheduler.name} takes {address} over",
                            partial(self._displace, scheduler, address),
                        )
                    )
                continue
            for address in ADDRESSES:
                name = f"{scheduler.name} dies and comes back, and {address} answers later"
                found.append((CRASH, name, partial(self._kill_scheduler, scheduler, address)))
                for back_s in BACK_S:
                    name = f"{scheduler.name} takes {address} for lost for {back_s:g} s"
                    found.append((LOSS, name, partial(self._lose, scheduler, address, back_s)))
            for address, link in scheduler.links.items():
                if not link.is_open:
                    continue
                found.append((PLAN_CUT, f"the plan stream to {address} breaks", partial(self._world.driving.cut, link)))
                found.append((MOVE, f"what {address} runs is moved", partial(self._move, link)))
        return found

    def _kill(self, host: Host) -> None:
        """What was on its way from it may still arrive."""
        self._world.is_excused = True
        link = host.link
        self._world.executing.restart(host)
        if link is not None and link.is_open:
            self._world.driving.cut(link)

    def _lose(self, scheduler: Scheduler, address: str, back_s: float) -> None:
        self._world.is_excused = True
        link = scheduler.links.get(address)
        if link is not None and link.is_open:
            self._world.driving.shut(link)
        self._world.driving.feed(scheduler, ExecutorLost(address))
        self._world.driving.seek(scheduler, address, back_s)

    def _move(self, link: Link) -> None:
        scheduler, process = link.scheduler, link.process
        self._world.driving.feed(scheduler, DrainExecutor(link.address))
        self._world.driving.plan(scheduler, link.address)

        def undo() -> None:
            if scheduler.process == process and link.address in scheduler.links:
                self._world.driving.feed(scheduler, UndrainExecutor(link.address))
                self._world.driving.plan(scheduler, link.address)

        self._world.later(0.02, undo)

    def _kill_scheduler(self, scheduler: Scheduler, late: str) -> None:
        """What was told to clients may still arrive."""
        for call in [call for call in scheduler.opened if call.is_served]:
            self._world.answering.close(call, None)
        for link in scheduler.links.values():
            self._world.driving.shut(link)
        scheduler.begin()
        self._world.driving.boot(scheduler, late)

    def _displace(self, scheduler: Scheduler, address: str) -> None:
        """It takes one executor over; the other scheduler then gives up all, and it gets the rest."""
        other = next(each for each in self._world.schedulers if each is not scheduler)
        process = other.process
        scheduler.begin()
        self._world.driving.feed(scheduler, ExpectExecutors(ADDRESSES))
        self._world.driving.attach_anyway(scheduler, address)
        for each in ADDRESSES:
            self._world.driving.seek(scheduler, each, AGAIN_S)
        self._world.send(f"what {other.name} learns", lambda: self._yield(other) if other.process == process else None)

    def _yield(self, scheduler: Scheduler) -> None:
        self._world.tell(f"{scheduler.name} gives up all")
        for link in scheduler.links.values():
            self._world.driving.shut(link)
        self._world.driving.feed(scheduler, BeginAnew("another scheduler took over", None, ADDRESSES))
        scheduler.links.clear()
        for call in [call for call in scheduler.opened if call.is_served]:
            self._world.answering.close(call, None)
        scheduler.process += 1
        scheduler.is_standby = True

    def prepare_aftermath(self) -> None:
        """Take executor 1 for lost before its first result comes, and die when the first of executor 2 has come."""
        self._world.run(0.024)
        (scheduler,) = self._world.schedulers
        self._lose(scheduler, ADDRESSES[0], 60.0)
        self._world.run(0.0205)
        if self._world.gen.int_inclusive(1) and self._world.client.call is not None:
            self._world.tell("what was told gets lost")
            self._world.caller.cut(self._world.client.call)
        self._kill_scheduler(scheduler, ADDRESSES[self._world.gen.int_inclusive(1)])


def resume_run(gen: Gen, budget: Budget, world: World, window_s: float = 0.5) -> None:
    """Run once: what may go wrong in the first half second, or less, and what becomes of it."""
    run = ResumeWorld(gen, budget, world)
    faults = Faults(run)
    if world.is_aftermath:
        faults.prepare_aftermath()
    run.run(window_s, faults.possible)
    run.settle()

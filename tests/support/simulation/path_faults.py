"""What goes wrong between hosts: paths that are slow, held, cut or reset, and messages that are not what was sent."""

import asyncio
from random import Random

from paceline_scheduler.link.executor_record import LOST_AFTER_S
from paceline_scheduler.link.plan_stream import MAX_SILENCE_S
from simulation.mangling import GrantChanger, LateRequest, Mangler, Replay
from simulation.network import Mangle, Path, PathState
from simulation.spoiling import PlanSpoiler
from simulation.stage import Hit, Stage

_MAX_LAG_S = 5.0
_POLL_S = 0.05
_MAX_POLLS = 20
_MANY_TOKENS = 8
_AT_WHO_DRIVES = 0.75  # of the faults of paths so many hit a scheduler that serves, if there is one


class PathFaults:
    """Lets faults happen to paths and to what is sent on them; knows the paths that are not as they should be."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._network = stage.network
        self._paths: dict[int, tuple[Path, str, str]] = {}

    def calm(self) -> None:
        self._network.mangle = None
        for path, one, other in self._paths.values():
            self._mend(path, one, other)
        self._paths.clear()

    def delay(self, one: str, other: str, lag_s: tuple[float, float]) -> None:
        """What these two send each other takes so long, until `calm`."""
        path = self._network.path(one, other)
        self._paths[id(path)] = (path, one, other)
        path.lag_s = lag_s

    # Paths

    async def slow(self, hit: Hit) -> None:
        """Messages take longer, and some connections do not survive it."""
        path, one, other = self._some_path(hit.random)
        slowest_s = hit.random.choice((0.05, 0.5, _MAX_LAG_S))
        self._stage.tell(f"{one} and {other} are up to {slowest_s} s apart")
        path.lag_s = (0.0, slowest_s)
        await asyncio.sleep(hit.lasts_s)
        if hit.random.random() < 0.5:
            self._reset(one, other)
        path.lag_s = (0.0, 0.0)

    async def hold(self, hit: Hit) -> None:
        """Nothing gets through for a while; it arrives when that is over."""
        await self._shut(hit, PathState.HELD, "nothing gets through between {} and {}")

    async def half_open(self, hit: Hit) -> None:
        """What is sent is lost, and neither side is told."""
        await self._shut(hit, PathState.SWALLOWING, "what {} and {} send each other is lost")

    async def _shut(self, hit: Hit, state: PathState, story: str) -> None:
        path, one, other = self._some_path(hit.random)
        if path.state is PathState.OPEN:
            self._stage.tell(story.format(one, other))
            path.state = state
            path.is_reset_after = state is PathState.SWALLOWING and hit.random.random() < 0.5
            await asyncio.sleep(hit.lasts_s)
            self._mend(path, one, other)

    async def cut_off(self, hit: Hit) -> None:
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

    async def break_path(self, hit: Hit) -> None:
        _, one, other = self._some_path(hit.random)
        for _ in range(hit.random.randint(1, 3)):
            self._reset(one, other)
            await asyncio.sleep(hit.random.uniform(0.05, 0.5))

    # Messages

    async def mangle(self, hit: Hit) -> None:
        """Messages are lost, doubled, delayed, or come from earlier streams."""
        await self._with(Mangler(hit.random, self._stage.tell), hit.lasts_s)

    async def spoil(self, hit: Hit) -> None:
        """Let plans arrive that no scheduler would send."""
        await self._with(PlanSpoiler(hit.random, self._stage.tell), hit.lasts_s)

    async def change_grant(self, hit: Hit) -> None:
        await self._with(GrantChanger(hit.random, self._stage.tell), hit.lasts_s)

    async def replay(self, hit: Hit) -> None:
        """A plan of an earlier stream comes in place of the next."""
        for scheduler in self._stage.schedulers:
            self._reset(scheduler.name, hit.random.choice(self._stage.executors).name)
        await self._with(Replay(self._stage.past_plans, self._stage.tell), hit.lasts_s)

    async def late_request(self, hit: Hit) -> None:
        """A request arrives after its client has come back."""
        await self._with(LateRequest(hit.random, self._network, self._stage.tell), hit.lasts_s)

    # Inside

    async def _with(self, mangle: Mangle, seconds: float) -> None:
        self._network.mangle = mangle
        await asyncio.sleep(seconds)
        if self._network.mangle is mangle:
            self._network.mangle = None

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

"""Leadership and fence, the objects of both sides themselves: two of each, and everything that goes wrong.

No network but a list of what is on its way; no clock but a number. Schedulers and executors die and come back, streams
break, messages take their time; operators order takeovers.
"""

import heapq
import itertools
from dataclasses import dataclass, field
from random import Random

import pytest

from both_sides.audited import make_executor
from paceline.plan.values import Approach, Claim, ExecutorInfo
from paceline_executor.errors import TermSupersededError as RefusedByFence
from paceline_executor.link import fence as executor_side
from paceline_scheduler.errors import LinkError, StreamEndedError, TermSupersededError, UnreachableError
from paceline_scheduler.link.claim import OwnClaim
from paceline_scheduler.link.executor_record import Phase
from paceline_scheduler.link.leadership import EndStream, Leadership, ServingStatus

ADDRESSES = ("executor:1", "executor:2")
FAULTS_S, QUIET_S = 12.0, 25.0
BEAT_S, TICK_S = 0.2, 0.025


def nanoseconds(seconds):
    """As executors count time."""
    return round(seconds * 1e9)


@dataclass
class Stream:
    """One Attach call."""

    scheduler: "Scheduler"
    executor: "Executor"
    hello: object
    stream_id: int
    is_open: bool = True  # at the scheduler's end


@dataclass
class Executor:
    """A process with a fence, or none while it is down."""

    address: str
    incarnation: int = 0
    fence: executor_side.Fence | None = None
    streams: dict = field(default_factory=dict)


def info_of(executor):
    """Who the process says it is."""
    holder = executor.fence.holder
    return ExecutorInfo(executor.incarnation, executor.fence.highest_term, holder.scheduler_id if holder else "")


@dataclass
class Scheduler:
    """A process with its leadership, or none while it is down."""

    name: str
    leadership: Leadership | None = None
    streams: dict = field(default_factory=dict)


class World:
    """Two schedulers, two executors, and what is on its way between them."""

    def __init__(self, seed) -> None:
        self.random = Random(seed)  # noqa: S311 - events, no secrets
        self.now_s = 0.0
        self.on_its_way = []
        self.numbers = itertools.count(1)
        self.executors = {address: Executor(address) for address in ADDRESSES}
        self.schedulers = [Scheduler("a"), Scheduler("b")]
        for executor in self.executors.values():
            self.start_executor(executor)
        for scheduler in self.schedulers:
            self.start_scheduler(scheduler)

    def later(self, seconds, what, *details):
        """Let something happen."""
        heapq.heappush(self.on_its_way, (self.now_s + seconds, next(self.numbers), what, details))

    def delay_s(self):
        """How long a message takes."""
        return self.random.choice((0.001, 0.002, 0.005, 0.02))

    def run(self, until_s):
        """Let time pass."""
        while self.now_s < until_s:
            self.now_s = round(self.now_s + TICK_S, 6)
            while self.on_its_way and self.on_its_way[0][0] <= self.now_s:
                _, _, what, details = heapq.heappop(self.on_its_way)
                what(*details)
            for executor in self.executors.values():
                self.obey(executor, lambda fence: fence.advance(nanoseconds(self.now_s)))
            for scheduler in self.schedulers:
                if scheduler.leadership is not None:
                    self.carry_out(scheduler, scheduler.leadership.advance(self.now_s))

    # Processes

    def start_executor(self, executor):
        """Another process, which knows nothing."""
        executor.incarnation = next(self.numbers)
        executor.fence = executor_side.Fence(executor_side.FenceTimes())

    def stop_executor(self, executor):
        """All its streams break."""
        executor.fence = None
        for stream in list(executor.streams.values()):
            self.break_stream(stream)
        executor.streams.clear()

    def start_scheduler(self, scheduler):
        """Another process: it asks for terms, then dials."""
        approach = self.random.choices(list(Approach), (4, 1))[0]
        self._begin(scheduler, Leadership(OwnClaim(f"{self.random.randrange(1000):03}{scheduler.name}", approach)))

    def _begin(self, scheduler, leadership):
        scheduler.leadership = leadership
        told = {each.address: info_of(each) for each in self.executors.values() if each.fence is not None}
        leadership.look(ADDRESSES, told, self.now_s)
        for address in ADDRESSES:
            leadership.expect(address, self.now_s)
            self.later(self.delay_s(), self.dial, scheduler, leadership, address)

    def stop_scheduler(self, scheduler):
        """Its streams end for the executors."""
        scheduler.leadership = None
        for stream in scheduler.streams.values():
            stream.is_open = False
            self.later(self.delay_s(), self.leave, stream)
        scheduler.streams.clear()

    # Streams

    def dial(self, scheduler, leadership, address):
        """Ask an executor who it is, and open a stream."""
        executor = self.executors[address]
        if scheduler.leadership is not leadership:
            return
        if executor.fence is None:
            self.ended(scheduler, address, UnreachableError("refused"))
            return
        try:
            greeting = leadership.found(address, info_of(executor), self.now_s, self.random.random())
        except LinkError as error:
            self.ended(scheduler, address, error)
            return
        if greeting is None:
            self.dial_when_due(scheduler, address)
            return
        stream = Stream(scheduler, executor, greeting.hello, next(self.numbers))
        scheduler.streams[address] = stream
        self.later(self.delay_s(), self.arrive, stream, executor.incarnation)
        self.carry_out(scheduler, greeting.verdicts)

    def dial_when_due(self, scheduler, address):
        """Dial again when leadership says so."""
        leadership = scheduler.leadership
        wait_s = max(0.0, leadership[address].redial.at_s - self.now_s)
        self.later(wait_s, self.dial, scheduler, leadership, address)

    def arrive(self, stream, incarnation):
        """A hello arrives, if it is for this process."""
        executor, hello = stream.executor, stream.hello
        if executor.fence is None or executor.incarnation != incarnation:
            self.break_stream(stream)
            return
        executor.streams[stream.stream_id] = stream
        claim = hello.claim
        how = Approach.TAKE_OVER if hello.takeover else Approach.WAIT
        self.obey(executor, lambda fence: fence.arrive(stream.stream_id, claim, how, nanoseconds(self.now_s)))
        self.later(BEAT_S, self.beat, stream)
        if not stream.is_open:
            self.leave(stream)

    def beat(self, stream):
        """A heartbeat of the scheduler."""
        executor = stream.executor
        if stream.is_open and stream.stream_id in executor.streams:
            self.obey(executor, lambda fence: fence.note_message(stream.stream_id, nanoseconds(self.now_s)))
            self.later(BEAT_S, self.beat, stream)

    def leave(self, stream):
        """The scheduler's end is closed."""
        if stream.executor.streams.pop(stream.stream_id, None) is not None:
            now_ns = nanoseconds(self.now_s)
            self.obey(stream.executor, lambda fence: fence.leave(stream.stream_id, now_ns))

    def break_stream(self, stream, error=None):
        """Both ends see it, each in its time."""
        self.later(self.delay_s(), self.leave, stream)
        self.later(self.delay_s(), self.see_end, stream, error or StreamEndedError("cut"))

    def see_end(self, stream, error):
        """The scheduler sees its stream end."""
        address = stream.executor.address
        if stream.is_open:
            stream.is_open = False
            del stream.scheduler.streams[address]
            self.ended(stream.scheduler, address, error)

    def ended(self, scheduler, address, error):
        """Tell leadership, and dial when that says so."""
        self.carry_out(scheduler, scheduler.leadership.ended(address, error, self.now_s, self.random.random()))
        self.dial_when_due(scheduler, address)

    # Verdicts

    def obey(self, executor, event):
        """Let the fence decide, and do what it says."""
        if executor.fence is None:
            return
        for verdict in event(executor.fence):
            stream = executor.streams.get(verdict.stream_id)
            match verdict:
                case executor_side.Accepted(_, _, displaced_id):
                    displaced = executor.streams.get(displaced_id)
                    if displaced is not None:
                        returns = displaced.hello.claim.scheduler_id == stream.hello.claim.scheduler_id
                        assert returns or stream.hello.takeover, "a standby displaced a holder that lives"
                        self.break_stream(displaced)
                    self.later(self.delay_s(), self.welcome, stream, executor.incarnation)
                case executor_side.Waits(_, holder):
                    self.later(self.delay_s(), self.wait, stream, Claim(holder.term, holder.scheduler_id))
                case executor_side.Refused(_, RefusedByFence() as error):
                    said = error.metadata
                    holder = Claim(int(said["holder_term"]), said["holder_scheduler_id"])
                    self.break_stream(stream, TermSupersededError(holder))
                case executor_side.Refused():
                    self.break_stream(stream)

    def welcome(self, stream, incarnation):
        """The welcome arrives."""
        if stream.is_open:
            executor = make_executor(incarnation=incarnation)
            described, _ = executor.attach(stream.executor.address)
            stream.scheduler.leadership.welcomed(described, self.now_s)

    def wait(self, stream, holder):
        """Word of a place in the queue arrives."""
        if stream.is_open:
            scheduler = stream.scheduler
            self.carry_out(scheduler, scheduler.leadership.in_line(stream.executor.address, holder, self.now_s))

    def carry_out(self, scheduler, verdicts):
        """End the streams that shall end."""
        for verdict in verdicts:
            if isinstance(verdict, EndStream) and (stream := scheduler.streams.get(verdict.address)) is not None:
                self.later(0.0, self.see_end, stream, verdict.error)
                self.later(self.delay_s(), self.leave, stream)

    # Faults

    def disturb(self):
        """Let one thing go wrong."""
        match self.random.choice(("executor", "scheduler", "stream", "stream")):
            case "executor":
                executor = self.random.choice(list(self.executors.values()))
                if executor.fence is not None:
                    self.stop_executor(executor)
                    self.later(self.random.choice((0.0, 0.2, 2.0)), self.start_executor, executor)
            case "scheduler":
                scheduler = self.random.choice(self.schedulers)
                if scheduler.leadership is not None:
                    self.stop_scheduler(scheduler)
                    self.later(self.random.choice((0.0, 0.2, 2.0)), self.start_scheduler, scheduler)
            case "stream":
                streams = [stream for scheduler in self.schedulers for stream in scheduler.streams.values()]
                if streams:
                    self.break_stream(self.random.choice(streams))

    def driven_by(self):
        """How many executors each scheduler drives."""
        return [
            sum(scheduler.leadership[address].phase is Phase.DRIVEN for address in ADDRESSES)
            for scheduler in self.schedulers
        ]


@pytest.mark.parametrize("first_seed", range(0, 200, 50))
def test_one_scheduler_comes_to_drive_all_executors_and_goes_on(first_seed):
    for seed in range(first_seed, first_seed + 50):
        world = World(seed)
        for _ in range(world.random.randrange(9)):
            world.later(world.random.uniform(0.0, FAULTS_S), world.disturb)
        world.run(FAULTS_S + QUIET_S)
        epochs = [executor.fence.epoch for executor in world.executors.values()]
        assert sorted(world.driven_by()) == [0, 2], f"seed {seed}"
        statuses = {scheduler.leadership.readiness(lambda _: False).status for scheduler in world.schedulers}
        assert statuses == {ServingStatus.SERVING, ServingStatus.STANDBY}, f"seed {seed}"
        world.run(FAULTS_S + QUIET_S + 5)
        assert epochs == [executor.fence.epoch for executor in world.executors.values()], f"seed {seed}"


class Ordered(World):
    """Everything takes the same time; what goes wrong is said. The first scheduler comes first."""

    def delay_s(self):
        return 0.005

    def start_scheduler(self, scheduler):
        """Neither takes over."""
        leadership = Leadership(OwnClaim(scheduler.name, Approach.WAIT))
        self._begin(scheduler, leadership)

    def fail(self, fault):
        """One of `FAULTS`, if there is what it hits."""
        kind, number, *rest = fault
        if kind == "executor" and self.executors[ADDRESSES[number]].fence is not None:
            executor = self.executors[ADDRESSES[number]]
            self.stop_executor(executor)
            self.later(*rest, self.start_executor, executor)
        elif kind == "scheduler" and self.schedulers[number].leadership is not None:
            self.stop_scheduler(self.schedulers[number])
            self.later(*rest, self.start_scheduler, self.schedulers[number])
        elif kind == "stream" and (stream := self.schedulers[number].streams.get(ADDRESSES[rest[0]])) is not None:
            self.break_stream(stream)


FAULTS = (
    *(("executor", 0, after_s) for after_s in (0.0, 2.0)),
    *(("scheduler", number, after_s) for number in range(2) for after_s in (0.0, 2.0)),
    *(("stream", number, executor) for number in range(2) for executor in range(2)),
)
GAPS_S = (0.0, 0.025, 0.1, 0.6, 2.1)


def test_who_is_not_hit_goes_on_as_it_did():
    for first, second in itertools.product(FAULTS, repeat=2):
        for gap_s in GAPS_S:
            world = Ordered(0)
            world.run(5.0)
            driver = world.driven_by().index(2)
            epoch = world.executors[ADDRESSES[1]].fence.epoch
            if any(kind != "executor" and number == driver for kind, number, *_ in (first, second)):
                continue
            world.later(0.0, world.fail, first)
            world.later(gap_s, world.fail, second)
            world.run(17.0)
            assert world.driven_by()[driver] == 2, (first, second, gap_s)
            assert world.executors[ADDRESSES[1]].fence.epoch == epoch, (first, second, gap_s)


@pytest.mark.parametrize("begins_s", [0.01, 0.06, 5.0], ids=["at the start", "when they attach", "in the steady state"])
def test_any_two_faults_in_any_order_leave_one_scheduler_that_drives_all(begins_s):
    """All of them tried out: ten ways to fail, twice, five gaps apart."""
    for first, second in itertools.product(FAULTS, repeat=2):
        for gap_s in GAPS_S:
            world = Ordered(0)
            world.later(begins_s, world.fail, first)
            world.later(begins_s + gap_s, world.fail, second)
            world.run(begins_s + 14.0)
            what = first, second, gap_s
            assert sorted(world.driven_by()) == [0, 2], what
            statuses = {scheduler.leadership.readiness(lambda _: False).status for scheduler in world.schedulers}
            assert statuses == {ServingStatus.SERVING, ServingStatus.STANDBY}, what

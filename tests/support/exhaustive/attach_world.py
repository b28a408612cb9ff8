"""Who drives the executors, after crashes, broken streams, late messages and takeovers: two schedulers, two executors.

The product's own are the claim and `Leadership` of each scheduler, and the `Fence` of each executor. Written here is
what stands between them: streams, processes and the order of an acceptance, which is that of `plan_streams`.
"""

import itertools
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from exhaustive.clockwork import MESSAGE_S, Budget, Clockwork, Do
from exhaustive.gen import Gen
from paceline.plan.values import Approach, Claim, ExecutorInfo, Hello
from paceline_executor.errors import TermSupersededError as RefusedByFence
from paceline_executor.link.fence import Accepted, Fence, FenceTimes, Refused, Verdict, Waits
from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.errors import LinkError, SchedulerError, StreamEndedError, TermSupersededError, UnreachableError
from paceline_scheduler.link.claim import OwnClaim
from paceline_scheduler.link.executor_record import LinkPhase
from paceline_scheduler.link.leadership import EndStream, Leadership, ServingStatus
from paceline_scheduler.link.leadership import Verdict as OfLeadership

ADDRESSES = ("executor 1", "executor 2")
LATE_S = (0.1, 1.2, 60.0)
_BEAT_S = 0.2
SILENCE_S = 1.2
_SETTLING_S = 17


@dataclass(eq=False)
class Stream:
    """One Attach call."""

    scheduler: "Scheduler"
    executor: "Executor"
    hello: Hello
    stream_id: int
    incarnation: int
    is_open: bool = True  # at the scheduler's end
    is_silent: bool = False  # nothing more arrives on either side

    def __str__(self) -> str:
        return f"{self.scheduler.name}'s stream {self.stream_id} to {self.executor.address}"


class Executor:
    """A host where one process comes after another; there is none while it is down."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.incarnation = 100 * int(address[-1])  # of the process before the first
        self.is_up = False
        self.streams: dict[int, Stream] = {}
        self.is_hit = False

    def begin(self) -> None:
        """Start a process, which knows nothing."""
        self.is_up = True
        self.incarnation += 1
        self.last = Claim(0, "")  # accepted
        self.fence = Fence(FenceTimes())

    @property
    def info(self) -> ExecutorInfo:
        holder = self.fence.holder
        return ExecutorInfo(self.incarnation, self.fence.highest_term, holder.scheduler_id if holder else "")


@dataclass(eq=False)
class Scheduler:
    """A process with its leadership, or none while it is down."""

    name: str
    leadership: Leadership | None = None
    streams: dict[str, Stream] = field(default_factory=dict)
    is_hit: bool = False


class AttachWorld(Clockwork):
    """Two schedulers, two executors, and what is on its way between them."""

    def __init__(self, gen: Gen, budget: Budget) -> None:
        super().__init__(gen, budget, LATE_S)
        self.executors = [Executor(address) for address in ADDRESSES]
        self.schedulers = [Scheduler("A"), Scheduler("B")]
        self.scheduling = SchedulersSide(self)
        self.executing = ExecutorsSide(self)
        for executor in self.executors:
            executor.begin()
        for scheduler in self.schedulers:
            self.scheduling.begin(scheduler, Approach.WAIT)
        self.every(_BEAT_S, self._beat)

    def driven_by(self) -> list[int]:
        return [
            sum(scheduler.leadership[address].phase is LinkPhase.DRIVEN for address in ADDRESSES)
            if scheduler.leadership
            else 0
            for scheduler in self.schedulers
        ]

    def check_is_settled(self) -> None:
        """One scheduler drives all, and the other knows that it stands by."""
        self.require(sorted(self.driven_by()) == [0, 2], "one scheduler comes to drive all executors")
        found = {each.leadership.readiness(lambda _: False).status for each in self.schedulers if each.leadership}
        self.require(found == {ServingStatus.SERVING, ServingStatus.STANDBY}, "each scheduler knows whether it serves")

    def settle(self) -> None:
        """Nothing more goes wrong: all comes to rest, and stays so."""
        for _ in range(_SETTLING_S):
            self.run(1.0)
            if self.is_quiet or sorted(self.driven_by()) == [0, 2]:
                break
        self.run(3.0)
        self.check_is_settled()
        while not self.is_quiet:
            self.run(1.0)
        epochs = self.epochs()
        self.run(3.0)
        self.check_is_settled()
        self.require(epochs == self.epochs(), "what is settled stays so")

    def epochs(self) -> list[tuple[int, int]]:
        """Return which process and epoch each executor is in."""
        return [(executor.incarnation, executor.fence.epoch) for executor in self.executors]

    def to_executor(self, stream: Stream, do: Do) -> float:
        """Send to the executor, whose end resets the stream; returns after how many seconds it arrives."""

        def arrives() -> None:
            if stream.is_silent:
                return
            if stream.executor.incarnation == stream.incarnation and stream.executor.is_up:
                do()
            else:
                self.to_scheduler(stream, lambda: self.scheduling.close(stream, StreamEndedError("reset")))

        return self.send(f"{stream.executor.address} on stream {stream.stream_id}", arrives)

    def to_scheduler(self, stream: Stream, do: Do) -> None:
        """Send to the scheduler, for as long as the stream lasts there."""

        def arrives() -> None:
            if stream.is_open and not stream.is_silent:
                do()

        self.notice(stream, self.send(f"{stream.scheduler.name} on stream {stream.stream_id}", arrives))

    def notice(self, stream: Stream, seconds: float) -> None:
        """A scheduler ends a stream that is silent for long."""
        if seconds >= SILENCE_S:
            self.later(SILENCE_S, lambda: self.scheduling.close(stream, StreamEndedError("silent")))

    def _beat(self) -> None:
        """Let everybody be heard, and time pass for fences."""
        for executor in self.executors:
            if executor.is_up:
                for stream in list(executor.streams.values()):
                    if stream.is_open and not stream.is_silent:
                        self.executing.obey(executor, executor.fence.note_message(stream.stream_id, self.now_ns))
                self.executing.look(executor)
        for scheduler in self.schedulers:
            if scheduler.leadership is not None:
                self.scheduling.carry_out(scheduler, scheduler.leadership.advance(self.now_s))

    @property
    def now_ns(self) -> int:
        return round(self.now_s * 1e9)


class SchedulersSide:
    """What schedulers do: dial, drive, and see streams end."""

    def __init__(self, world: "AttachWorld") -> None:
        self._world = world
        self._numbered = itertools.count(1)
        self._jitter = Random(0)  # noqa: S311 - nothing secret

    def begin(self, scheduler: Scheduler, approach: Approach) -> None:
        """Start a process: it asks for terms, then dials. Ids are random: later ones of A rank lower, of B higher."""
        number = next(self._numbered)
        rank = 500 + (number if scheduler.name == "B" else -number)
        leadership = scheduler.leadership = Leadership(OwnClaim(f"{rank}{scheduler.name}", approach))
        told = {executor.address: executor.info for executor in self._world.executors if executor.is_up}
        leadership.look(ADDRESSES, told, self._world.now_s)
        for executor in self._world.executors:
            leadership.expect(executor.address, self._world.now_s)
            self._world.later(MESSAGE_S, partial(self._dial, scheduler, leadership, executor))

    def _dial(self, scheduler: Scheduler, leadership: Leadership, executor: Executor) -> None:
        if scheduler.leadership is not leadership or executor.address in scheduler.streams:
            return
        if not executor.is_up:
            self._ended(scheduler, executor, UnreachableError("refused"))
            return
        try:
            greeting = leadership.found(executor.address, executor.info, self._world.now_s, self._jitter.random())
        except LinkError as error:
            self._ended(scheduler, executor, error)
            return
        if greeting is None:
            self._dial_when_due(scheduler, executor)
            return
        stream = Stream(scheduler, executor, greeting.hello, next(self._numbered), executor.incarnation)
        scheduler.streams[executor.address] = stream
        self._world.tell(f"{scheduler.name} says hello to {executor.address} as {greeting.hello.claim}")
        self._world.notice(stream, self._world.to_executor(stream, lambda: self._world.executing.arrive(stream)))
        self.carry_out(scheduler, greeting.verdicts)
        claims = {each.hello.claim for each in scheduler.streams.values()}
        self._world.require(len(claims) <= 1, "a scheduler has one claim")

    def _dial_when_due(self, scheduler: Scheduler, executor: Executor) -> None:
        leadership = scheduler.leadership
        if leadership is not None:
            wait_s = max(0.0, leadership[executor.address].redial.at_s - self._world.now_s)
            self._world.later(wait_s, lambda: self._dial(scheduler, leadership, executor))

    def _ended(self, scheduler: Scheduler, executor: Executor, error: SchedulerError) -> None:
        leadership = scheduler.leadership
        if leadership is not None:
            self.carry_out(
                scheduler, leadership.ended(executor.address, error, self._world.now_s, self._jitter.random())
            )
            self._dial_when_due(scheduler, executor)

    def carry_out(self, scheduler: Scheduler, verdicts: tuple[OfLeadership, ...]) -> None:
        for verdict in verdicts:
            if isinstance(verdict, EndStream) and (stream := scheduler.streams.get(verdict.address)) is not None:
                self.close(stream, verdict.error)

    def close(self, stream: Stream, error: SchedulerError) -> None:
        """End a stream at the scheduler's side: it sees it at once, the executor when that arrives."""
        if stream.is_open:
            stream.is_open = False
            del stream.scheduler.streams[stream.executor.address]
            self._world.tell(f"{stream} ends: {type(error).__name__}")
            self._world.to_executor(stream, lambda: self._world.executing.leave(stream))
            self._ended(stream.scheduler, stream.executor, error)

    def wait(self, stream: Stream, holder: Claim) -> None:
        """The executor has another holder."""
        scheduler = stream.scheduler
        if scheduler.leadership is not None:
            self.carry_out(scheduler, scheduler.leadership.in_line(stream.executor.address, holder, self._world.now_s))

    def welcome(self, stream: Stream, epoch: int) -> None:
        leadership = stream.scheduler.leadership
        assert leadership is not None, "its streams end with it"
        self._world.tell(f"{stream.scheduler.name} drives {stream.executor.address} in epoch {epoch}")
        described = replace(_DESCRIPTION, address=stream.executor.address, incarnation=stream.incarnation, epoch=epoch)
        leadership.syncing(described.address, described.incarnation)
        leadership.welcomed(described, self._world.now_s)


class ExecutorsSide:
    """What executors do with the streams that reach them, in the order of `plan_streams`."""

    def __init__(self, world: "AttachWorld") -> None:
        self._world = world

    def arrive(self, stream: Stream) -> None:
        """A stream reaches the executor with its hello."""
        executor, hello = stream.executor, stream.hello
        executor.streams[stream.stream_id] = stream
        approach = Approach.TAKE_OVER if hello.takeover else Approach.WAIT
        self.obey(executor, executor.fence.arrive(stream.stream_id, hello.claim, approach, self._world.now_ns))

    def look(self, executor: Executor) -> None:
        """Let the fence see the time."""
        if executor.is_up:
            self.obey(executor, executor.fence.advance(self._world.now_ns))

    def leave(self, stream: Stream) -> None:
        executor = stream.executor
        if executor.streams.pop(stream.stream_id, None) is not None:
            self.obey(executor, executor.fence.leave(stream.stream_id, self._world.now_ns))
            self._world.later(0.05, lambda: self.look(executor))

    def _dismiss(self, stream: Stream, error: SchedulerError) -> None:
        """End a stream at the executor's side. What had arrived on it is still read, for a while."""
        self._world.to_scheduler(stream, lambda: self._world.scheduling.close(stream, error))
        executor = stream.executor
        incarnation = executor.incarnation
        self._world.later(0.05, lambda: self.leave(stream) if executor.incarnation == incarnation else None)

    def obey(self, executor: Executor, verdicts: tuple[Verdict, ...]) -> None:
        for verdict in verdicts:
            stream = executor.streams[verdict.stream_id]
            match verdict:
                case Accepted():
                    self._accept(executor, stream, verdict)
                case Waits(_, holder):
                    self._world.to_scheduler(stream, partial(self._world.scheduling.wait, stream, holder))
                case Refused(_, RefusedByFence() as error):
                    said = error.metadata
                    holder = Claim(int(said["holder_term"]), said["holder_scheduler_id"])
                    self._dismiss(stream, TermSupersededError(holder))
                case Refused():
                    self._dismiss(stream, StreamEndedError(str(verdict.error)))

    def _accept(self, executor: Executor, stream: Stream, accepted: Accepted) -> None:
        claim = stream.hello.claim
        self._world.tell(f"{executor.address} accepts {claim} for epoch {accepted.epoch}")
        self._world.require(claim >= executor.last, "claims that are accepted never go down")
        executor.last = claim
        displaced = executor.streams.get(accepted.displaced_stream_id or 0)
        if displaced is not None:
            returns = displaced.hello.claim.scheduler_id == claim.scheduler_id
            is_silent = displaced.is_silent or not displaced.is_open
            self._world.require(
                returns or stream.hello.takeover or is_silent, "a standby displaces no holder that lives"
            )
            self._dismiss(displaced, StreamEndedError("another stream was accepted"))
        self._world.to_scheduler(stream, lambda: self._world.scheduling.welcome(stream, accepted.epoch))


_DESCRIPTION = ExecutorDescription("", 0, 0, "simulated", 1, 1, 1, 1, 1, 1, b"", 1)

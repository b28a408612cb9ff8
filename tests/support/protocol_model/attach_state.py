"""What the attach model consists of: two schedulers, two executors with the streams to them, and the faults left.

Knows no moves. Numbers take the place of names: a scheduler's id is an int, larger ids win ties as they do in claims.
"""

from collections.abc import Iterator
from enum import Enum, IntEnum
from typing import NamedTuple

Claim = tuple[int, int]
"""(term, scheduler_id)"""


class Safeguard(Enum):
    """What can be switched off, to see that the checker notices."""

    EPOCH_EQUALITY = "a plan counts only in the epoch it was written for"
    INCARNATION_EQUALITY = "a plan counts only at the incarnation it was written for"
    STEP_ORDER = "a plan counts only as the next step of its epoch"
    TERM_ORDER = "a lower claim than the one accepted last is refused"
    DROPPED_QUEUE = "acceptance drops the plans that were not launched"
    STEP_BOUNDARY = "the snapshot waits for the running step"
    LINE = "who finds a live holder is queued"
    LEASE = "a silent holder can be replaced"
    STANDING_DOWN = "who is refused by one executor gives up all of them"
    ONE_CLAIM = "whose term rises attaches to all executors anew"


class Place(IntEnum):
    """Where a stream is, for the executor."""

    ARRIVING = 0  # its hello is on its way
    IN_LINE = 1
    ACCEPTED = 2  # welcome and snapshot are not sent yet
    DRIVING = 3
    ENDED = 4


class Damage(IntEnum):
    """What happened to a stream on its way. What was sent before may still arrive; what is sent after does not."""

    NONE = 0
    BROKEN = 1
    HALF_OPEN = 2  # the executor does not notice by itself
    RESTARTED = 3  # the executor at its end is gone


class Plan(NamedTuple):
    """A plan as it is sent, and by whom."""

    incarnation: int
    epoch: int
    step_id: int
    scheduler_id: int


class Stream(NamedTuple):
    """One Attach call, for as long as something of it may still arrive."""

    slot: int  # of the scheduler
    scheduler_id: int
    term: int
    place: Place = Place.ARRIVING
    is_open: bool = True  # at the scheduler's end
    damage: Damage = Damage.NONE
    welcome: int = 0  # the epoch in a welcome that is on its way, 0 if none is
    holder_term: int = 0  # in a refusal that is on its way, 0 if the stream ended without one
    epoch: int = 0  # as the scheduler knows it, 0 before it is welcome
    num_sent: int = 0
    plans: tuple[Plan, ...] = ()  # on their way

    @property
    def claim(self) -> Claim:
        """Who wants to drive."""
        return self.term, self.scheduler_id


class Scheduler(NamedTuple):
    """A scheduler process; another one, with an id of its own, comes after a crash."""

    scheduler_id: int
    term: int = 0  # 0: it has not asked for the terms of the executors yet


class Executor(NamedTuple):
    """An executor process and all streams to it."""

    max_plans: int  # that schedulers send it on one stream
    incarnation: int = 1
    epoch: int = 0
    last: Claim = (0, 0)  # the claim accepted last
    highest_term: int = 0
    streams: tuple[Stream, ...] = ()  # sorted: their order means nothing
    queue: tuple[Plan, ...] = ()
    running_epoch: int = 0  # of the step that runs, 0 if none does
    num_taken: int = 0  # plans of this epoch that arrived
    num_launched: int = 0  # steps of this epoch
    resting: tuple[bool, bool] = (False, False)  # which schedulers were refused, and dial again after a rest
    known: tuple[bool, bool] = (False, False)  # which were welcomed by this process, and have not stepped down since
    broken: str = ""  # the rule that was broken here

    @property
    def holder(self) -> Stream | None:
        """The stream that was accepted last, while it lasts."""
        for stream in self.streams:
            if stream.place in (Place.ACCEPTED, Place.DRIVING):
                return stream
        return None

    def open_stream(self, slot: int) -> Stream | None:
        """The stream that a scheduler holds."""
        for stream in self.streams:
            if stream.slot == slot and stream.is_open:
                return stream
        return None


class Faults(NamedTuple):
    """How many more of each kind may happen."""

    crashes: int = 2  # of schedulers and executors
    cuts: int = 1  # of streams
    displacements: int = 0  # of a live holder: a takeover, or a lease that runs out on one that is only slow
    strays: int = 0  # plans lost or doubled on their way
    lingering: int = 0  # streams whose scheduler has closed its end, unnoticed by the executor
    haste: int = 0  # attaching again, or anew, before others had their chance


def with_stream(executor: Executor, before: Stream | None, after: Stream) -> Executor:
    """The executor with a stream changed, or a new one. Those that nothing can come of any more are gone."""
    streams = [stream for stream in executor.streams if stream is not before]
    if after.is_open or after.place is not Place.ENDED or after.plans:
        streams.append(after)
    return executor._replace(streams=tuple(sorted(streams)))


def closings(executor: Executor, slot: int, faults: Faults) -> Iterator[tuple[Executor, Faults]]:
    """The executor after a scheduler has closed its end of the stream: it notices at once, or later.

    What is on its way back is lost.
    """
    stream = executor.open_stream(slot)
    if stream is None:
        yield executor, faults
        return
    lingering = stream._replace(is_open=False, welcome=0, holder_term=0, epoch=0, num_sent=0)
    yield with_stream(executor, stream, lingering._replace(place=Place.ENDED, plans=())), faults
    if faults.lingering and (stream.place is not Place.ENDED or stream.plans):
        yield with_stream(executor, stream, lingering), faults._replace(lingering=faults.lingering - 1)


def all_closings(
    first: Executor, second: Executor, slot: int, faults: Faults
) -> Iterator[tuple[Executor, Executor, Faults]]:
    """Both executors after a scheduler has closed its end of all streams."""
    for here, left in closings(first, slot, faults):
        for there, rest in closings(second, slot, left):
            yield here, there, rest


def with_rest(executor: Executor, slot: int, *, is_resting: bool) -> Executor:
    """The executor with a scheduler that dials it at once, or after a rest."""
    return executor._replace(resting=_with_flag(executor.resting, slot, is_resting))


def with_welcome(executor: Executor, slot: int, *, is_known: bool) -> Executor:
    """The executor with a scheduler that has been welcomed there, or has stepped down."""
    return executor._replace(known=_with_flag(executor.known, slot, is_known))


def _with_flag(flags: tuple[bool, bool], slot: int, flag: bool) -> tuple[bool, bool]:
    return (flags[0], flag) if slot else (flag, flags[1])


def is_overdue(executor: Executor, stream: Stream) -> bool:
    """Whether a result will never come, since its plan was lost: the scheduler notices by its step bound."""
    is_idle = not (stream.plans or executor.queue or executor.running_epoch)
    return stream.epoch == executor.epoch and is_idle and executor.num_launched < stream.num_sent

"""Who drives which executor, as this scheduler knows it: the twin of the executor's fence.

Knows executors by address, the claim made at them, and the time it is told, in seconds. It refuses to know asyncio,
networks, logs and chance: it is told what was seen, keeps it once, and returns verdicts, which its caller carries out.

A scheduler *acts* from its first welcome until it gives everything up for another one. From its start, and again from
then on, every executor is *awaited*: until each was attached or is lost nobody can tell a new request from one that
goes on. An executor is *lost* when it says that nobody listens, or when for 1.5 s there was neither a welcome nor a
holder that lives.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from paceline.plan.values import ExecutorInfo, Hello
from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.errors import (
    LinkError,
    ProtocolMismatchError,
    SchedulerError,
    StandingByError,
    StillLoadingError,
    StreamEndedError,
    TermRaisedError,
    TermSupersededError,
    UnreachableError,
)
from paceline_scheduler.holder import Holder
from paceline_scheduler.link.awaited import Awaited
from paceline_scheduler.link.claim import OwnClaim, outranks
from paceline_scheduler.link.executor_record import LOST_AFTER_S, ExecutorRecord, Phase
from paceline_scheduler.link.redial import varied

LEFT_ALONE_S = 2.0  # longer than an executor waits for the holder it had


@dataclass(frozen=True, slots=True)
class InLine:
    """Another scheduler, which is alive, drives the executor; this one waits there."""

    address: str
    holder: Holder


@dataclass(frozen=True, slots=True)
class Detached:
    """The stream ended, or an attempt to open one failed: because of `holder`, if that is given.

    `is_loading`: the executor is there, and loads its model.
    """

    address: str
    reason: str
    was_driven: bool
    holder: Holder | None = None
    is_loading: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """The requests of the executor should run elsewhere. `was_serving` says that there may be some."""

    address: str
    was_serving: bool


@dataclass(frozen=True, slots=True)
class Displaced:
    """Another scheduler has taken over: everything under way here is its business now."""

    active: Holder


@dataclass(frozen=True, slots=True)
class EndStream:
    """The stream to the executor has to end with this error."""

    address: str
    error: LinkError


Verdict = InLine | Detached | Lost | Displaced | EndStream
Verdicts = tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class Greeting:
    """Say hello to the executor; the streams to others end first, where the claim has risen."""

    hello: Hello
    verdicts: Verdicts


class ServingStatus(Enum):
    """What a new request meets here."""

    NOT_SERVING = "no executor takes it"
    STANDBY = "another scheduler drives the executors, and this one waits in line"
    SERVING = "it is run"


@dataclass(frozen=True, slots=True)
class Readiness:
    """How a scheduler stands. While it stands by, `active` is the one that drives the executors."""

    status: ServingStatus
    active: Holder | None = None


class Leadership:
    """Decides where to dial, who yields to whom, and what is lost."""

    def __init__(self, claim: OwnClaim) -> None:
        self.claim = claim
        self.is_acting = False
        self._executors: dict[str, ExecutorRecord] = {}
        self.awaited = Awaited(self._executors.values())

    # What is known

    def __getitem__(self, address: str) -> ExecutorRecord:
        return self._executors[address]

    def readiness(self, drains: Callable[[str], bool]) -> Readiness:
        """Return what would become of a new request; a draining executor takes none."""
        if (active := self.awaited.active) is not None:
            return Readiness(ServingStatus.STANDBY, active)
        is_served = any(each.is_serving and not drains(each.address) for each in self._executors.values())
        return Readiness(ServingStatus.SERVING if is_served else ServingStatus.NOT_SERVING)

    def next_change_s(self) -> float | None:
        """When time alone would change something; None if it would not."""
        times = [each.lost_at_s for each in self._executors.values()]
        return min((at_s for at_s in (*times, self.awaited.split_at_s) if at_s is not None), default=None)

    # What was seen

    def look(self, addresses: Iterable[str], terms: Mapping[str, int]) -> None:
        """Learn the executors, and the terms that some of them reported; expect word of each."""
        for address in addresses:
            self._know(address)
        self.claim.learn(terms)
        self.awaited.expect_all()

    def expect(self, address: str, now_s: float) -> None:
        self._know(address).lost_at_s = now_s + LOST_AFTER_S

    def remove(self, address: str) -> None:
        del self._executors[address]
        self.claim.forget(address)

    def found(self, address: str, info: ExecutorInfo, now_s: float, jitter: float) -> Greeting | None:
        """Learn who an executor is. None: ask again later, it is for another scheduler. Raises a LinkError where no
        stream may be opened.
        """
        executor = self._executors[address]
        for other in self._executors.values():
            # Two streams would end each other for ever, since a scheduler that attaches again replaces its own stream.
            if other is not executor and other.hello is not None and other.incarnation == info.incarnation:
                raise StreamEndedError(f"{address} and {other.address} lead to the same executor; name one of them")
        if self._is_for_another(executor, info, now_s, jitter):
            executor.redial.look_again(now_s, jitter)
            return None
        verdicts = self._rise(executor, info, now_s)
        hello = self.claim.hello(address)
        executor.greet(info.incarnation, hello)
        return Greeting(hello, verdicts)

    def in_line(self, address: str, holder: Holder, now_s: float) -> Verdicts:
        """Nothing of the executor is ours: a live scheduler holds it."""
        executor = self._executors[address]
        self.claim.require_credible(address, holder.term)
        if (executor.phase, executor.holder) == (Phase.IN_LINE, holder):
            return ()
        lost = self._lose(executor) if executor.is_serving else ()
        executor.stand_in_line(holder)
        self.awaited.expect_held(executor)
        return (*lost, InLine(address, holder), *self._yield_if_left_out(now_s))

    def syncing(self, address: str) -> None:
        """An executor has accepted this scheduler, which gets what it needs to drive it."""
        self._executors[address].sync()

    def welcomed(self, description: ExecutorDescription, now_s: float) -> None:
        """An executor is driven from now on."""
        self._executors[description.address].welcome(description, now_s)
        self.claim.is_welcome(description.incarnation)
        self.is_acting = True
        self.awaited.resolved_by_welcome(now_s)

    def drains(self, address: str) -> bool:
        """Place nothing new on it; returns whether it is driven, else its welcome tells."""
        executor = self._executors[address]
        executor.is_drain_due = True
        return executor.phase is Phase.DRIVEN

    def ended(self, address: str, error: SchedulerError, now_s: float, jitter: float) -> Verdicts:
        """A stream ended, or an attempt to open one failed."""
        executor = self._executors[address]
        if isinstance(error, TermSupersededError):
            try:
                return self._refused(executor, error, now_s, jitter)
            except LinkError as disbelief:
                error = disbelief
        detached = self._detach(executor, error, None, now_s)
        is_gone = isinstance(error, UnreachableError | ProtocolMismatchError)
        lost = (*self._lose(executor), *self._yield_if_left_out(now_s)) if is_gone else ()
        match error:
            case TermRaisedError():
                executor.redial.after_rise(now_s, jitter)
            case StandingByError():
                executor.lost_at_s = None
                executor.redial.after_yielding(now_s, jitter)
            case ProtocolMismatchError():
                executor.redial.after_mismatch(now_s)
            case _:
                is_urgent = self.is_acting and not executor.is_serving
                executor.redial.after_failure(now_s, jitter, is_urgent=is_urgent)
        return (detached, *lost)

    def advance(self, now_s: float) -> Verdicts:
        """Time has passed."""
        self.awaited.advance(now_s)
        late = [each for each in self._executors.values() if each.lost_at_s is not None and now_s >= each.lost_at_s]
        lost = tuple(verdict for executor in late for verdict in self._lose(executor))
        return (*lost, *self._yield_if_left_out(now_s)) if lost else ()

    # Inside

    def _know(self, address: str) -> ExecutorRecord:
        self.claim.look_for(address)
        return self._executors.setdefault(address, ExecutorRecord(address))

    def _is_for_another(self, executor: ExecutorRecord, info: ExecutorInfo, now_s: float, jitter: float) -> bool:
        """Whether nobody drives the executor and another scheduler should: one that drives others, or was just here. A
        fence that has just started takes whoever comes first, who would then, with the higher claim, take all others
        from a healthy scheduler.
        """
        if executor.in_line_at not in (None, info.incarnation):
            executor.in_line_at = None
            executor.left_alone_until_s = now_s + varied(LEFT_ALONE_S, jitter)
        if self.is_acting or self.claim.takes_over(executor.address):
            return False
        if info.holder_scheduler_id not in ("", self.claim.scheduler_id):
            return False
        is_behind = any(each.phase is Phase.IN_LINE for each in self._executors.values())
        return is_behind or now_s < executor.left_alone_until_s

    def _rise(self, executor: ExecutorRecord, info: ExecutorInfo, now_s: float) -> Verdicts:
        """Claim more than an executor reports, and attach to the others again: a scheduler has one claim everywhere."""
        self.claim.require_credible(executor.address, info.term)
        if not self.claim.must_rise(info):
            return ()
        executor.let_claim_count(now_s)
        self.claim.rise_above(executor.address, info.term)
        error = TermRaisedError("the scheduler attaches again under a higher term")
        return tuple(EndStream(other.address, error) for other in self._executors.values() if other.hello is not None)

    def _refused(self, executor: ExecutorRecord, error: TermSupersededError, now_s: float, jitter: float) -> Verdicts:
        """Yield to a credible scheduler of a higher claim. Raises a LinkError if it is not."""
        holder = error.holder
        if executor.hello is None or not outranks(holder, executor.hello):
            sentence = f"it refuses this scheduler for one of term {holder.term}, which does not rank higher"
            raise UnreachableError(f"{sentence}; restart this executor")
        self.claim.require_credible(executor.address, holder.term)
        is_news = self.claim.is_below(holder)
        if is_news:
            executor.let_claim_count(now_s)
        detached = self._detach(executor, error, holder, now_s)
        executor.lost_at_s = None
        verdicts = self._yield_to(executor, holder, now_s, jitter) if is_news else ()
        executor.redial.after_yielding(now_s, jitter)
        return (detached, *verdicts)

    def _yield_to(self, executor: ExecutorRecord, active: Holder, now_s: float, jitter: float) -> Verdicts:
        """Give up all executors, and wait for them. Else two that start at once would each hold some, and each wait for
        the rest.
        """
        self.claim.step_down(executor.address, active)
        displaced = self._stop_acting(active)
        for each in self._executors.values():
            each.left_alone_until_s = now_s + varied(LEFT_ALONE_S, jitter)
            each.leave()
        error = StandingByError(f"{active} took over")
        ends = (EndStream(each.address, error) for each in self._executors.values() if each.hello is not None)
        return (*displaced, *ends)

    def _yield_if_left_out(self, now_s: float) -> Verdicts:
        """Give up what would wait here for ever: no executor is left, and another scheduler drives one. That one may
        have the lower claim, as a new executor takes the first scheduler that comes.
        """
        if not self.is_acting or any(each.is_serving for each in self._executors.values()):
            return ()
        holders = [each.holder for each in self._executors.values() if each.phase is Phase.IN_LINE]
        active = next((holder for holder in holders if holder is not None), None)
        if active is None:
            return ()
        for each in self._executors.values():
            if each.phase is Phase.LOST:
                each.seek(now_s + LOST_AFTER_S)  # word of it is awaited again
        return self._stop_acting(active)

    def _stop_acting(self, active: Holder) -> Verdicts:
        """Drive nothing until a welcome, and expect word of all executors again."""
        was_acting, self.is_acting = self.is_acting, False
        if not was_acting:
            return ()
        self.awaited.expect_all()
        return (Displaced(active),)

    def _detach(self, executor: ExecutorRecord, error: SchedulerError, holder: Holder | None, now_s: float) -> Detached:
        was_driven = executor.detach(holder, now_s)
        self.awaited.expect_held(executor)
        return Detached(executor.address, str(error), was_driven, holder, isinstance(error, StillLoadingError))

    def _lose(self, executor: ExecutorRecord) -> Verdicts:
        if executor.phase is Phase.LOST:
            return ()
        lost = Lost(executor.address, executor.is_serving)
        executor.lose()
        return (lost,)

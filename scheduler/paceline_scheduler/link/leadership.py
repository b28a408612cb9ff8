"""Who drives which executor, as this scheduler knows it: the twin of the executor's fence.

Refuses to know asyncio, networks, logs and chance: it is told what was seen and the time in seconds, and returns
verdicts, which its caller carries out.

A scheduler *acts* from its first welcome until it gives everything up for another one. From its start, and again from
then on, every executor is *awaited*: until each was attached or is lost nobody can tell a new request from one that
goes on. An executor is *lost* when it says that nobody listens, or when for 1.5 s there was neither a welcome nor a
live holder.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from paceline.plan.values import Claim, ExecutorInfo, Hello
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
from paceline_scheduler.link.awaited import Awaited
from paceline_scheduler.link.claim import OwnClaim, outranks
from paceline_scheduler.link.executor_record import LOST_AFTER_S, ExecutorRecord, LinkPhase
from paceline_scheduler.link.redial import varied

LEFT_ALONE_S = 2.0  # longer than an executor waits for its former holder


@dataclass(frozen=True, slots=True)
class InLine:
    address: str
    holder: Claim


@dataclass(frozen=True, slots=True)
class Detached:
    """A stream ended, or could not be opened, perhaps because of `holder`.

    `is_loading`: the executor loads its model.
    """

    address: str
    reason: str
    was_driven: bool
    holder: Claim | None = None
    is_loading: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """Its requests should run elsewhere, if there are any."""

    address: str
    was_serving: bool


@dataclass(frozen=True, slots=True)
class Displaced:
    active: Claim


@dataclass(frozen=True, slots=True)
class EndStream:
    address: str
    error: LinkError


Verdict = InLine | Detached | Lost | Displaced | EndStream
Verdicts = tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class Greeting:
    """Other streams end first where the claim has risen."""

    hello: Hello
    verdicts: Verdicts


class ServingStatus(Enum):
    NOT_SERVING = "no executor takes it"
    STANDBY = "another scheduler drives the executors, and this one waits in the queue"
    SERVING = "it is run"


@dataclass(frozen=True, slots=True)
class Readiness:
    """While it stands by, `active` drives the executors."""

    status: ServingStatus
    active: Claim | None = None


class Leadership:
    def __init__(self, claim: OwnClaim) -> None:
        self.claim = claim
        self.is_acting = False
        self._executors: dict[str, ExecutorRecord] = {}
        self.awaited = Awaited(self._executors.values())

    def __getitem__(self, address: str) -> ExecutorRecord:
        return self._executors[address]

    def readiness(self, drains: Callable[[str], bool]) -> Readiness:
        """A draining executor takes no new request."""
        if (active := self.awaited.active) is not None:
            return Readiness(ServingStatus.STANDBY, active)
        is_served = any(each.is_serving and not drains(each.address) for each in self._executors.values())
        return Readiness(ServingStatus.SERVING if is_served else ServingStatus.NOT_SERVING)

    def next_change_s(self) -> float | None:
        """Returns None if time alone changes nothing."""
        times = [each.lost_at_s for each in self._executors.values()]
        return min((at_s for at_s in (*times, self.awaited.split_at_s) if at_s is not None), default=None)

    def look(self, addresses: Iterable[str], infos: Mapping[str, ExecutorInfo], now_s: float) -> None:
        """Some executors said who they are; word of each is expected."""
        for address in addresses:
            self._know(address)
        self.claim.learn({address: info.term for address, info in infos.items()})
        self.awaited.expect_all()
        if any(info.holder_scheduler_id not in ("", self.claim.scheduler_id) for info in infos.values()):
            # One that starts just now is for the scheduler that drives others.
            for executor in self._executors.values():
                executor.left_alone_until_s = now_s + LEFT_ALONE_S

    def expect(self, address: str, now_s: float) -> None:
        self._know(address).lost_at_s = now_s + LOST_AFTER_S

    def remove(self, address: str) -> None:
        del self._executors[address]
        self.claim.forget(address)

    def found(self, address: str, info: ExecutorInfo, now_s: float, jitter: float) -> Greeting | None:
        """Returns None to ask again later: it is for another scheduler. Raises a LinkError where no stream may be
        opened.
        """
        executor = self._executors[address]
        for other in self._executors.values():
            # A scheduler that attaches again replaces its own stream: two would end each other for ever.
            if other is not executor and other.hello is not None and other.incarnation == info.incarnation:
                raise StreamEndedError(f"{address} and {other.address} lead to the same executor; name one of them")
        if self._is_for_another(executor, info, now_s, jitter):
            executor.redial.look_again(now_s, jitter)
            return None
        verdicts = self._rise(executor, info, now_s)
        hello = self.claim.hello(address, info)
        executor.greet(info.incarnation, hello)
        return Greeting(hello, verdicts)

    def in_line(self, address: str, holder: Claim, now_s: float) -> Verdicts:
        """Nothing of the executor is ours."""
        executor = self._executors[address]
        self.claim.require_credible(address, holder.term)
        if (executor.phase, executor.holder) == (LinkPhase.IN_LINE, holder):
            return ()
        lost = self._lose(executor) if executor.is_serving else ()
        executor.stand_in_line(holder)
        self.awaited.expect_held(executor)
        return (*lost, InLine(address, holder), *self._yield_if_left_out(now_s))

    def syncing(self, address: str, incarnation: int) -> None:
        """It has accepted the claim, and may yet be one that does not belong here."""
        self._executors[address].sync()
        self.claim.is_welcome(incarnation)

    def welcomed(self, description: ExecutorDescription, now_s: float) -> None:
        self._executors[description.address].welcome(description, now_s)
        self.is_acting = True
        self.awaited.resolved_by_welcome(now_s)

    def drains(self, address: str) -> bool:
        """Returns whether it is driven, else its welcome tells."""
        executor = self._executors[address]
        executor.is_drain_due = True
        return executor.phase is LinkPhase.DRIVEN

    def ended(self, address: str, error: SchedulerError, now_s: float, jitter: float) -> Verdicts:
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
        self.awaited.advance(now_s)
        late = [each for each in self._executors.values() if each.lost_at_s is not None and now_s >= each.lost_at_s]
        lost = tuple(verdict for executor in late for verdict in self._lose(executor))
        return (*lost, *self._yield_if_left_out(now_s)) if lost else ()

    def _know(self, address: str) -> ExecutorRecord:
        self.claim.look_for(address)
        return self._executors.setdefault(address, ExecutorRecord(address))

    def _is_for_another(self, executor: ExecutorRecord, info: ExecutorInfo, now_s: float, jitter: float) -> bool:
        """Nobody drives the executor and another scheduler should: one that drives others, or was just here. A fence
        that has just started takes whoever comes first, who would then, with the higher claim, take all others from a
        healthy scheduler.
        """
        if executor.in_line_at not in (None, info.incarnation):
            executor.in_line_at = None
            executor.left_alone_until_s = now_s + varied(LEFT_ALONE_S, jitter)
        if self.is_acting or self.claim.takes_over(executor.address):
            return False
        if info.holder_scheduler_id not in ("", self.claim.scheduler_id):
            return False
        is_behind = any(each.phase is LinkPhase.IN_LINE for each in self._executors.values())
        return is_behind or now_s < executor.left_alone_until_s

    def _rise(self, executor: ExecutorRecord, info: ExecutorInfo, now_s: float) -> Verdicts:
        """A scheduler has one claim at all whose terms are credible: it attaches to the others again."""
        if not self.claim.is_credible(executor.address, info.term):
            self.claim.require_free(info)
            return ()
        if not self.claim.must_rise(info):
            return ()
        executor.let_claim_count(now_s)
        self.claim.rise_above(executor.address, info.term)
        error = TermRaisedError("the scheduler attaches again under a higher term")
        return tuple(EndStream(other.address, error) for other in self._executors.values() if other.hello is not None)

    def _refused(self, executor: ExecutorRecord, error: TermSupersededError, now_s: float, jitter: float) -> Verdicts:
        """Raises a LinkError if the holder is not credible."""
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

    def _yield_to(self, executor: ExecutorRecord, active: Claim, now_s: float, jitter: float) -> Verdicts:
        """Two that start at once would else each hold some executors and wait for the rest."""
        self.claim.step_down(executor.address, active)
        displaced = self._stop_acting(active)
        for each in self._executors.values():
            each.left_alone_until_s = now_s + varied(LEFT_ALONE_S, jitter)
            each.leave()
        error = StandingByError(f"{active} took over")
        ends = (EndStream(each.address, error) for each in self._executors.values() if each.hello is not None)
        return (*displaced, *ends)

    def _yield_if_left_out(self, now_s: float) -> Verdicts:
        """No executor is left, and another scheduler drives one. It may have the lower claim: a new executor takes
        whoever comes first.
        """
        if not self.is_acting or any(each.is_serving for each in self._executors.values()):
            return ()
        holders = [each.holder for each in self._executors.values() if each.phase is LinkPhase.IN_LINE]
        active = next((holder for holder in holders if holder is not None), None)
        if active is None:
            return ()
        for each in self._executors.values():
            if each.phase is LinkPhase.LOST:
                each.seek(now_s + LOST_AFTER_S)
        return self._stop_acting(active)

    def _stop_acting(self, active: Claim) -> Verdicts:
        """Word of all executors is expected again."""
        was_acting, self.is_acting = self.is_acting, False
        if not was_acting:
            return ()
        self.awaited.expect_all()
        return (Displaced(active),)

    def _detach(self, executor: ExecutorRecord, error: SchedulerError, holder: Claim | None, now_s: float) -> Detached:
        was_driven = executor.detach(holder, now_s)
        self.awaited.expect_held(executor)
        return Detached(executor.address, str(error), was_driven, holder, isinstance(error, StillLoadingError))

    def _lose(self, executor: ExecutorRecord) -> Verdicts:
        if executor.phase is LinkPhase.LOST:
            return ()
        lost = Lost(executor.address, executor.is_serving)
        executor.lose()
        return (lost,)

"""The link to one executor: dial, attach, keep attached, and say when it is lost.

Knows when to try again. What is planned, and what happens to requests, is for the listener.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import NoReturn, Protocol

import structlog

from paceline.plan.values import BatchPlan, Drain, ExecutorInfo, Model, StepResult, WaitingInLine, Welcome
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.errors import (
    DivergenceError,
    LinkError,
    ProtocolMismatchError,
    StandingByError,
    TermRaisedError,
    TermSupersededError,
    UnreachableError,
)
from paceline_scheduler.holder import Holder
from paceline_scheduler.link.complaints import Complaints
from paceline_scheduler.link.identity import Identity
from paceline_scheduler.link.plan_stream import PlanStreamDriver
from paceline_scheduler.link.tokenizers import TokenizerShelf
from paceline_scheduler.link.transport import Connection, Transport

GET_INFO_TIMEOUT_S = 1.0
LOST_AFTER_S = 1.5
FIRST_DELAY_S = 0.01
REJOIN_DELAY_S = 0.1  # before it stands in line again, with the claim that has risen
RAISED_DELAY_S = 0.02
MISMATCH_DELAY_S = 2.0  # in a rolling upgrade the executor may soon be another
MIN_STREAM_LIFE_S = 1.0
LEFT_ALONE_S = 2.0  # longer than an executor waits for the holder it had
LOOK_AGAIN_S = 0.1
MAX_ACTING_WAIT_S = 1.0  # less than that, so that it is first at an executor that comes back

log = structlog.get_logger(__name__)


class PlanPort(Protocol):
    """Where the plans of one accepted stream go."""

    def send_plan(self, plan: BatchPlan) -> None:
        """Put a plan on its way; after the stream ended it goes nowhere."""
        ...


class LinkListener(Protocol):
    """What the links tell of executors. Calls are made on the event loop and must not block."""

    def looked(self, addresses: tuple[str, ...]) -> None:
        """These executors there are at the start; `expected` follows for each."""
        ...

    def expected(self, address: str) -> None:
        """An executor is looked for from now on."""
        ...

    def held(self, address: str, holder: Holder) -> None:
        """Another scheduler that is alive drives the executor; this one stands in line."""
        ...

    def removed(self, address: str) -> None:
        """An executor is not looked for any more."""
        ...

    def syncing(self, address: str) -> None:
        """The executor accepted this scheduler; its snapshot is here, its tokenizer may not be."""
        ...

    def attached(
        self,
        model: Model,
        tokenizer: TokenizerSource,
        description: ExecutorDescription,
        snapshot: Snapshot,
        port: PlanPort,
    ) -> None:
        """An executor can be driven through `port`."""
        ...

    def finished_step(self, address: str, result: StepResult) -> None:
        """A result arrived; raises DivergenceError when it does not fit."""
        ...

    def draining(self, address: str) -> None:
        """The executor is going away in good order."""
        ...

    def detached(self, address: str, reason: str, holder: Holder | None = None) -> None:
        """The stream ended, or an attempt to open one failed: because of another scheduler, if one is given."""
        ...

    def lost(self, address: str) -> None:
        """The executor is gone as far as can be told: its requests should run elsewhere."""
        ...

    def displaced(self, active: Holder) -> None:
        """Another scheduler has taken over: everything under way here is its business now."""
        ...


class Backoff:
    """Waiting times between attempts: 10 ms, then 100 ms and half as much again each time, at most 5 s.

    Each is varied by a quarter. The first is short because an executor keeps its place for 50 ms for a holder whose
    stream has ended: then a scheduler that stands in line gets it, and this one loses all of them.
    """

    def __init__(self, jitter: Callable[[], float]) -> None:
        self._jitter = jitter
        self._next_s = FIRST_DELAY_S

    def reset(self) -> None:
        """Begin again: the last attempt succeeded."""
        self._next_s = FIRST_DELAY_S

    def next_s(self) -> float:
        """Return how long to wait now. `jitter` draws from [0, 1)."""
        wait_s = self.varied(self._next_s)
        self._next_s = min(max(self._next_s * 1.5, 0.1), 5.0)
        return wait_s

    def varied(self, seconds: float) -> float:
        """Return about so long: two schedulers in step could take executors from each other for ever."""
        return seconds * (0.75 + 0.5 * self._jitter())


class ExecutorLink:
    """Keeps one executor attached for as long as `run` runs."""

    def __init__(
        self,
        address: str,
        transport: Transport,
        identity: Identity,
        tokenizers: TokenizerShelf,
        listener: LinkListener,
        on_displaced: Callable[[Holder, bool], None],
        on_raised: Callable[[], None],
        on_left_out: Callable[[], None],
        is_behind: Callable[[], bool],
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        self.address = address
        self.is_lost = True  # until the first welcome nothing is known of it
        self.holder: Holder | None = None  # the scheduler behind which this one stands in line
        self._is_told_lost = False  # since it was last expected to answer
        self._is_ours = False
        self._accepted_s = 0.0
        self._was_short_lived = False
        self._epoch = (0, 0)  # of the last stream: incarnation and epoch
        self._transport = transport
        self._identity = identity
        self._tokenizers = tokenizers
        self._listener = listener
        self._on_displaced = on_displaced
        self._on_raised = on_raised
        self._on_left_out = on_left_out
        self._is_behind = is_behind  # another scheduler that is alive, at any executor
        self._incarnation = 0
        self._in_line_at: int | None = None  # the incarnation at which it stood in line last, unless accepted since
        self._left_alone_until_s = clock()
        self._clock = clock
        self._backoff = Backoff(jitter)
        self._connection: Connection | None = None
        self._drain_notice: Drain | None = None  # that came before the executor was ours
        self._stream: PlanStreamDriver | None = None
        self._lost_timer: asyncio.TimerHandle | None = None
        self._complaints = Complaints(address, clock)

    async def run(self) -> NoReturn:
        """Attach, and attach again whenever the stream ended, until cancelled."""
        self._start_lost_timer()
        try:
            while True:
                wait_s = await self._attempt()
                await asyncio.sleep(wait_s)
        finally:
            self._stop_lost_timer()

    @property
    def has_stream(self) -> bool:
        """Whether a plan stream is open or being opened."""
        return self._stream is not None

    @property
    def is_ours(self) -> bool:
        """Whether this scheduler drives the executor."""
        return self._is_ours

    async def has_heir(self) -> bool:
        """Whether another scheduler stands in line for the executor; False where it does not say."""
        if self._connection is not None:
            with contextlib.suppress(LinkError, DivergenceError):
                return (await self._connection.get_info(GET_INFO_TIMEOUT_S)).num_waiting_schedulers > 0
        return False

    def stand_by(self, reason: str) -> None:
        """Give up the executor and wait in line for it, since another scheduler has taken over."""
        self.is_lost, self._is_told_lost = True, False
        self._stop_lost_timer()
        self._leave_alone()
        if self._stream is not None:
            self._stream.fail(StandingByError(reason))

    def attach_anew(self) -> None:
        """Attach again at once: this scheduler's term has risen."""
        if self._stream is not None:
            self._stream.fail(TermRaisedError("attaches anew under a higher term"))

    async def _attempt(self) -> float:
        """Attach and drive until that ends; returns how long to wait before the next attempt."""
        try:
            await self._attach_and_drive()
        except TermSupersededError as error:
            self._end(str(error), error.holder)
            self._stop_lost_timer()
            self._on_displaced(error.holder, self._identity.step_down(error))
            return self._backoff.varied(REJOIN_DELAY_S)
        except TermRaisedError as error:
            self._end(str(error))
            return self._backoff.varied(RAISED_DELAY_S)
        except StandingByError as error:
            self._end(str(error))
            self._stop_lost_timer()
            return self._backoff.varied(REJOIN_DELAY_S)
        except ProtocolMismatchError as error:
            self._end(str(error))
            self._declare_lost()
            return MISMATCH_DELAY_S
        except UnreachableError as error:
            self._end(str(error))
            self._declare_lost()
        except (LinkError, DivergenceError) as error:
            self._end(str(error))
        except Exception as error:
            # A mistake of ours: the log gets all of it, and attaching again rebuilds what it may have left behind.
            log.exception("link_failed", address=self.address)
            self._end(f"internal error: {error!r}")
        wait_s = self._backoff.next_s()
        return min(wait_s, MAX_ACTING_WAIT_S) if self.is_lost and self._identity.is_acting else wait_s

    async def _attach_and_drive(self) -> NoReturn:
        connection = self._transport.connect(self.address)
        try:
            info = await connection.get_info(GET_INFO_TIMEOUT_S)
            while self._is_for_another(info):
                await asyncio.sleep(self._backoff.varied(LOOK_AGAIN_S))
                info = await connection.get_info(GET_INFO_TIMEOUT_S)
            self._incarnation = info.incarnation
            if self._identity.consider(info):
                self._on_raised()
            with self._identity.only_stream_to(info.incarnation, self.address):
                ahead = asyncio.create_task(self._fetch_ahead(info, connection))
                try:
                    await self._drive(connection)
                finally:
                    ahead.cancel()
                    await asyncio.gather(ahead, return_exceptions=True)
        finally:
            await connection.close()

    def _leave_alone(self) -> None:
        self._left_alone_until_s = self._clock() + self._backoff.varied(LEFT_ALONE_S)

    def _is_for_another(self, info: ExecutorInfo) -> bool:
        """Whether nobody drives the executor and another scheduler should: one that drives others, or was just here.

        A fence takes whoever comes first when it has just started, and its last holder at once when that comes back.
        Whoever got an executor so, with the higher claim, would take all of them from a scheduler in good health.
        """
        if self._in_line_at not in (None, info.incarnation):
            self._in_line_at = None
            self._leave_alone()
        if self._identity.is_acting or self._identity.takes_over(self.address):
            return False
        if info.holder_scheduler_id not in ("", self._identity.scheduler_id):
            return False
        return self._is_behind() or self._clock() < self._left_alone_until_s

    async def _fetch_ahead(self, info: ExecutorInfo, connection: Connection) -> None:
        """Have the tokenizer before the executor: who takes over has no time for it. The welcome tries again."""
        if info.tokenizer_digest:
            with contextlib.suppress(LinkError, DivergenceError):
                await self._tokenizers.get(info.tokenizer_digest, info.vocab_size, connection)

    async def _drive(self, connection: Connection) -> NoReturn:
        stream = connection.attach()
        try:
            self._connection, self._drain_notice = connection, None
            self._stream = PlanStreamDriver(stream, self, self._clock)
            await self._stream.run(self._identity.hello(self.address))
        finally:
            self._stream = self.holder = None
            stream.cancel()

    # What the stream says

    def waits_in_line(self, notice: WaitingInLine) -> None:
        """Another scheduler is alive and holds the executor: nothing of it is ours, whatever was."""
        if not self.is_lost:
            self._declare_lost()
        self._stop_lost_timer()
        self._is_told_lost = False
        claim = notice.holder
        self.holder = holder = Holder(claim.scheduler_id, claim.term, claim.address)
        self._in_line_at = self._incarnation
        self._backoff.reset()
        self._listener.held(self.address, holder)
        log.info("waiting_in_line", address=self.address, active_address=holder.address, term=holder.term)
        self._on_left_out()

    async def accepted(self, welcome: Welcome, snapshot: Snapshot) -> None:
        """The executor is ours once its tokenizer is here as well."""
        assert self._connection is not None, "a stream has a connection"
        assert self._stream is not None, "this is called by the stream"
        self.holder = None
        self._listener.syncing(self.address)
        tokenizer = await self._tokenizers.get(welcome.tokenizer_digest, welcome.model.vocab_size, self._connection)
        self._stop_lost_timer()  # not before: without its tokenizer it would keep all others waiting
        self._identity.is_welcome(welcome.incarnation)
        self.is_lost, self._is_told_lost, self._in_line_at = False, False, None
        self._is_ours, self._accepted_s = True, self._clock()
        description = ExecutorDescription.of(self.address, welcome)
        if not self._was_short_lived or self._has_failed_a_step(description):
            self._backoff.reset()
        self._epoch = description.incarnation, description.epoch
        self._complaints.settle()
        log.info(
            "executor_attached",
            address=self.address,
            model=welcome.model.name,
            incarnation=f"{description.incarnation:016x}",
            epoch=description.epoch,
            num_rows=len(snapshot.rows),
        )
        self._listener.attached(welcome.model, tokenizer, description, snapshot, self._stream)
        if self._drain_notice is not None:
            self._listener.draining(self.address)

    def finished_step(self, result: StepResult) -> None:
        """Pass a result on."""
        self._listener.finished_step(self.address, result)

    def going_away(self, notice: Drain) -> None:
        """Pass the executor's drain on, or keep it until the executor is ours."""
        log.info("executor_draining", address=self.address, reason=notice.reason, grace_s=notice.grace_s)
        if self._is_ours:
            self._listener.draining(self.address)
        else:
            self._drain_notice = notice

    # When it ends

    def _end(self, reason: str, holder: Holder | None = None) -> None:
        if self._is_ours:
            self._is_ours = False
            # What ends every stream at once, such as a mistake of ours, must not be tried ten times a second.
            self._was_short_lived = self._clock() - self._accepted_s < MIN_STREAM_LIFE_S
            log.warning("executor_detached", address=self.address, reason=reason)
        else:
            self._complaints.note(reason)
        self._listener.detached(self.address, reason, holder)
        if not self._is_told_lost:
            self._start_lost_timer()

    def _has_failed_a_step(self, description: ExecutorDescription) -> bool:
        """Tell whether the last stream ended because of a step that failed: its requests are to be told apart at once.

        That ends by itself: one request after another fails, and an executor with which all do ends itself.
        """
        failed = description.failed_step
        return failed is not None and (description.incarnation, failed.epoch) == self._epoch

    def _start_lost_timer(self) -> None:
        if self._lost_timer is None:
            self._lost_timer = asyncio.get_running_loop().call_later(LOST_AFTER_S, self._declare_lost)

    def _declare_lost(self) -> None:
        self._stop_lost_timer()
        self._is_told_lost = True
        if not self.is_lost:
            self.is_lost = True
            log.warning("executor_lost", address=self.address)
        self._listener.lost(self.address)
        self._on_left_out()

    def _stop_lost_timer(self) -> None:
        if self._lost_timer is not None:
            self._lost_timer.cancel()
            self._lost_timer = None

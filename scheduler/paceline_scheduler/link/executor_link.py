"""The link to one executor: dial, attach, keep attached, and say when it is lost.

Knows when to try again. What is planned, and what happens to requests, is for the listener.
"""

import asyncio
from collections.abc import Callable
from typing import NoReturn, Protocol

import structlog

from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.core.plan import BatchPlan, StepResult
from paceline_scheduler.errors import (
    DivergenceError,
    LinkError,
    ProtocolMismatchError,
    StandingByError,
    TermRaisedError,
    TermSupersededError,
    UnreachableError,
)
from paceline_scheduler.link.identity import Identity
from paceline_scheduler.link.messages import DrainNotice, ModelCard, WaitingInLine, Welcome
from paceline_scheduler.link.plan_stream import PlanStreamDriver
from paceline_scheduler.link.tokenizers import TokenizerShelf
from paceline_scheduler.link.transport import Connection, Transport

GET_INFO_TIMEOUT_S = 1.0
LOST_AFTER_S = 1.5
STANDBY_DELAY_S = 2.0
RAISED_DELAY_S = 0.02
MISMATCH_DELAY_S = 2.0  # in a rolling upgrade the executor may soon be another
MIN_STREAM_LIFE_S = 1.0
_LOG_REMINDER_S = 10.0

log = structlog.get_logger(__name__)


class PlanPort(Protocol):
    """Where the plans of one accepted stream go."""

    def send_plan(self, plan: BatchPlan) -> None:
        """Put a plan on its way; after the stream ended it goes nowhere."""
        ...


class LinkListener(Protocol):
    """What the links tell the driver. Calls are made on the event loop and must not block."""

    def looked(self, addresses: tuple[str, ...]) -> None:
        """These executors there are at the start; `expected` follows for each."""
        ...

    def expected(self, address: str) -> None:
        """An executor is looked for from now on."""
        ...

    def held(self, address: str) -> None:
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
        model: ModelCard,
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

    def detached(self, address: str, reason: str) -> None:
        """The stream ended, or an attempt to open one failed."""
        ...

    def lost(self, address: str) -> None:
        """The executor is gone as far as can be told: its requests should run elsewhere."""
        ...

    def displaced(self, reason: str) -> None:
        """Another scheduler has taken over: everything under way here is its business now."""
        ...


class Backoff:
    """Waiting times between attempts: 100 ms, half as much again each time, at most 5 s, each varied by a quarter."""

    def __init__(self, jitter: Callable[[], float]) -> None:
        self._jitter = jitter
        self._next_s = 0.1

    def reset(self) -> None:
        """Begin again: the last attempt succeeded."""
        self._next_s = 0.1

    def next_s(self) -> float:
        """Return how long to wait now. `jitter` draws from [0, 1)."""
        wait_s = self.varied(self._next_s)
        self._next_s = min(self._next_s * 1.5, 5.0)
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
        on_displaced: Callable[[str, bool], None],
        on_raised: Callable[[], None],
        on_left_out: Callable[[str], None],
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        self.address = address
        self.is_lost = True  # until the first welcome nothing is known of it
        self.is_in_line = False  # behind another scheduler, which is alive
        self._is_told_lost = False  # since it was last expected to answer
        self._is_ours = False
        self._accepted_s = 0.0
        self._was_short_lived = False
        self._transport = transport
        self._identity = identity
        self._tokenizers = tokenizers
        self._listener = listener
        self._on_displaced = on_displaced
        self._on_raised = on_raised
        self._on_left_out = on_left_out
        self._clock = clock
        self._backoff = Backoff(jitter)
        self._connection: Connection | None = None
        self._drain_notice: DrainNotice | None = None  # that came before the executor was ours
        self._stream: PlanStreamDriver | None = None
        self._lost_timer: asyncio.TimerHandle | None = None
        self._complaints = _Complaints(address, clock)

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

    def stand_by(self, reason: str) -> None:
        """Give up the executor and wait in line for it, since another scheduler has taken over."""
        self.is_lost, self._is_told_lost = True, False
        self._stop_lost_timer()
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
            self._end(str(error))
            self._stop_lost_timer()
            self._on_displaced(str(error), self._identity.step_down(error))
            self._listener.held(self.address)
            return self._backoff.varied(STANDBY_DELAY_S)
        except TermRaisedError as error:
            self._end(str(error))
            return self._backoff.varied(RAISED_DELAY_S)
        except StandingByError as error:
            self._end(str(error))
            self._stop_lost_timer()
            return self._backoff.varied(STANDBY_DELAY_S)
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
        return self._backoff.next_s()

    async def _attach_and_drive(self) -> NoReturn:
        connection = self._transport.connect(self.address)
        try:
            info = await connection.get_info(GET_INFO_TIMEOUT_S)
            if self._identity.consider(info):
                self._on_raised()
            with self._identity.only_stream_to(info.incarnation, self.address):
                await self._drive(connection)
        finally:
            await connection.close()

    async def _drive(self, connection: Connection) -> NoReturn:
        stream = connection.attach()
        try:
            self._connection, self._drain_notice = connection, None
            self._stream = PlanStreamDriver(stream, self, self._clock)
            await self._stream.run(self._identity.hello(self.address))
        finally:
            self._stream, self.is_in_line = None, False
            stream.cancel()

    # What the stream says

    def waits_in_line(self, notice: WaitingInLine) -> None:
        """Another scheduler is alive and holds the executor: nothing of it is ours, whatever was."""
        if not self.is_lost:
            self._declare_lost()
        self._stop_lost_timer()
        self._is_told_lost = False
        self._listener.held(self.address)
        log.info("waiting_in_line", address=self.address, holder=notice.holder_scheduler_id, term=notice.holder_term)
        self.is_in_line = True
        self._on_left_out(f"scheduler {notice.holder_scheduler_id} drives {self.address}")

    async def accepted(self, welcome: Welcome, snapshot: Snapshot) -> None:
        """The executor is ours once its tokenizer is here as well."""
        assert self._connection is not None, "a stream has a connection"
        assert self._stream is not None, "this is called by the stream"
        self.is_in_line = False
        self._listener.syncing(self.address)
        tokenizer = await self._tokenizers.get(welcome.tokenizer_digest, welcome.model.vocab_size, self._connection)
        self._stop_lost_timer()  # not before: without its tokenizer it would keep all others waiting
        self._identity.is_welcome(welcome.description.incarnation)
        self.is_lost, self._is_told_lost = False, False
        self._is_ours, self._accepted_s = True, self._clock()
        if not self._was_short_lived:
            self._backoff.reset()
        self._complaints.settle()
        description = welcome.description
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

    def going_away(self, notice: DrainNotice) -> None:
        """Pass the executor's drain on, or keep it until the executor is ours."""
        log.info("executor_draining", address=self.address, reason=notice.reason, grace_s=notice.grace_s)
        if self._is_ours:
            self._listener.draining(self.address)
        else:
            self._drain_notice = notice

    # When it ends

    def _end(self, reason: str) -> None:
        if self._is_ours:
            self._is_ours = False
            # What ends every stream at once, such as a mistake of ours, must not be tried ten times a second.
            self._was_short_lived = self._clock() - self._accepted_s < MIN_STREAM_LIFE_S
            log.warning("executor_detached", address=self.address, reason=reason)
        else:
            self._complaints.note(reason)
        self._listener.detached(self.address, reason)
        if not self._is_told_lost:
            self._start_lost_timer()

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
        self._on_left_out(f"{self.address} is lost, and another scheduler drives the rest")

    def _stop_lost_timer(self) -> None:
        if self._lost_timer is not None:
            self._lost_timer.cancel()
            self._lost_timer = None


class _Complaints:
    """Logs that an executor cannot be reached: at once, then now and then, so that the log stays readable."""

    def __init__(self, address: str, clock: Callable[[], float]) -> None:
        self._address = address
        self._clock = clock
        self._reason = ""
        self._num_attempts = 0
        self._logged_s = 0.0

    def note(self, reason: str) -> None:
        """An attempt or a stream ended."""
        self._num_attempts += 1
        now_s = self._clock()
        if reason != self._reason or now_s - self._logged_s >= _LOG_REMINDER_S:
            self._reason, self._logged_s = reason, now_s
            log.warning("executor_unreachable", address=self._address, reason=reason, attempts=self._num_attempts)

    def settle(self) -> None:
        """It is attached: the next failure is news."""
        self._reason, self._num_attempts = "", 0

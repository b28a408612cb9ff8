"""The link to one executor: asks who it is, opens plan streams, and passes on what they say.

Leadership decides when to dial and whether to drive, the listener what is planned.
"""

import asyncio
import contextlib
from typing import NoReturn

import structlog

from paceline.plan.values import Drain, ExecutorInfo, Hello, WaitingInLine, Welcome
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.errors import DivergenceError, LateStepError, LinkError, StreamEndedError
from paceline_scheduler.link.plan_stream import PlanStream
from paceline_scheduler.link.steward import Steward
from paceline_scheduler.link.tokenizers import TokenizerStore
from paceline_scheduler.link.transport import ExecutorConnection, Transport

GET_INFO_TIMEOUT_S = 1.0
MAX_PATIENCE = 8.0

log = structlog.get_logger(__name__)


class ExecutorLink:
    def __init__(self, address: str, transport: Transport, tokenizers: TokenizerStore, steward: Steward) -> None:
        self.address = address
        self._transport = transport
        self._tokenizers = tokenizers
        self._steward = steward
        self._connection: ExecutorConnection | None = None
        self._stream: PlanStream | None = None
        self._incarnation = 0  # of the executor that was accepted last
        self._was_late = False  # a step of it ended the last stream
        self._patience = 1.0

    async def run(self) -> NoReturn:
        """Attaches again after each end of the stream."""
        while True:
            try:
                await self._attach_and_drive()
            except (LinkError, DivergenceError) as error:
                self._was_late = isinstance(error, LateStepError)
                self._steward.ended(self.address, error)
            except Exception as error:
                # Attaching again rebuilds what a mistake of ours left behind.
                log.exception("link_failed", address=self.address)
                self._steward.ended(self.address, StreamEndedError(f"internal error: {error!r}"))
            await self._steward.until_dial(self.address)

    async def has_successor(self) -> bool:
        """Returns False where the executor does not say."""
        if self._connection is not None:
            with contextlib.suppress(LinkError, DivergenceError):
                return (await self._connection.get_info(GET_INFO_TIMEOUT_S)).num_waiting_schedulers > 0
        return False

    def end(self, error: LinkError) -> None:
        if self._stream is not None:
            self._stream.fail(error)

    async def _attach_and_drive(self) -> NoReturn:
        connection = self._transport.connect(self.address)
        try:
            info = await connection.get_info(GET_INFO_TIMEOUT_S)
            while (hello := self._steward.found(self.address, info)) is None:
                await self._steward.until_dial(self.address)
                info = await connection.get_info(GET_INFO_TIMEOUT_S)
            ahead = asyncio.create_task(self._fetch_ahead(info, connection))
            try:
                await self._drive(connection, hello)
            finally:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)
        finally:
            await connection.close()

    async def _fetch_ahead(self, info: ExecutorInfo, connection: ExecutorConnection) -> None:
        """A takeover has no time to fetch it. The welcome tries again."""
        if info.tokenizer_digest:
            with contextlib.suppress(LinkError, DivergenceError):
                await self._tokenizers.get(info.tokenizer_digest, info.vocab_size, connection)

    async def _drive(self, connection: ExecutorConnection, hello: Hello) -> NoReturn:
        calls = connection.attach()
        steps = self._steward.listener.steps_of(self.address)
        try:
            self._connection, self._stream = connection, PlanStream(calls, self, steps, self._steward.clock)
            await self._stream.run(hello)
        finally:
            self._connection = self._stream = None
            calls.cancel()

    def waits_in_line(self, notice: WaitingInLine) -> None:
        """Another scheduler is alive and holds the executor."""
        claim = notice.holder
        self._steward.in_line(self.address, claim)

    async def accepted(self, welcome: Welcome, snapshot: Snapshot) -> None:
        """All others would wait for its tokenizer."""
        assert self._connection is not None, "a stream has a connection"
        assert self._stream is not None, "this is called by the stream"
        listener, description = self._steward.listener, ExecutorDescription.of(self.address, welcome)
        self._steward.syncing(self.address, description.incarnation)
        tokenizer = await self._tokenizers.get(welcome.tokenizer_digest, welcome.model.vocab_size, self._connection)
        if self._stream.is_ending:
            return
        listener.require_alike(self.address, welcome.model, tokenizer)
        self._stream.set_patience(self._patience_with(description.incarnation))
        self._steward.welcomed(description)
        log.info(
            "executor_attached",
            address=self.address,
            model=welcome.model.name,
            incarnation=f"{description.incarnation:016x}",
            epoch=description.epoch,
            num_rows=len(snapshot.rows),
        )
        listener.attached(welcome.model, tokenizer, description, snapshot, self._stream)
        if self._steward.is_drain_due(self.address):
            listener.draining(self.address)

    def _patience_with(self, incarnation: int) -> float:
        """It answers after a step that was late, so it was slow and not stuck: next time it gets twice as long."""
        if incarnation != self._incarnation:
            self._incarnation, self._patience = incarnation, 1.0
        elif self._was_late:
            self._patience = min(2 * self._patience, MAX_PATIENCE)
        self._was_late = False
        return self._patience

    def going_away(self, notice: Drain) -> None:
        """The executor wants nothing new, now or once it is ours."""
        log.info("executor_draining", address=self.address, reason=notice.reason, grace_s=notice.grace_s)
        self._steward.drains(self.address)

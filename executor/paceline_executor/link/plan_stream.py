"""One Attach call: what it has been sent and still has to send, and how it ends.

Refuses to know other streams and who drives: `plan_streams` does.
"""

import asyncio
import contextlib
from typing import Protocol

from paceline.plan.values import BatchPlan, FromExecutor, Heartbeat, Hello, StepResult, ToExecutor
from paceline.plan.versions import GROUPING_PROTOCOL
from paceline_executor.errors import (
    AttachError,
    PlanOrderError,
    ServiceError,
    StaleEpochError,
    TooManyPlansError,
)
from paceline_executor.link.result_batcher import ResultBatcher

_MAX_OUTBOX = 64
_FLUSH_S = 1.0


class SchedulerConnection(Protocol):
    """A broken connection cancels whoever is using it."""

    async def receive(self) -> ToExecutor | None: ...

    async def send(self, message: FromExecutor, *more: StepResult) -> None: ...


class SchedulerStream:
    def __init__(
        self,
        stream_id: int,
        hello: Hello,
        protocol: int,
        transport: SchedulerConnection,
        incarnation: int,
        max_plans_in_flight: int,
    ) -> None:
        self.stream_id = stream_id
        self.hello = hello
        self.protocol = protocol
        self.epoch = 0  # 0 until the scheduler is welcome
        self.greeting: asyncio.Task[None] | None = None
        self._transport = transport
        self._incarnation = incarnation
        self._max_plans_in_flight = max_plans_in_flight
        self._num_in_flight = 0
        self._last_step_id = 0
        self._is_half_closed = False
        self._batcher = ResultBatcher()
        self._sending = asyncio.Lock()
        self._outbox: asyncio.Queue[FromExecutor | tuple[StepResult, ...]] = asyncio.Queue(_MAX_OUTBOX)
        self._end: asyncio.Future[ServiceError | None] = asyncio.get_running_loop().create_future()

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    def stop_greeting(self) -> None:
        if self.greeting is not None:
            self.greeting.cancel()

    def take(self, plan: BatchPlan) -> None:
        """Raises the error that ends the stream unless this is the next plan."""
        if self.epoch == 0:
            raise AttachError("a plan came before the snapshot was sent")
        if (plan.incarnation, plan.epoch) != (self._incarnation, self.epoch):
            sentence = f"the plan is of epoch {plan.epoch} of incarnation {plan.incarnation:#x}"
            raise StaleEpochError(f"{sentence}; this stream is epoch {self.epoch} of {self._incarnation:#x}")
        if plan.step_id != self._last_step_id + 1:
            raise PlanOrderError(f"step_id is {plan.step_id}, must be {self._last_step_id + 1}")
        if self._num_in_flight >= self._max_plans_in_flight:
            raise TooManyPlansError(f"more than {self._max_plans_in_flight} plans are unanswered")
        self._last_step_id = plan.step_id
        self._num_in_flight += 1
        self._batcher.expect(plan)

    def answer(self, done: StepResult) -> None:
        """Or holds it for the next one."""
        if not self._batcher.holds(done, together=self.protocol >= GROUPING_PROTOCOL):
            self.post(self._batcher.held())

    def post(self, message: FromExecutor | tuple[StepResult, ...]) -> None:
        """A peer that leaves too many messages unread loses its stream."""
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self.end(AttachError(f"the scheduler left more than {_MAX_OUTBOX} messages unread"))

    async def put(self, message: FromExecutor) -> None:
        """Waits for room."""
        await self._outbox.put(message)

    def post_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Unless other messages are queued. It takes held results along."""
        if results := self._batcher.held():
            self.post(results)
        if self._outbox.empty():
            self._outbox.put_nowait(heartbeat)

    def end(self, error: ServiceError | None) -> None:
        """After what is queued; the first reason given stands."""
        if results := self._batcher.held():
            self.post(results)
        if not self._end.done():
            self._end.set_result(error)

    def fail(self, error: BaseException) -> None:
        """A bug in this program is the reason."""
        if not self._end.done():
            self._end.set_exception(error)

    async def run(self, read: asyncio.Task[None]) -> None:
        """Raises the error the stream ends with. When `read` returns, plans in flight are answered, then the stream
        ends.
        """
        write = asyncio.create_task(self._write(), name="attach-write")
        for task in (read, write):
            task.add_done_callback(self._task_ended)
        try:
            error = await self._end
            with contextlib.suppress(TimeoutError):
                if not write.done():
                    await asyncio.wait_for(self._outbox.join(), _FLUSH_S)
        finally:
            # The status that ends the call would never leave behind half a message.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._sending.acquire(), _FLUSH_S)
            for task in (read, write):
                task.cancel()
        if error is not None:
            raise error

    async def _write(self) -> None:
        while True:
            message = await self._outbox.get()
            async with self._sending:
                if isinstance(message, tuple):
                    # Before the results leave: the next plan may be there before `send` returns.
                    self._num_in_flight -= len(message)
                    await self._transport.send(*message)
                else:
                    await self._transport.send(message)
            self._outbox.task_done()
            if self._is_half_closed and self._num_in_flight == 0:
                self.end(None)

    def _half_close(self) -> None:
        """The scheduler sends no more: answer what is in flight, then end in good order."""
        self._is_half_closed = True
        if self._num_in_flight == 0:
            self.end(None)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._half_close()
        elif isinstance(error, ServiceError):
            self.end(error)
        else:
            self.fail(error)

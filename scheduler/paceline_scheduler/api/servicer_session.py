"""One Session call: requests in, the output of all of them out, at most one message per step.

What the client does, and what follows:
- it ends its side of the stream: no more requests; the stream ends when the running ones have.
- it cancels the call, or its connection breaks: its running requests are detached if resumable, else cancelled.
- it sends a wrong request, or cancels an impossible name: a failure inside the stream, which goes on.
- it sends an unknown message: INVALID_ARGUMENT, and the stream ends as in the second case.
- it leaves output unread: its messages are not read either, until it reads; if requests go on producing, they are cut.
- it has sent a heartbeat and then says nothing for `EdgeLimits.silence_s`, though it is listened to: the stream ends as
  in the second case. Of one that never sends any only the transport, which asks every 10 s, decides that it is gone.
"""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import structlog

from paceline.plan.values import RecordId
from paceline.process.callers import Caller
from paceline.process.trace_ids import trace_fields
from paceline.v1 import inference_pb2 as pb
from paceline_scheduler.api import status, wire
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.outbox import Outbox
from paceline_scheduler.api.servicer_access import tenant_of
from paceline_scheduler.api.stream import RequestStream
from paceline_scheduler.core.events import Acknowledge
from paceline_scheduler.errors import (
    InvalidRequestError,
    NoExecutorError,
    PermissionDeniedError,
    RequestRefusedError,
    SchedulerError,
    UnknownRequestError,
)

_ACKNOWLEDGED_AT_ONCE = 4096
# Acknowledgements name requests without their tenant. A finish that stays unacknowledged for so many later requests
# costs some seconds of memory.
_MAX_REMEMBERED = 16_384

_log = structlog.get_logger(__name__)


async def serve_session(
    edge: Edge, messages: AsyncIterator[pb.SessionRequest], by: Caller
) -> AsyncIterator[pb.SessionResponse]:
    """Its tasks and requests end with it."""
    outbox = edge.open_outbox(edge.limits.max_bytes_per_session_request)
    session = _Session(edge, outbox, by)
    reader = session.spawn(session.read(messages))
    reader.add_done_callback(lambda _: outbox.wake())
    session.spawn(session.beat())
    try:
        while True:
            await outbox.wait()
            content = outbox.collect(edge.limits.max_message_bytes)
            if not content.is_empty:
                yield wire.session_response(content, edge.draw)
            if session.is_lost:
                return
            if reader.done() and not reader.cancelled() and (error := reader.exception()) is not None:
                raise error
            if (reader.done() or outbox.is_draining) and outbox.is_empty and not outbox.num_open:
                return
    finally:
        edge.close_outbox(outbox)
        await session.stop()


class _Session:
    def __init__(self, edge: Edge, outbox: Outbox, by: Caller) -> None:
        self._edge = edge
        self._by = by
        self._outbox = outbox
        self._tasks: dict[asyncio.Task[None], None] = {}  # at most one per open request, and two; oldest first
        self._has_beaten = False
        self._is_listening = False  # no message is being worked on
        self._num_silent_beats = 0
        self.is_lost = False
        self._unacknowledged: OrderedDict[str, tuple[RecordId, ...]] = OrderedDict()  # by request_id, per completion

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled():
            # asyncio would report as forgotten why the reader stopped.
            task.exception()

    async def stop(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def beat(self) -> None:
        limits = self._edge.limits
        # Counts our own heartbeats: a process that was stopped made none, and blames nobody.
        max_silent_beats = limits.silence_s / limits.heartbeat_s
        while self._num_silent_beats < max_silent_beats:
            self._outbox.beat()
            await asyncio.sleep(limits.heartbeat_s)
            if self._has_beaten and self._is_listening:
                self._num_silent_beats += 1
        _log.info("session_silent", silence_s=limits.silence_s)
        self.is_lost = True
        self._edge.leave_outbox(self._outbox)  # the stream itself may be stuck in a message nobody takes
        self._outbox.wake()

    async def read(self, messages: AsyncIterator[pb.SessionRequest]) -> None:
        """Raises InvalidRequestError for an unknown message."""
        self._is_listening = True
        async for message in messages:
            self._is_listening, self._num_silent_beats = False, 0
            match message.WhichOneof("message"):
                case "generate":
                    self._generate(message.generate)
                case "cancel":
                    self._cancel(message.cancel)
                case "acknowledge":
                    await self._acknowledge(message.acknowledge)
                case "heartbeat":
                    self._has_beaten = True
                case _:
                    raise InvalidRequestError(
                        "message", "is missing: set one of generate, cancel, acknowledge, heartbeat"
                    )
            await self._outbox.wait_for_room()
            self._is_listening = True
        self._is_listening = False

    def _generate(self, message: pb.GenerateRequest) -> None:
        try:
            stream = self._edge.open(message, self._outbox, self._by)
        except RequestRefusedError as error:
            self._fail(message.request_id, error)
            return
        self._unacknowledged[message.request_id] = stream.completion_keys()
        while len(self._unacknowledged) > _MAX_REMEMBERED:
            self._unacknowledged.popitem(last=False)
        self.spawn(self._start(stream))

    async def _start(self, stream: RequestStream) -> None:
        try:
            await self._edge.start(stream)
            return
        except SchedulerError as error:
            self._fail(stream.key.request_id, error)
        except Exception as error:  # told to the client without its text
            key, trace = stream.key, trace_fields(stream.request.trace_parent)
            _log.exception("request_failed", request_id=key.request_id, tenant=key.tenant, **trace)
            self._fail(key.request_id, error)
        self._unacknowledged.pop(stream.key.request_id, None)  # another request of this name may follow

    def _cancel(self, message: pb.CancelRequest) -> None:
        # A request of the same name may follow at once. Others may take seconds to find.
        try:
            key = RecordId(tenant_of(message.tenant, self._by), message.request_id)
            if not self._edge.cancel_here(key):
                self.spawn(self._cancel_elsewhere(key))
        except (InvalidRequestError, PermissionDeniedError) as error:
            self._fail(message.request_id, error)

    async def _cancel_elsewhere(self, key: RecordId) -> None:
        try:
            await self._edge.cancel_elsewhere(key)
        except (UnknownRequestError, NoExecutorError):
            # It has just ended by itself, or ends with its window.
            _log.debug("cancelled_unknown_request", request_id=key.request_id, tenant=key.tenant)

    async def _acknowledge(self, message: pb.Acknowledge) -> None:
        request_ids = message.request_ids
        for start in range(0, len(request_ids), _ACKNOWLEDGED_AT_ONCE):
            part = request_ids[start : start + _ACKNOWLEDGED_AT_ONCE]
            known = [self._unacknowledged.pop(request_id, ()) for request_id in part]
            self._edge.backend.feed(Acknowledge(tuple(itertools.chain.from_iterable(known))))
            await asyncio.sleep(0)  # others wait meanwhile

    def _fail(self, request_id: str, error: Exception) -> None:
        # A cut name is still longer than any running request's.
        self._outbox.fail(status.cut(request_id), error)

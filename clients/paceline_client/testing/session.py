"""One open session of the fake server: what its requests have to say, in one queue, until it ends or is cut."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from paceline.v1 import inference_pb2 as pb
from paceline_client.testing.messages import request_error
from paceline_client.testing.played import PlayedRequest, RefusedError
from paceline_client.testing.script import Break, Fail


class Server(Protocol):
    """What a session needs of its server."""

    def heard(self, message: pb.SessionRequest) -> None:
        """Note what a client has sent."""

    def begin(self, request: pb.GenerateRequest, session: "FakeSession") -> PlayedRequest:
        """Start a request, or attach the session to one that plays. `RefusedError`."""

    def cancel(self, tenant: str, request_id: str) -> bool:
        """End a request; False when none of this name plays."""

    def acknowledge(self, request_id: str) -> None:
        """Forget a request that has ended."""


class FakeSession:
    """A `played.Listener`. `max_deltas` cuts it before it says more; `None` never does."""

    def __init__(
        self, server: Server, incoming: AsyncIterator[pb.SessionRequest], max_deltas: int | None = None
    ) -> None:
        self.broken: Break | None = None
        self._server = server
        self._outgoing: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        self._attached: dict[str, PlayedRequest] = {}
        self._num_deltas_left = max_deltas
        self._takes_no_more = False
        self._is_over = False
        self._listener = asyncio.create_task(self._listen(incoming))

    async def next_response(self, heartbeat_seconds: float | None) -> pb.SessionResponse | None:
        """A heartbeat where nothing waits; None at the end of the session."""
        if self._is_over:
            return None
        try:
            async with asyncio.timeout(heartbeat_seconds):
                item = await self._outgoing.get()
        except TimeoutError:
            return pb.SessionResponse(heartbeat=pb.Heartbeat())
        response = pb.SessionResponse()
        while item is not None and not self._is_cut_before(item):
            response.MergeFrom(item)
            if self._outgoing.empty():
                return response
            item = self._outgoing.get_nowait()
        self._is_over = True
        return response if response.ByteSize() else None

    def _is_cut_before(self, item: pb.SessionResponse) -> bool:
        if not item.deltas or self._num_deltas_left is None:
            return False
        self._num_deltas_left -= 1
        if self._num_deltas_left >= 0:
            return False
        self.broken = Break()
        return True

    def close(self) -> None:
        """What is resumable plays on, the rest ends."""
        self._listener.cancel()
        for request in self._attached.values():
            if request.listener is self:
                request.listener = None
                if not request.is_resumable:
                    request.cancel()

    # A `played.Listener`

    def tell(self, request_id: str, delta: pb.Delta) -> None:
        self._outgoing.put_nowait(pb.SessionResponse(deltas=[pb.SessionDelta(request_id=request_id, delta=delta)]))
        self._end_if_done()

    def fail(self, request_id: str, failure: Fail) -> None:
        self._attached.pop(request_id, None)
        item = pb.SessionFailure(request_id=request_id, error=request_error(failure))
        self._outgoing.put_nowait(pb.SessionResponse(failures=[item]))
        self._end_if_done()

    def drain(self, reason: str) -> None:
        self._takes_no_more = True
        self._outgoing.put_nowait(pb.SessionResponse(drain=pb.Drain(reason=reason)))

    def break_off(self, step: Break) -> None:
        self.broken = step
        self._outgoing.put_nowait(None)

    # What arrives

    async def _listen(self, incoming: AsyncIterator[pb.SessionRequest]) -> None:
        async for message in incoming:
            self._server.heard(message)
            match message.WhichOneof("message"):
                case "generate":
                    self._begin(message.generate)
                case "cancel":
                    self._server.cancel(message.cancel.tenant, message.cancel.request_id)
                case "acknowledge":
                    for request_id in message.acknowledge.request_ids:
                        self._server.acknowledge(request_id)
        self._takes_no_more = True
        self._end_if_done()

    def _begin(self, request: pb.GenerateRequest) -> None:
        if self._takes_no_more:
            # As a server that goes away does, after saying so.
            self.fail(request.request_id, Fail(grpc.StatusCode.UNAVAILABLE, "the server is going away", "DRAINING"))
            return
        try:
            self._attached[request.request_id] = self._server.begin(request, self)
        except RefusedError as refusal:
            self.fail(request.request_id, refusal.failure)

    def _end_if_done(self) -> None:
        running = [request for request in self._attached.values() if not request.is_over]
        if self._takes_no_more and not running:
            self._outgoing.put_nowait(None)

"""One call of a client at the edge, without gRPC."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime

from edge_rig.scripted_backend import ScriptedBackend
from edge_rig.tokenizers import try_here
from paceline.process.callers import ANYBODY
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.outbox import MessageContent, PendingDelta
from paceline_scheduler.api.text.texts import Texts
from paceline_scheduler.backend import ServedModel

_EVERYTHING = 1 << 30


@asynccontextmanager
async def scripted_edge(model: ServedModel, limits: EdgeLimits) -> AsyncIterator[Edge]:
    """A scripted backend serves one model."""
    backend = ScriptedBackend(model)
    edge = Edge(backend, backend, Texts(limits, datetime.now, trial=try_here), limits)
    backend.sink = edge.delivery
    yield edge
    await edge.texts.close()


class EdgeClient:
    def __init__(self, edge: Edge, max_bytes_per_request: int = 0) -> None:
        self._edge = edge
        self.outbox = edge.open_outbox(max_bytes_per_request)

    async def send(self, request: GenerateRequest) -> tuple[int, ...]:
        """Returns the handles of its completions."""
        stream = self._edge.open(request, self.outbox, ANYBODY)
        await self._edge.start(stream)
        return stream.handles

    def leave(self) -> None:
        self._edge.close_outbox(self.outbox)

    def collect(self) -> MessageContent:
        return self.outbox.collect(_EVERYTHING)

    def delta(self) -> PendingDelta:
        (delta,) = self.collect().deltas
        return delta

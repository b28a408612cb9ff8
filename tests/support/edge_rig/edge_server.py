"""The edge behind real gRPC on loopback, with a scripted backend: for tests of clients and of the services."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

import grpc.aio

from edge_rig.scripted_backend import ScriptedBackend
from edge_rig.tokenizers import try_here
from paceline.process.metrics import Meter
from paceline.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server
from paceline.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.servicer_access import Access
from paceline_scheduler.api.servicer_admin import AdminServicer, Observed
from paceline_scheduler.api.servicer_guard import SERVER_OPTIONS, Guard
from paceline_scheduler.api.servicer_inference import InferenceServicer
from paceline_scheduler.api.text.texts import Texts
from paceline_scheduler.backend import PlanRecording
from paceline_scheduler.observers.definitions import COUNTED

# For clients that read nothing: streams that share a connection share its flow control, and small windows are soon
# filled.
SLOW_CHANNEL = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.lookahead_bytes", 64 * 1024),
    ("grpc.http2.bdp_probe", 0),
)
NOON = datetime(2026, 11, 21, 12, 0)  # noqa: DTZ001 (templates are told the local time)


@dataclass(frozen=True, slots=True)
class EdgeServer:
    """Both services listen at `address`."""

    address: str
    edge: Edge
    backend: ScriptedBackend


async def wait_until(condition: Callable[[], object], max_seconds: float = 10) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(max_seconds):
        while not condition():  # noqa: ASYNC110 (a condition of any kind has no event)
            await asyncio.sleep(0.005)


@asynccontextmanager
async def serve_edge(
    backend: ScriptedBackend,
    limits: EdgeLimits | None = None,
    access: Access | None = None,
    meter: Meter | None = None,
    recording: PlanRecording | None = None,
) -> AsyncIterator[EdgeServer]:
    """The block's end cancels what still runs."""
    limits = limits or EdgeLimits()
    texts = Texts(limits, lambda: NOON, trial=try_here)
    edge = Edge(backend, backend, texts, limits)
    backend.sink = edge.delivery
    server = grpc.aio.server(interceptors=[Guard(access)], options=SERVER_OPTIONS)
    add_InferenceServiceServicer_to_server(InferenceServicer(edge), server)
    observed = Observed(backend.watch, meter or Meter(COUNTED), lambda: 0, recording)
    admin = AdminServicer(backend, backend, "scheduler-1", observed)
    add_AdminServiceServicer_to_server(admin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield EdgeServer(f"127.0.0.1:{port}", edge, backend)
    finally:
        await server.stop(0)
        await texts.close()

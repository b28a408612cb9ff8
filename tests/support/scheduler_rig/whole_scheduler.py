"""A whole scheduler inside this process, over real sockets both ways."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

import grpc.aio

from edge_rig.tokenizers import try_here
from paceline.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.servicer_guard import SERVER_OPTIONS, Guard
from paceline_scheduler.api.servicer_inference import InferenceServicer
from paceline_scheduler.api.text.texts import Texts
from paceline_scheduler.link.executors import LinkedExecutors
from paceline_scheduler.link.transport_grpc import GrpcTransport
from paceline_scheduler.runtime import Runtime
from scheduler_rig.rig import SchedulerRig


@dataclass(frozen=True, slots=True)
class WholeScheduler:
    """Clients find it at `address`."""

    address: str
    edge: Edge
    runtime: Runtime
    executors: LinkedExecutors


@asynccontextmanager
async def serve_scheduler(executors: str, limits: EdgeLimits | None = None) -> AsyncIterator[WholeScheduler]:
    """Yields when an executor is attached."""
    limits = limits or EdgeLimits()
    rig = SchedulerRig(executors, GrpcTransport())
    texts = Texts(limits, datetime.now, trial=try_here)
    edge = Edge(rig.runtime, rig.executors, texts, limits)
    rig.runtime.deliver_to(edge.delivery)
    server = grpc.aio.server(interceptors=[Guard()], options=SERVER_OPTIONS)
    add_InferenceServiceServicer_to_server(InferenceServicer(edge), server)
    port = server.add_insecure_port("127.0.0.1:0")
    async with rig:
        await rig.until_ready()
        await server.start()
        try:
            yield WholeScheduler(f"127.0.0.1:{port}", edge, rig.runtime, rig.executors)
        finally:
            await server.stop(0)
            await texts.close()

"""grpc.health.v1: "" is live while the process is, a service's full name is ready or not.

Written out because the servicer that comes with grpcio-health-checking stops telling the watchers of a service
anything once one of them has gone. Watch stays open until its caller leaves or the server stops.
"""

import asyncio
from enum import IntEnum
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_Context = grpc.aio.ServicerContext[Any, Any]


class HealthStatus(IntEnum):
    """Statuses by the protocol's numbers."""

    SERVING = health_pb2.HealthCheckResponse.SERVING
    NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
    SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it comes without types
    """Statuses by service name, and those who watch them."""

    def __init__(self, *services: str) -> None:
        self._statuses = {"": HealthStatus.SERVING} | dict.fromkeys(services, HealthStatus.NOT_SERVING)
        self._changed = asyncio.Event()

    def set(self, service: str, status: HealthStatus) -> None:
        """Change a status and tell its watchers."""
        if self._statuses[service] is not status:
            self._statuses[service] = status
            self._wake_watchers()

    def stop(self) -> None:
        """Say that nothing is served any more: the process is about to end."""
        self._statuses = dict.fromkeys(self._statuses, HealthStatus.NOT_SERVING)
        self._wake_watchers()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> health_pb2.HealthCheckResponse:  # noqa: N802
        """Return the status of a service; NOT_FOUND for one that is not here."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service on this port")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:  # noqa: N802
        """Send the status of a service now and at every change."""
        last: HealthStatus | None = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, HealthStatus.SERVICE_UNKNOWN)
            if status is not last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            await changed.wait()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Let a server answer for the health service."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def _wake_watchers(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

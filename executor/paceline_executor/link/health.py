"""grpc.health.v1 over grpc.aio: "" is live while the process is, a service's full name is ready or not.

Written out because the servicer that comes with grpcio-health-checking stops telling the watchers of a service
anything once one of them has gone. Watch stays open until its caller leaves or the server stops.
"""

import asyncio
import enum

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class Status(enum.IntEnum):
    """Statuses by the protocol's numbers."""

    SERVING = health_pb2.HealthCheckResponse.SERVING
    NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
    SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it comes without types
    """Statuses by service name, and those who watch them."""

    def __init__(self, service: str) -> None:
        self._status: dict[str, Status] = {"": Status.SERVING, service: Status.NOT_SERVING}
        self._service = service
        self._changed = asyncio.Event()

    def set_ready(self, status: Status) -> None:
        """Say whether the service can be used now."""
        if self._status[self._service] != status:
            self._status[self._service] = status
            self._wake_watchers()

    def stop(self) -> None:
        """The process is about to end: nothing is served any more."""
        for service in self._status:
            self._status[service] = Status.NOT_SERVING
        self._wake_watchers()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> health_pb2.HealthCheckResponse:  # noqa: N802
        """The status of a service; NOT_FOUND for one that is not here."""
        if request.service not in self._status:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service on this port")
        return health_pb2.HealthCheckResponse(status=self._status[request.service])

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:  # noqa: N802
        """The status of a service now and at every change."""
        last: Status | None = None
        while True:
            changed = self._changed
            status = self._status.get(request.service, Status.SERVICE_UNKNOWN)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            await changed.wait()

    def _wake_watchers(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def register(health: Health, server: grpc.aio.Server) -> None:
    """Let a server answer for the health service."""
    health_pb2_grpc.add_HealthServicer_to_server(health, server)

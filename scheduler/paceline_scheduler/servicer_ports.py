"""The scheduler's three gRPC servers: for clients, for operators, and one that only answers health checks.

Knows ports and which service answers on which. What the services do is theirs.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection

from paceline.v1 import admin_pb2, inference_pb2
from paceline.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from paceline.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from paceline_scheduler.api.servicer_guard import SERVER_OPTIONS, Guard
from paceline_scheduler.config import Config
from paceline_scheduler.errors import PortError
from paceline_scheduler.servicer_health import SERVICE_NAME as HEALTH_SERVICE
from paceline_scheduler.servicer_health import HealthServicer, HealthStatus

INFERENCE_SERVICE: str = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
ADMIN_SERVICE: str = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
_GOODBYE_S = 0.5


@dataclass(frozen=True, slots=True)
class Ports:
    """The numbers of the ports that listen."""

    port: int
    admin_port: int
    health_port: int


class SchedulerPorts:
    """Listens, and stops listening. Health is shared by all three."""

    def __init__(self, inference: InferenceServiceServicer, admin: AdminServiceServicer) -> None:
        self._inference = inference
        self._admin = admin
        self._health = HealthServicer(INFERENCE_SERVICE)
        self._servers: list[grpc.aio.Server] = []

    def set_ready(self, is_ready: bool) -> None:
        """Say whether a new request would be served now."""
        self._health.set(INFERENCE_SERVICE, HealthStatus.SERVING if is_ready else HealthStatus.NOT_SERVING)

    async def listen(self, config: Config) -> Ports:
        """Bind all ports, then answer on them. Raises PortError, and then none is left open."""
        clients, operators, probes = (self._server() for _ in range(3))
        add_InferenceServiceServicer_to_server(self._inference, clients)
        add_AdminServiceServicer_to_server(self._admin, operators)
        _reflect(clients, INFERENCE_SERVICE)
        _reflect(operators, ADMIN_SERVICE)
        ports = Ports(
            port=_bind(clients, config.host, config.port, "--port"),
            admin_port=_bind(operators, config.admin_host, config.admin_port, "--admin-port"),
            health_port=_bind(probes, config.host, config.health_port, "--health-port"),
        )
        for server in self._servers:
            await server.start()
        return ports

    async def stop(self) -> None:
        """Close the ports. Calls that are still open get a moment to end, then are cut."""
        await asyncio.gather(*(server.stop(_GOODBYE_S) for server in self._servers))

    def _server(self) -> grpc.aio.Server:
        server = grpc.aio.server(interceptors=(Guard(),), options=SERVER_OPTIONS)
        self._health.add_to(server)
        self._servers.append(server)
        return server


def _reflect(server: grpc.aio.Server, service: str) -> None:
    services: Sequence[str] = (service, HEALTH_SERVICE, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(services, server)


def _bind(server: grpc.aio.Server, host: str, port: int, option: str) -> int:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError:
        bound = 0
    if bound == 0:
        sentence = f"cannot listen on {address}: the port is in use or the address is not this machine's"
        raise PortError(f"{sentence}; choose another with {option}")
    return bound

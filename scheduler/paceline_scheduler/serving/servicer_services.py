"""Which service answers on which of the scheduler's ports. What the services do is theirs."""

from typing import Any, cast

import grpc.aio
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from paceline.process.health import SERVICE_NAME as HEALTH_SERVICE
from paceline.process.health import HealthServicer, HealthStatus
from paceline.v1 import admin_pb2, inference_pb2
from paceline.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from paceline.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from paceline_scheduler.serving.servicer_ports import LateServices, SchedulerServers

INFERENCE_SERVICE: str = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
ADMIN_SERVICE: str = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name


class Services:
    """Also their health, which all ports share."""

    def __init__(
        self, ports: SchedulerServers, inference: InferenceServiceServicer, admin: AdminServiceServicer
    ) -> None:
        self._health = HealthServicer(INFERENCE_SERVICE)
        for port in (ports.clients, ports.operators, ports.probes):
            self._health.add_to(_as_server(port))
        add_InferenceServiceServicer_to_server(inference, _as_server(ports.clients))
        add_AdminServiceServicer_to_server(admin, _as_server(ports.operators))
        _reflect(ports.clients, INFERENCE_SERVICE)
        _reflect(ports.operators, ADMIN_SERVICE)
        ports.services_are_named()

    def set_ready(self, is_ready: bool) -> None:
        """Whether a new request would be served now."""
        self._health.set(INFERENCE_SERVICE, HealthStatus.SERVING if is_ready else HealthStatus.NOT_SERVING)


def _reflect(port: LateServices, service: str) -> None:
    names = (service, HEALTH_SERVICE, reflection.SERVICE_NAME)
    servicer: Any = reflection.aio.ReflectionServicer(names)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, _as_server(port))


def _as_server(port: LateServices) -> grpc.aio.Server:
    """Generated code uses what the port has."""
    return cast("grpc.aio.Server", port)

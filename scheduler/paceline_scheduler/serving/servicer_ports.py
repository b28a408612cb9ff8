"""The scheduler's three gRPC servers: for clients, for operators, and one that only answers health checks.

Refuses to know what answers on them: that is imported while clients connect already. They would find nobody otherwise,
and pause before they try again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import grpc.aio

from paceline.process import ports
from paceline.process.callers import server_credentials
from paceline_scheduler.access.tenant_limits import TenantBounds
from paceline_scheduler.access.tokens import TokenFile
from paceline_scheduler.api.call_spans import CallSpans
from paceline_scheduler.api.servicer_access import Access
from paceline_scheduler.api.servicer_guard import SERVER_OPTIONS, Guard
from paceline_scheduler.config import Config
from paceline_scheduler.errors import SchedulerError

_GOODBYE_S = 0.5

# Generic in its types only.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@dataclass(frozen=True, slots=True)
class Ports:
    port: int
    admin_port: int
    health_port: int


class _UntilNamed(grpc.aio.ServerInterceptor):
    """Holds calls until it is known what answers them."""

    def __init__(self, named: asyncio.Event) -> None:
        self._named = named

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        if not self._named.is_set():
            await self._named.wait()
        return await continuation(handler_call_details)


class LateServices(grpc.GenericRpcHandler):
    """To generated code it looks like a server.

    gRPC wants to know all handlers before a server starts; this one it knows then.
    """

    def __init__(self) -> None:
        self._handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, _Handler]) -> None:
        """An optimisation of synchronous servers."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "_Handler | None":
        found = (handler.service(handler_call_details) for handler in self._handlers)
        return next((handler for handler in found if handler is not None), None)


class SchedulerServers:
    """Calls are held until their services are named. Raises TokenFileError.

    With tokens, clients show one; without, a certificate, if there is TLS. Operators show a certificate wherever there
    is TLS, and are operators by that or by a token.
    """

    def __init__(self, config: Config) -> None:
        self.clients, self.operators, self.probes = LateServices(), LateServices(), LateServices()
        self._config = config
        self.tokens = None if config.tokens is None else TokenFile(config.tokens)
        self.bounds: Callable[[], TenantBounds] = TenantBounds  # in force; whoever knows them says so
        self.calls = CallSpans()
        self.on_refusal: Callable[[SchedulerError], None] = lambda _: None  # of unread requests
        self._named = asyncio.Event()
        has_tls = config.tls_dir is not None
        self._servers = [
            grpc.aio.server(
                handlers=(one,),
                interceptors=(Guard(access, self.calls), _UntilNamed(self._named)),
                options=SERVER_OPTIONS,
            )
            for one, access in (
                (self.clients, self._access(asks_certificates=has_tls and self.tokens is None)),
                (self.operators, self._access(asks_certificates=has_tls)),
                (self.probes, Access()),
            )
        ]
        self.numbers = Ports(0, 0, 0)

    async def listen(self) -> None:
        """Raises PortError, and then leaves none open."""
        config = self._config
        clients, operators, probes = self._servers
        of_clients = of_operators = None
        if config.tls_dir is not None:
            of_clients = server_credentials(config.tls_dir, asks_callers=self.tokens is None)
            of_operators = server_credentials(config.tls_dir, asks_callers=True)
        self.numbers = Ports(
            port=ports.bind(clients, config.host, config.port, of_clients, "--port"),
            admin_port=ports.bind(operators, config.admin_host, config.admin_port, of_operators, "--admin-port"),
            health_port=ports.bind(probes, config.host, config.health_port, option="--health-port"),
        )
        for server in (probes, operators, clients):  # clients last: then hardly a call is held
            await server.start()

    def _access(self, *, asks_certificates: bool) -> Access:
        if self.tokens is None:
            return Access(has_certificates=asks_certificates, on_refusal=lambda error: self.on_refusal(error))
        access = Access(
            self.tokens.find,
            has_certificates=asks_certificates,
            max_num_streams=lambda tenant: self.bounds().of(tenant).max_num_streams,
            on_refusal=lambda error: self.on_refusal(error),
        )
        self.tokens.on_change(access.revoke)
        return access

    def services_are_named(self) -> None:
        self._named.set()

    async def stop(self) -> None:
        """Open calls get a moment to end, then are cut."""
        await asyncio.gather(*(server.stop(_GOODBYE_S) for server in self._servers))

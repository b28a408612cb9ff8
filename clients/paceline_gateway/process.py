"""The running gateway: its parts put together, served until a signal says to stop, then drained."""

import asyncio
import logging
import os
import ssl
from collections.abc import Iterable

import structlog
import uvicorn
from uvicorn.server import ServerState

from paceline.process.metrics import Meter, Reading
from paceline.process.metrics_port import MetricsPort
from paceline.process.ports import PortError
from paceline.process.signals import follow_signals
from paceline.process.tls_folder import TlsFolder
from paceline_client import AsyncClient, Limits, Retry, Tls
from paceline_gateway.admin_port import AdminPort
from paceline_gateway.app import ShortCalls, make_app
from paceline_gateway.clients import Clients
from paceline_gateway.config import Config
from paceline_gateway.connection import REQUEST_S, HttpConnection
from paceline_gateway.generation import Generation
from paceline_gateway.metrics import CLIENTS, CONNECTIONS, COUNTED, REQUESTS

_KEEP_ALIVE_S = 75  # longer than load balancers keep theirs
_BACKLOG = 2048
_LEAVE_S = 2.0  # in which whoever asks /ready notices, and sends requests elsewhere
_LAST_BYTES_S = 1.0
# Of one bearer. A reader that leaves more unread loses its stream.
_LIMITS = Limits(max_concurrent_requests=1024, max_buffered_tokens=2048)

_log = structlog.get_logger(__name__)


class Gateway:
    """`listen`, then `drain`. Used in an `async with` block."""

    def __init__(self, config: Config, *, request_s: float = REQUEST_S) -> None:
        self._config = config
        self._request_s = request_s
        self._state = ServerState()
        self._meter = Meter(COUNTED)
        self._is_draining = False
        self._clients = Clients(self._connect)
        self._admin = AdminPort(config.target, config.admin_target, self._tls())
        self._short_calls = ShortCalls(self._clients, self._admin, lambda: self._is_draining)
        self._app = make_app(Generation(self._clients), self._short_calls, self._meter, config.cors_origins)
        self._metrics = MetricsPort(self._read)
        self._server: asyncio.Server | None = None
        self._tidying: asyncio.Task[None] | None = None
        self.port = config.port
        """The one that is listened on."""
        self.metrics_port = config.metrics_port

    async def __aenter__(self) -> "Gateway":
        """Listen. Raises PortError, and InvalidRequestError for the target."""
        config = self._config
        await self._connect(None).close()
        http = uvicorn.Config(
            self._app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        http.load()
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings are about what clients send
        tls = None if config.tls_dir is None else _server_context(config.tls_dir)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: HttpConnection(http, self._state, {}, self._request_s),
                config.host,
                config.port,
                ssl=tls,
                backlog=_BACKLOG,
                ssl_handshake_timeout=None if tls is None else 10.0,
            )
        except OSError as error:
            raise PortError(config.host, config.port, error.strerror or str(error), "--port") from error
        self.port = self._server.sockets[0].getsockname()[1]
        self.metrics_port = await self._metrics.listen(config.host, config.metrics_port)
        self._tidying = asyncio.create_task(self._clients.tidy(), name="clients")
        return self

    async def __aexit__(self, *_: object) -> None:
        """End what still runs."""
        assert self._server is not None and self._tidying is not None, "it was entered"  # noqa: PT018
        self._server.close()
        self._metrics.close()
        self._tidying.cancel()
        await self._clients.close()  # fails what runs, which tells it
        await self._admin.close()
        await self._until_idle(_LAST_BYTES_S)
        for connection in list(self._state.connections):
            connection.transport.abort()

    async def drain(self, timeout_s: float, hurrying: asyncio.Event) -> bool:
        """Whether all requests were finished."""
        assert self._server is not None, "it was entered"
        self._is_draining = True
        hurried = asyncio.create_task(hurrying.wait())
        if self._short_calls.was_asked_ready:
            await asyncio.wait([hurried], timeout=_LEAVE_S)
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        finished = asyncio.create_task(self._until_idle(timeout_s))
        await asyncio.wait([finished, hurried], return_when=asyncio.FIRST_COMPLETED)
        finished.cancel()
        hurried.cancel()
        return not self._state.tasks

    async def _until_idle(self, timeout_s: float) -> None:
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=timeout_s)

    def _connect(self, bearer: str | None) -> AsyncClient:
        """Refusals are the HTTP client's to retry; what runs is resumed here."""
        retry = Retry(max_attempts=1)
        return AsyncClient(self._config.target, tls=self._tls(), token=bearer, retry=retry, limits=_LIMITS)

    def _tls(self) -> Tls | None:
        return None if self._config.tls_dir is None else Tls(folder=self._config.tls_dir.path)

    def _read(self) -> Iterable[Reading]:
        now = {CONNECTIONS: len(self._state.connections), REQUESTS: len(self._state.tasks), CLIENTS: len(self._clients)}
        return [*self._meter.read(), *(Reading(definition, {(): value}) for definition, value in now.items())]


async def run(config: Config) -> bool:
    """Until a signal says to stop; returns whether all requests were finished then."""
    hurrying = asyncio.Event()
    stopping = follow_signals(again=lambda _: hurrying.set())
    async with Gateway(config) as gateway:
        _log.info(
            "listening", pid=os.getpid(), host=config.host, port=gateway.port, metrics_port=gateway.metrics_port,
            target=config.target,
        )  # fmt: skip
        _log.info("ready", port=gateway.port)
        await stopping.wait()
        _log.info("draining", shutdown_timeout_s=config.shutdown_timeout_s)
        is_finished = await gateway.drain(config.shutdown_timeout_s, hurrying)
    _log.info("stopped")
    return is_finished


def _server_context(folder: TlsFolder) -> ssl.SSLContext:
    """Each handshake has what the files hold then. Clients show no certificate."""

    def context() -> ssl.SSLContext:
        return folder.certificates().https_context()

    def follow(connection: ssl.SSLObject, _name: str | None, _first: ssl.SSLContext) -> None:
        connection.context = context()

    first = context()
    first.sni_callback = follow
    return first

"""One executor as a service: its two ports, its step thread, and its life from binding to the last goodbye.

Refuses to know command lines, signals and models: loading is a function it is given.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

import grpc
import structlog
from grpc_reflection.v1alpha import reflection

from paceline.plan.values import Drain
from paceline.plan.versions import PROTOCOLS, ProtocolRange
from paceline.process import ports
from paceline.process.callers import server_credentials
from paceline.process.health import SERVICE_NAME as HEALTH_SERVICE
from paceline.process.health import HealthServicer, HealthStatus
from paceline.process.tls_folder import TlsFolder
from paceline_executor.errors import DeviceError
from paceline_executor.link import servicer as executor_service
from paceline_executor.link.description import Description, Load
from paceline_executor.link.fence import FenceTimes
from paceline_executor.link.interceptor import CallInterceptor
from paceline_executor.link.metrics import ExecutorMetrics
from paceline_executor.link.plan_streams import Identity, PlanStreams
from paceline_executor.link.profiles import Profiles
from paceline_executor.link.step_loop import Report, StepLoop

MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # a plan that places 256 requests of 32,768 tokens is half of it
_TICK_S = 0.2
_LOOK_S = 0.05
_QUIET_S = 0.25  # a plan sent before the drain notice came has arrived by then
_ABANDONED_S = 2.0  # rows that no scheduler drives are not waited for longer
_GOODBYE_S = 0.5
_ANSWER_S = 5.0

_OPTIONS = (
    *ports.SERVER_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_concurrent_streams", 128),
)


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Port 0 takes a free one; health_port None has none. With `tls` only those call whose certificate says that they
    may; the health port stays open.
    """

    host: str
    port: int
    health_port: int | None
    tls: TlsFolder | None = None
    max_plans_in_flight: int = 4
    times: FenceTimes = field(default_factory=FenceTimes)
    protocols: ProtocolRange = PROTOCOLS


class ExecutorService:
    """Listens, loads, serves, drains and stops, in this order."""

    def __init__(self, config: ServiceConfig, load: Load) -> None:
        self._config = config
        self._health = HealthServicer(executor_service.SERVICE_NAME)
        self.plan_streams = PlanStreams(Identity.new(), config.max_plans_in_flight, config.times, config.protocols)
        self.metrics = ExecutorMetrics(self._driven, lambda: self._steps.idle_ns)
        self._servicer = executor_service.ExecutorServicer(self.plan_streams, Profiles(self.metrics.profiled))
        self._steps = StepLoop(load, self._report)
        self._servers: list[grpc.aio.Server] = []
        self._ticker: asyncio.Task[None] | None = None
        self._is_open = False
        self._log = structlog.get_logger()

    async def listen(self) -> tuple[int, int | None]:
        """Return the numbers of both ports. Raises PortError."""
        config = self._config
        rules = executor_service.who_may_call if config.tls is not None else lambda _: None
        interceptor = CallInterceptor(executor_service.BYTES_METHODS, rules)
        server = grpc.aio.server(interceptors=(interceptor,), options=_OPTIONS)
        executor_service.register(self._servicer, server)
        self._health.add_to(server)
        names = (executor_service.SERVICE_NAME, HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        credentials = None if config.tls is None else server_credentials(config.tls, asks_callers=True)
        port = await self._serve(server, config.port, credentials)
        if config.health_port is None:
            return port, None
        probes = grpc.aio.server(interceptors=(CallInterceptor(),), options=_OPTIONS)
        self._health.add_to(probes)
        return port, await self._serve(probes, config.health_port)

    async def load(self) -> Description:
        description = await self._steps.start()
        self._servicer.open(self._steps, description)
        self.metrics.describe(description)
        self._is_open = True
        self._ticker = asyncio.create_task(self._tick(), name="tick")
        self._set_ready(True)
        return description

    async def run(self) -> None:
        """Raises what ended a part that must not end."""
        if self._ticker is not None:
            await asyncio.wait((self._ticker, self._steps.ended), return_when=asyncio.FIRST_COMPLETED)
            for task in (self._ticker, self._steps.ended):
                if task.done():
                    task.result()

    def fail(self, error: DeviceError) -> None:
        """The step that runs fails, and so does whoever waits in `load` or `run`."""
        self._steps.fail(error)

    async def drain(self, grace_s: float) -> bool:
        """Return whether what ran ended within the grace."""
        self._is_open = False
        self._set_ready(False)
        self.plan_streams.drain(Drain("the executor is shutting down", grace_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._quiet()
                return True
        return False

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self._health.stop()
        self.plan_streams.end_all(self._farewell())
        # Streams end by themselves; what does not, such as a health watch, is cut.
        await asyncio.gather(*(server.stop(_GOODBYE_S) for server in self._servers))
        if not await asyncio.to_thread(self._steps.stop, _ANSWER_S):
            self._log.warning("step_thread_abandoned", hint="a step does not end; the process ends without it")

    def _report(self, report: Report) -> None:
        self.plan_streams.report(report)
        self.metrics.saw(report)

    def _driven(self) -> tuple[bool, int]:
        fence = self.plan_streams.fence
        return fence.holder is not None, fence.epoch

    def _farewell(self) -> str:
        if self._steps.ended.done() and (error := self._steps.ended.exception()) is not None:
            return f"the executor has failed and ends: {error}"
        if self.plan_streams.drain_notice is None:
            return "the executor ends"
        return "the executor has drained and is going away"

    async def _serve(
        self, server: grpc.aio.Server, port: int, credentials: grpc.ServerCredentials | None = None
    ) -> int:
        bound = ports.bind(server, self._config.host, port, credentials)
        await server.start()
        self._servers.append(server)
        return bound

    async def _tick(self) -> None:
        while True:
            self.plan_streams.beat()
            if self._is_open:
                self._set_ready(self._is_ready())
            await asyncio.sleep(_TICK_S)

    def _set_ready(self, is_ready: bool) -> None:
        status = HealthStatus.SERVING if is_ready else HealthStatus.NOT_SERVING
        self._health.set(executor_service.SERVICE_NAME, status)

    def _is_ready(self) -> bool:
        """A step could run now: the thread lives and is not stuck in one."""
        running = self._steps.running
        is_stuck = running is not None and time.monotonic_ns() > running.bound_ns
        return not is_stuck and not self._steps.ended.done()

    async def _quiet(self) -> None:
        quiet_since = driven_at = time.monotonic()
        while True:
            num_rows = await self._steps.ask(lambda table: table.num_rows_in_use)
            now = time.monotonic()
            if self.plan_streams.fence.holder is not None:
                driven_at = now
            is_abandoned = now - driven_at > _ABANDONED_S
            if not is_abandoned and (num_rows > 0 or not self.plan_streams.is_idle):
                quiet_since = now
            if now - quiet_since > _QUIET_S:
                return
            await asyncio.sleep(_LOOK_S)

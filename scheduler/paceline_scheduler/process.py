"""The running scheduler: its parts put together, served until a signal says to stop, then drained.

The one place where edge and link meet.
"""

import asyncio
import contextlib
import gc
import os
import random
import resource
import secrets
import time
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import structlog

from paceline.plan.values import Approach
from paceline.process.callbacks import watch_callbacks
from paceline.process.line_writer import LineWriter
from paceline.process.signals import follow_signals, until_set_or_ended
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.servicer_admin import AdminServicer, Observed
from paceline_scheduler.api.servicer_inference import InferenceServicer
from paceline_scheduler.api.text.texts import Texts
from paceline_scheduler.config import Config, RecordingConfig
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import BeginDrain, SetTenants
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.disk_cache import AsyncDiskCache, DiskCache
from paceline_scheduler.errors import ConfigError
from paceline_scheduler.link.claim import OwnClaim
from paceline_scheduler.link.discovery import Discovery, resolve_with_system
from paceline_scheduler.link.executors import LinkedExecutors
from paceline_scheduler.link.fleet import Fleet
from paceline_scheduler.link.leadership import Leadership, ServingStatus
from paceline_scheduler.link.listener import Listener
from paceline_scheduler.link.tokenizers import TokenizerStore
from paceline_scheduler.link.transport_grpc import GrpcTransport
from paceline_scheduler.observers.steps import StepObserver
from paceline_scheduler.runtime import Runtime
from paceline_scheduler.serving.announcer import Announcer
from paceline_scheduler.serving.servicer_ports import SchedulerServers
from paceline_scheduler.serving.servicer_services import Services
from paceline_scheduler.telemetry.metrics import Metrics, count_refusal, observe
from paceline_scheduler.telemetry.statistics import Statistics
from paceline_scheduler.telemetry.tracing import LateSpans, trace

if TYPE_CHECKING:
    from paceline_scheduler.recording.recorder import Recorder

_GIVE_UP_S = 1.0  # for clients to read that their request was given up
_TELL_S = 1.0
_LAST_SPANS_S = 1.0
_SETTLE_S = 0.5  # for executors to hear how the last requests ended

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Parts:
    runtime: Runtime
    executors: LinkedExecutors
    listener: Listener
    edge: Edge
    services: Services
    fleet: Fleet
    metrics: Metrics
    statistics: Statistics
    spans: LateSpans | None
    recorder: "Recorder | None"


async def run(config: Config, log: LineWriter, ports: SchedulerServers) -> bool:
    """Until a signal says to stop; returns whether all requests were finished then."""
    _take_all_descriptors()
    hurrying = asyncio.Event()
    stopping = follow_signals(again=lambda _: hurrying.set())
    broken = watch_callbacks(asyncio.get_running_loop())
    parts = _assemble(config, log, ports)
    edge, executors, services, fleet = parts.edge, parts.executors, parts.services, parts.fleet
    numbers = ports.numbers
    metrics_port = await parts.metrics.port.listen(config.host, config.metrics_port)
    where = {
        "host": config.host,
        "port": numbers.port,
        "admin_port": numbers.admin_port,
        "health_port": numbers.health_port,
        "metrics_port": metrics_port,
    }
    gc.freeze()  # the program's own objects stay; looking through them costs steps time
    gc.enable()
    _log.info("listening", pid=os.getpid(), scheduler_id=fleet.scheduler_id, **where)

    ready_when = {ServingStatus.SERVING, ServingStatus.STANDBY} if config.standby else {ServingStatus.SERVING}
    announcer = Announcer(
        frozenset(ready_when),
        services.set_ready,
        lambda: [model.name for model in executors.open_models()],
        stopping.is_set,
        where,
    )
    executors.on_readiness(announcer.changed)
    fleet.advertise(config.reached_at(numbers.port))
    links = asyncio.create_task(fleet.run(), name="links")
    watching = asyncio.create_task(_watch_tokens(ports), name="tokens")
    beside = [asyncio.create_task(parts.statistics.run(config.log_statistics_s), name="statistics")]
    if parts.spans is not None:
        beside.append(asyncio.create_task(parts.spans.load_later(), name="traces"))
    try:
        await until_set_or_ended(stopping, links, broken, watching)
        _log.info("draining", shutdown_timeout_s=config.shutdown_timeout_s, num_requests=len(edge.requests))
        waited_for = links, broken
        return await _drain(parts.runtime, parts.listener, edge, fleet, waited_for, config.shutdown_timeout_s, hurrying)
    finally:
        watching.cancel()
        for task in beside:
            task.cancel()
        await _end(links)
        parts.metrics.port.close()
        if parts.recorder is not None:
            parts.recorder.close()
        await ports.stop()
        await edge.texts.close()
        if parts.spans is not None:
            parts.spans.close(_LAST_SPANS_S)
        _log.info("stopped")


def _assemble(config: Config, log: LineWriter, ports: SchedulerServers) -> _Parts:
    clock = time.monotonic
    core_limits = CoreLimits(
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        max_num_batched_tokens=config.max_num_batched_tokens,
        ttft_budget_s=config.ttft_budget_s,
        itl_budget_s=config.itl_budget_s,
        max_num_draft_tokens=config.speculation,
    )
    edge_limits = EdgeLimits()
    claim = OwnClaim(secrets.token_hex(8), Approach.TAKE_OVER if config.takeover else Approach.WAIT)
    core = Core(core_limits)
    runtime = Runtime(core, clock, asyncio.get_running_loop())
    recorder = None if config.record_dir is None else _record(config.record_dir, core, runtime, claim.scheduler_id)
    if (tokens := ports.tokens) is not None:
        runtime.feed(SetTenants(tokens.bounds))
        tokens.on_other_bounds(lambda bounds: runtime.feed(SetTenants(bounds)))
    ports.bounds = lambda: runtime.views.limits().tenants
    steps = StepObserver(runtime.views)
    leadership = Leadership(claim)
    executors = LinkedExecutors(runtime, steps, leadership)
    listener = Listener(runtime, executors)
    cache = AsyncDiskCache(DiskCache(config.cache_dir / "scheduler"))
    texts = Texts(
        edge_limits, lambda: datetime.now().astimezone(), cache=cache, is_at_rest=lambda: executors.is_at_rest
    )
    edge = Edge(runtime, executors, texts, edge_limits)
    runtime.deliver_to(edge.delivery)
    meter = observe(runtime, edge, config.log_requests)
    ports.on_refusal = partial(count_refusal, meter)
    spans = trace(config, runtime, edge, ports.calls, clock, claim.scheduler_id)
    observed = Observed(steps.watch, meter, lambda: log.num_lost, recorder)
    admin = AdminServicer(runtime, executors, claim.scheduler_id, observed)
    services = Services(ports, InferenceServicer(edge), admin)
    discovery = Discovery(config.executors, resolve_with_system)
    # Reading a vocabulary keeps the event loop waiting: better before the first request.
    tokenizers = TokenizerStore(texts.prepare, cache)
    fleet = Fleet(
        discovery,
        GrpcTransport(config.tls_dir, discovery.name_of),
        leadership,
        listener,
        clock,
        random.random,
        tokenizers,
    )
    span_counts = dict[str, int] if spans is None else spans.counts

    def idle_ns(address: str) -> int:
        return steps.idle_ns(address, runtime.now_s())

    metrics = Metrics(meter, runtime.views, executors, lambda: log.num_lost, span_counts, idle_ns)
    statistics = Statistics(meter, executors, lambda: runtime.views.num_waiting()[0], clock)
    return _Parts(runtime, executors, listener, edge, services, fleet, metrics, statistics, spans, recorder)


def _record(config: RecordingConfig, core: Core, runtime: Runtime, scheduler_id: str) -> "Recorder":
    """Raises ConfigError where there can be no such folder."""
    from paceline_scheduler.recording.recorder import Recorder  # which others need not wait for

    try:
        config.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--record-dir: cannot make {config.folder}: {error.strerror or error}") from error
    recorder = Recorder(lambda: core.state, config.folder, scheduler_id)
    recorder.start("start", is_raw=config.is_raw)
    runtime.show_all(recorder)
    return recorder


async def _drain(
    runtime: Runtime,
    listener: Listener,
    edge: Edge,
    fleet: Fleet,
    parts: tuple[asyncio.Task[NoReturn], asyncio.Future[NoReturn]],
    timeout_s: float,
    hurrying: asyncio.Event,
) -> bool:
    """Until time is up, or a queued standby gets the executors at once. Returns whether all finished, here or there;
    raises what one of the `parts` failed with.
    """
    links, broken = parts
    runtime.feed(BeginDrain())
    edge.drain("the scheduler is shutting down", timeout_s)
    finished = asyncio.create_task(edge.drained())
    handing_off = asyncio.create_task(fleet.until_handoff(runtime.views))
    telling = asyncio.create_task(_tell_what_runs(edge))
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(until_set_or_ended(hurrying, finished, handing_off, links, broken), timeout_s)
        is_succeeded = handing_off.done()
    finally:
        handing_off.cancel()
        telling.cancel()
    if not finished.done():
        await _end(links)
        listener.give_up("the scheduler is shutting down; send the request again")
        await asyncio.wait((finished,), timeout=_GIVE_UP_S)
        finished.cancel()
        return is_succeeded
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(runtime.until_settled(), _SETTLE_S)
    return True


async def _watch_tokens(ports: SchedulerServers) -> None:
    """What fails ends the process: tokens could not be revoked any more."""
    if ports.tokens is None:
        await asyncio.Event().wait()
    else:
        await ports.tokens.watch()


async def _tell_what_runs(edge: Edge) -> NoReturn:
    """Whenever the number has changed."""
    num_told = len(edge.requests)
    while True:
        await asyncio.sleep(_TELL_S)
        if len(edge.requests) != num_told:
            num_told = len(edge.requests)
            _log.info("still_running", num_requests=num_told)


async def _end(links: asyncio.Task[NoReturn]) -> None:
    """They keep their requests for whoever attaches next."""
    links.cancel()
    await asyncio.gather(links, return_exceptions=True)


def _take_all_descriptors() -> None:
    """Each client needs one, and 1,024 are usual."""
    _, at_most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # where "no limit" is no number that can be set
        resource.setrlimit(resource.RLIMIT_NOFILE, (at_most, at_most))

"""The running scheduler: its parts put together, served until a signal says to stop, then drained.

The one place where edge and link meet.
"""

import asyncio
import contextlib
import gc
import os
import random
import secrets
import signal
import time
from datetime import datetime
from typing import NoReturn

import structlog

from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.servicer_admin import AdminServicer
from paceline_scheduler.api.servicer_inference import InferenceServicer
from paceline_scheduler.api.texts import Texts
from paceline_scheduler.config import Config
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.link.discovery import Discovery, resolve_with_system
from paceline_scheduler.link.driver import Driver
from paceline_scheduler.link.fleet import Fleet
from paceline_scheduler.link.identity import Approach, Identity
from paceline_scheduler.link.tokenizers import TokenizerShelf
from paceline_scheduler.link.transport_grpc import GrpcTransport
from paceline_scheduler.servicer_ports import SchedulerPorts

_GIVE_UP_S = 1.0  # for clients to read that their request was given up
_SETTLE_S = 0.5  # for executors to hear how the last requests ended

_log = structlog.get_logger(__name__)


async def run(config: Config) -> bool:
    """Serve until a signal says to stop; returns whether all requests were finished then. Raises PortError."""
    stopping, hurrying = _follow_signals()
    driver, edge, ports, fleet = _assemble(config)
    numbers = await ports.listen(config)
    where = {
        "host": config.host,
        "port": numbers.port,
        "admin_port": numbers.admin_port,
        "health_port": numbers.health_port,
    }
    gc.collect()
    gc.freeze()  # the program's own objects stay; looking through them again and again would cost steps time
    _log.info("listening", pid=os.getpid(), scheduler_id=fleet.scheduler_id, **where)

    def readiness_changed(is_ready: bool) -> None:
        ports.set_ready(is_ready)
        if is_ready:
            _log.info("ready", models=[model.name for model in driver.open_models()], **where)
        elif not stopping.is_set():
            _log.warning("not_ready", reason="no executor takes new requests; they are refused until one does")

    driver.connect(edge, readiness_changed)
    links = asyncio.create_task(fleet.run(), name="links")
    try:
        await _first(links, stopping)
        if links.done():
            links.result()
        _log.info("draining", shutdown_timeout_s=config.shutdown_timeout_s)
        return await _drain(driver, edge, links, config.shutdown_timeout_s, hurrying)
    finally:
        await _end(links)
        await ports.stop()
        await edge.texts.close()
        _log.info("stopped")


def _assemble(config: Config) -> tuple[Driver, Edge, SchedulerPorts, Fleet]:
    """Build the object graph of the process."""
    clock = time.monotonic
    core_limits = CoreLimits(
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_num_queued_tokens=config.max_num_queued_tokens,
        max_num_batched_tokens=config.max_num_batched_tokens,
        ttft_budget_s=config.ttft_budget_s,
        itl_budget_s=config.itl_budget_s,
    )
    edge_limits = EdgeLimits()
    identity = Identity(secrets.token_hex(8), Approach.TAKE_OVER if config.takeover else Approach.WAIT)
    driver = Driver(lambda: Core(core_limits), clock, asyncio.get_running_loop())
    texts = Texts(edge_limits, lambda: datetime.now().astimezone())
    edge = Edge(driver, texts, edge_limits)
    ports = SchedulerPorts(InferenceServicer(edge), AdminServicer(driver, identity.scheduler_id))
    discovery = Discovery(config.executors, resolve_with_system)
    # Reading a vocabulary keeps the event loop waiting: better before the first request than during it.
    tokenizers = TokenizerShelf(texts.prepare)
    fleet = Fleet(discovery, GrpcTransport(), identity, driver, clock, random.random, tokenizers)
    return driver, edge, ports, fleet


async def _drain(
    driver: Driver, edge: Edge, links: asyncio.Task[NoReturn], timeout_s: float, hurrying: asyncio.Event
) -> bool:
    """Take nothing new, let what runs finish; what does not in time, or is hurried, is given up.

    Returns whether all finished.
    """
    driver.begin_drain()
    edge.drain("the scheduler is shutting down", timeout_s)
    finished = asyncio.create_task(edge.drained())
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_first(finished, hurrying), timeout_s)
    if not finished.done():
        await _end(links)
        driver.give_up("the scheduler is shutting down; send the request again")
        await asyncio.wait((finished,), timeout=_GIVE_UP_S)
        finished.cancel()
        return False
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(driver.wait_until_settled(), _SETTLE_S)
    return True


async def _end(links: asyncio.Task[NoReturn]) -> None:
    """Stop driving executors; they keep what they have for whoever attaches next."""
    links.cancel()
    await asyncio.gather(links, return_exceptions=True)


def _follow_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Return events that the first and the second SIGTERM or SIGINT set."""
    stopping, hurrying = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurrying if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stopping, hurrying


async def _first(task: "asyncio.Task[object]", event: asyncio.Event) -> None:
    """Wait until the task is done or the event set."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()

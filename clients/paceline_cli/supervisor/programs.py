"""The services as programs: where their console scripts are, on which ports they listen, and their command lines.

Knows the options of `paceline-scheduler`, `paceline-executor` and `paceline-gateway`. Never imports the services.
"""

import contextlib
import functools
import os
import random
import re
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline_cli.supervisor.events import Program

LOOPBACK = "127.0.0.1"
_SCHEDULER, _EXECUTOR, _GATEWAY = "scheduler", "executor", "gateway"
_GPU_RUNNER = "cuda"  # it takes no threads
# Each drains before what its requests run on.
_GATEWAYS_STOP, _SCHEDULERS_STOP, _EXECUTORS_STOP = -1, 0, 1
_ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104  recognised, not bound
_SCHEDULER_PORT, _EXECUTOR_PORT, _METRICS_PORT = 50051, 50061, 9464
_EXECUTOR_PORT_STEP = 10
_GATEWAY_PORT, _GATEWAY_METRICS_OFFSET = 8000, 2
_FIRST_PORTS = {
    _SCHEDULER: "--port",
    _GATEWAY: "--port",
    _EXECUTOR: "--executor-port",
}  # from which the others are counted
_COUNTED_PORTS = ("--port", "--admin-port", "--health-port")
_STANDBY_OFFSET = 3
_HEALTH_OFFSET = 2
_METRICS_OFFSET = 6
_GATEWAY_OFFSET = 7
# Below those that systems give to outgoing connections by themselves: Linux from 32768 on, others from 49152.
_OWN_PORTS = range(10_000, 32_000)
_MAX_PORT_TRIES = 100
# In which a standby has taken over: the start of the one that died would take the processor from it.
_STAND_IN_SECONDS = 0.5


class ProgramMissingError(Exception):
    """A console script is not installed."""


@dataclass(frozen=True, slots=True)
class SchedulerPorts:
    api: int
    admin: int
    health: int
    metrics: int


@dataclass(frozen=True, slots=True)
class ExecutorPorts:
    api: int
    health: int
    metrics: int


@dataclass(frozen=True, slots=True)
class GatewayPorts:
    http: int
    metrics: int


@dataclass(frozen=True, slots=True)
class DeploymentPorts:
    scheduler: SchedulerPorts
    standby: SchedulerPorts
    """Where a second scheduler listens, in a deployment that has one."""
    executors: tuple[ExecutorPorts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A scheduler, or two that stand by for each other, and executors on one machine. None: the service's default.

    `host` is where the schedulers' API and the gateway listen. Executors listen on loopback: nobody else needs them.
    """

    model: str | None
    host: str
    ports: DeploymentPorts
    shutdown_timeout_seconds: int
    num_threads: int | None = None
    runner: str | None = None
    offline: bool = False
    tls_dir: Path | None = None
    """Certificates of schedulers and executors: then only who proves itself may call, this program no more than others.
    """
    tokens: Path | None = None
    options: frozenset[str] = frozenset()
    """Those of the command that its user has typed."""
    insecure: bool = False
    """Whether the schedulers' API may listen where other machines reach it."""
    scheduler_options: tuple[str, ...] = ()
    """Behind all others on a scheduler's command line."""
    executor_options: tuple[str, ...] = ()
    """Behind all others on an executor's command line."""
    with_standby: bool = False
    """Two schedulers: whichever is not driving the executors stands by."""
    gateway: GatewayPorts | None = None
    """None: there is no gateway."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Where each scheduler is for a client on this machine."""
        host = LOOPBACK if self.host in _ALL_ADDRESSES else self.host
        return tuple(f"[{host}]:{ports.api}" if ":" in host else f"{host}:{ports.api}" for ports in self.schedulers)

    @property
    def target(self) -> str:
        """What a client on this machine is told: the targets, with commas between them."""
        return ",".join(self.targets)

    @property
    def schedulers(self) -> tuple[SchedulerPorts, ...]:
        return (self.ports.scheduler, self.ports.standby) if self.with_standby else (self.ports.scheduler,)

    @property
    def scheduler_names(self) -> tuple[str, ...]:
        return _names(_SCHEDULER, len(self.schedulers))

    @property
    def executor_names(self) -> tuple[str, ...]:
        return _names(_EXECUTOR, self.num_executors)

    @property
    def num_executors(self) -> int:
        return len(self.ports.executors)


def fixed_ports(
    scheduler_port: int, executor_port: int, num_executors: int, metrics_port: int | None = None
) -> DeploymentPorts:
    """The ports of the documentation, counted from these two: +1 admin, +2 health, +10 for each further executor.

    The standby's are +3, +4 and +5. Metrics are as far from `metrics_port`, an executor's one further. None is the
    documented one, or +6 where other ports are counted from.
    """
    scheduler_metrics, executor_metrics = scheduler_port + _METRICS_OFFSET, executor_port + _METRICS_OFFSET
    if metrics_port is not None or scheduler_port == _SCHEDULER_PORT:
        scheduler_metrics = metrics_port or _METRICS_PORT
    if metrics_port is not None or executor_port == _EXECUTOR_PORT:
        executor_metrics = (metrics_port or _METRICS_PORT) + 1
    steps = [number * _EXECUTOR_PORT_STEP for number in range(num_executors)]
    return DeploymentPorts(
        _scheduler_ports(scheduler_port, scheduler_metrics),
        _scheduler_ports(scheduler_port + _STANDBY_OFFSET, scheduler_metrics + _STANDBY_OFFSET),
        tuple(
            ExecutorPorts(executor_port + step, executor_port + step + _HEALTH_OFFSET, executor_metrics + step)
            for step in steps
        ),
    )


def gateway_ports(ports: DeploymentPorts) -> GatewayPorts:
    """The documented ones; where others are counted, 7 above the scheduler's API and 2 above its metrics."""
    first = ports.scheduler.api
    http = _GATEWAY_PORT if first == _SCHEDULER_PORT else first + _GATEWAY_OFFSET
    return GatewayPorts(http, ports.scheduler.metrics + _GATEWAY_METRICS_OFFSET)


def free_ports(num_executors: int) -> DeploymentPorts:
    """Ports of loopback that nobody listens on now; held all at once while they are chosen, so that they differ."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(_listen_somewhere()) for _ in range(8 + 3 * num_executors)]
        numbers = [listening.getsockname()[1] for listening in sockets]
    return DeploymentPorts(
        SchedulerPorts(*numbers[:4]),
        SchedulerPorts(*numbers[4:8]),
        tuple(ExecutorPorts(*numbers[start : start + 3]) for start in range(8, len(numbers), 3)),
    )


def _listen_somewhere() -> socket.socket:
    """Listen on a port that no outgoing connection is given: until a program binds it, another one could get it."""
    for _ in range(_MAX_PORT_TRIES):
        with contextlib.suppress(OSError):
            return socket.create_server((LOOPBACK, random.choice(_OWN_PORTS)))  # noqa: S311  # no secret
    return socket.create_server((LOOPBACK, 0))


def programs_of(deployment: Deployment) -> list[Program]:
    """The schedulers, the executors, and the gateway if there is one, which is ended first."""
    scheduler, executor = find_script("paceline-scheduler"), find_script("paceline-executor")
    patience = _STAND_IN_SECONDS if deployment.with_standby else 0.0
    schedulers = [
        Program(
            name,
            (scheduler, *_scheduler_options(deployment, ports)),
            stop_stage=_SCHEDULERS_STOP,
            retell=functools.partial(retold, _SCHEDULER, deployment.options),
            min_restart_seconds=patience,
        )
        for name, ports in zip(deployment.scheduler_names, deployment.schedulers, strict=True)
    ]
    environment = (("HF_HUB_OFFLINE", "1"),) if deployment.offline else ()
    executors = [
        Program(
            name,
            (executor, *_executor_options(deployment, ports)),
            environment,
            _EXECUTORS_STOP,
            retell=functools.partial(retold, _EXECUTOR, deployment.options),
        )
        for name, ports in zip(deployment.executor_names, deployment.ports.executors, strict=True)
    ]
    return [*schedulers, *executors, *_gateways(deployment)]


def _gateways(deployment: Deployment) -> list[Program]:
    if deployment.gateway is None:
        return []
    options = (
        *("--target", deployment.target),
        *("--host", deployment.host),
        *("--port", str(deployment.gateway.http)),
        *("--metrics-port", str(deployment.gateway.metrics)),
        *("--shutdown-timeout", str(deployment.shutdown_timeout_seconds)),
        *(("--insecure",) if deployment.insecure else ()),
        *_security_options(deployment),
    )
    retell = functools.partial(retold, _GATEWAY, deployment.options)
    command = (find_script("paceline-gateway"), *options)
    return [Program(_GATEWAY, command, stop_stage=_GATEWAYS_STOP, retell=retell)]


def find_script(name: str) -> str:
    """The full path of a console script: of this environment, else the first on PATH."""
    beside = Path(sys.executable).parent / name
    if os.access(beside, os.X_OK):
        return str(beside)
    found = shutil.which(name)
    if found is None:
        extra = name.removeprefix("paceline-")
        raise ProgramMissingError(
            f"{name} is not installed: in the checkout, pip install ./protos ./clients '.[{extra}]'"
        )
    return found


def retold(kind: str, options: frozenset[str], sentence: str) -> str:
    """What a service says, so that every option it names is one of these, or known to be another program's."""

    def instead(found: re.Match[str]) -> str:
        option = found[0]
        if (first := _FIRST_PORTS[kind]) in options and option in _COUNTED_PORTS:
            return first if option == "--port" else f"{first}, from which its {option[2:].replace('-', ' ')} follows"
        return option if option in options else f"{option} of paceline-{kind} (started by itself)"

    return re.sub(r"--[a-z][a-z-]*[a-z]", instead, sentence)


def _names(kind: str, number: int) -> tuple[str, ...]:
    return (kind,) if number == 1 else tuple(f"{kind}-{index}" for index in range(number))


def _scheduler_ports(first: int, metrics: int) -> SchedulerPorts:
    return SchedulerPorts(first, first + 1, first + _HEALTH_OFFSET, metrics)


def _scheduler_options(deployment: Deployment, ports: SchedulerPorts) -> Sequence[str]:
    executors = ",".join(f"{LOOPBACK}:{executor.api}" for executor in deployment.ports.executors)
    return (
        *("--executors", executors),
        *("--host", deployment.host),
        *("--port", str(ports.api)),
        *("--admin-port", str(ports.admin)),
        *("--health-port", str(ports.health)),
        *("--metrics-port", str(ports.metrics)),
        *("--shutdown-timeout", str(deployment.shutdown_timeout_seconds)),
        *(("--standby",) if deployment.with_standby else ()),
        *(("--insecure",) if deployment.insecure else ()),
        *_security_options(deployment),
        *(("--tokens", str(deployment.tokens)) if deployment.tokens is not None else ()),
        *deployment.scheduler_options,
    )


def _security_options(deployment: Deployment) -> Sequence[str]:
    return () if deployment.tls_dir is None else ("--tls-dir", str(deployment.tls_dir))


def _executor_options(deployment: Deployment, ports: ExecutorPorts) -> Sequence[str]:
    options = [
        *("--host", LOOPBACK),
        *("--port", str(ports.api)),
        *("--health-port", str(ports.health)),
        *("--metrics-port", str(ports.metrics)),
        *("--shutdown-timeout", str(deployment.shutdown_timeout_seconds)),
    ]
    num_threads = deployment.num_threads
    if num_threads is None and deployment.num_executors > 1 and deployment.runner != _GPU_RUNNER:
        # Each would take the whole machine, and all of them together would be slower than one.
        # What this process may use, its children may use too; an executor refuses more than that.
        num_threads = max(len(os.sched_getaffinity(0)) // deployment.num_executors, 1)
    for name, value in (
        ("--model", deployment.model),
        ("--num-threads", num_threads),
        ("--runner", deployment.runner),
    ):
        if value is not None:
            options += [name, str(value)]
    return [*options, *_security_options(deployment), *deployment.executor_options]

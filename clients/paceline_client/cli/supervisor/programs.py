"""The services as programs: where their console scripts are, on which ports they listen, and their command lines.

Knows the options of `paceline-scheduler` and `paceline-executor`. Never imports the services.
"""

import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline_client.cli.supervisor.events import Program

LOOPBACK = "127.0.0.1"
SCHEDULER = "scheduler"
"""The name of the scheduler's program."""
_ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104  recognised, not bound
_EXECUTOR_PORT_STEP = 10
_HEALTH_OFFSET = 2


class ProgramMissingError(Exception):
    """A console script is not installed."""


@dataclass(frozen=True, slots=True)
class SchedulerPorts:
    """Where a scheduler listens."""

    api: int
    admin: int
    health: int


@dataclass(frozen=True, slots=True)
class ExecutorPorts:
    """Where an executor listens."""

    api: int
    health: int


@dataclass(frozen=True, slots=True)
class Ports:
    """Where everything listens."""

    scheduler: SchedulerPorts
    executors: tuple[ExecutorPorts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One scheduler and its executors on one machine. None leaves an option to the service's default.

    `host` is where the scheduler's API listens. The executors listen on loopback: nobody else needs them.
    """

    model: str
    host: str
    ports: Ports
    shutdown_timeout_seconds: int
    max_num_seqs: int | None = None
    num_threads: int | None = None
    kv_cache_memory: str | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    revision: str | None = None
    offline: bool = False

    @property
    def target(self) -> str:
        """Where a client on this machine connects to."""
        host = LOOPBACK if self.host in _ALL_ADDRESSES else self.host
        return f"[{host}]:{self.ports.scheduler.api}" if ":" in host else f"{host}:{self.ports.scheduler.api}"

    @property
    def num_executors(self) -> int:
        """How many executors there are."""
        return len(self.ports.executors)


def fixed_ports(scheduler_port: int, executor_port: int, num_executors: int) -> Ports:
    """The ports of the documentation, counted from these two: +1 admin, +2 health, +10 for each further executor."""
    starts = [executor_port + number * _EXECUTOR_PORT_STEP for number in range(num_executors)]
    return Ports(
        SchedulerPorts(scheduler_port, scheduler_port + 1, scheduler_port + _HEALTH_OFFSET),
        tuple(ExecutorPorts(start, start + _HEALTH_OFFSET) for start in starts),
    )


def free_ports(num_executors: int) -> Ports:
    """Ports of loopback that nobody listens on now; held all at once while they are chosen, so that they differ."""
    held = [socket.create_server((LOOPBACK, 0)) for _ in range(3 + 2 * num_executors)]
    api, admin, health, *others = [held_socket.getsockname()[1] for held_socket in held]
    for held_socket in held:
        held_socket.close()
    pairs = zip(others[::2], others[1::2], strict=True)
    return Ports(SchedulerPorts(api, admin, health), tuple(ExecutorPorts(first, second) for first, second in pairs))


def programs_of(deployment: Deployment) -> list[Program]:
    """The scheduler and then the executors: also the order in which they are ended."""
    scheduler, executor = find_script("paceline-scheduler"), find_script("paceline-executor")
    several = deployment.num_executors > 1
    executors = [
        Program(f"executor-{number}" if several else "executor", (executor, *_executor_options(deployment, ports)))
        for number, ports in enumerate(deployment.ports.executors)
    ]
    return [Program(SCHEDULER, (scheduler, *_scheduler_options(deployment))), *executors]


def find_script(name: str) -> str:
    """The full path of a console script: of this environment, else the first on PATH."""
    beside = Path(sys.executable).parent / name
    if os.access(beside, os.X_OK):
        return str(beside)
    found = shutil.which(name)
    if found is None:
        extra = name.removeprefix("paceline-")
        raise ProgramMissingError(f"{name} is not installed: pip install 'paceline[{extra}]'")
    return found


def _scheduler_options(deployment: Deployment) -> Sequence[str]:
    ports = deployment.ports.scheduler
    executors = ",".join(f"{LOOPBACK}:{executor.api}" for executor in deployment.ports.executors)
    return (
        *("--executors", executors),
        *("--host", deployment.host),
        *("--port", str(ports.api)),
        *("--admin-port", str(ports.admin)),
        *("--health-port", str(ports.health)),
        *("--shutdown-timeout", str(deployment.shutdown_timeout_seconds)),
    )


def _executor_options(deployment: Deployment, ports: ExecutorPorts) -> Sequence[str]:
    options = [
        *("--model", deployment.model),
        *("--host", LOOPBACK),
        *("--port", str(ports.api)),
        *("--health-port", str(ports.health)),
        *("--shutdown-timeout", str(deployment.shutdown_timeout_seconds)),
    ]
    num_threads = deployment.num_threads
    if num_threads is None and deployment.num_executors > 1:
        # Each would take the whole machine, and all of them together would be slower than one.
        # What this process may use, its children may use too; an executor refuses more than that.
        num_threads = max(len(os.sched_getaffinity(0)) // deployment.num_executors, 1)
    for name, value in (
        ("--max-num-seqs", deployment.max_num_seqs),
        ("--num-threads", num_threads),
        ("--kv-cache-memory", deployment.kv_cache_memory),
        ("--kv-cache-dtype", deployment.kv_cache_dtype),
        ("--quantization", deployment.quantization),
        ("--revision", deployment.revision),
    ):
        if value is not None:
            options += [name, str(value)]
    if deployment.offline:
        options.append("--offline")
    return options

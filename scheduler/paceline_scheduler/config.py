"""What the process is told when it starts: the options of its command line, checked. The environment is read here."""

import argparse
import ipaddress
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NoReturn

from paceline.process.help import EXIT_CODES, HelpParser
from paceline.process.options import (
    checked,
    decimal,
    default_cache_dir,
    flag,
    host_address,
    json_value,
    log_level_option,
    number,
    option,
    parse_options,
    port_number,
    port_or_off,
    tls_folder,
)
from paceline.process.tls_folder import TlsFolder, exposure
from paceline_scheduler.errors import ConfigError
from paceline_scheduler.link.discovery import Endpoint, ExecutorAddresses, parse_endpoint, parse_executors
from paceline_scheduler.spans.sampler import TraceSampler, trace_sampler

_EXECUTORS = "Executors"
_PORTS = "Ports (0 takes any free one)"
_SECURITY = "Security (without it, only this machine is listened to)"
_LIMITS, _PROCESS = "Limits", "Process"
_AT_LEAST_ONE = number(1, 10**12 - 1)
_ABOVE_ZERO = decimal(1e-6, 1e9, "a number of seconds above 0")
MAX_DRAFTS = 63  # of a row and step, by the plan protocol
_MAX_ADDRESS_BYTES = 256  # that executors take
_RAW = "raw:"
_SPECULATION = '{"max_num_draft_tokens": 4}'
_DESCRIPTION = """\
Decides, step by step, what the executors run, and serves clients over gRPC.

Prints JSON lines on stdout (readable ones on a terminal): "listening", then "ready" when an executor is attached.
Drains on SIGTERM or SIGINT: new requests are refused, running ones finish; a second signal gives them up."""
_PANELS = (
    EXIT_CODES,
    (
        "Environment",
        (
            ("PACELINE_CACHE_DIR", "Default of --cache-dir; else XDG_CACHE_HOME/paceline, else ~/.cache/paceline."),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "Where traces go; other OTEL_* variables say which. [default: no traces]"),
            ("GRPC_VERBOSITY", "What gRPC itself says on stderr: NONE, ERROR, INFO or DEBUG. [default: NONE]"),
        ),
    ),
)


class Traces(Enum):
    """What the `OTEL_*` variables say of traces; the SDK reads the rest of them."""

    OFF = "off"
    OTLP = "otlp"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class RecordingConfig:
    """`is_raw`: with the token ids themselves."""

    folder: Path
    is_raw: bool

    @classmethod
    def parse(cls, text: str) -> "RecordingConfig":
        folder = text.removeprefix(_RAW)
        if not folder:
            raise argparse.ArgumentTypeError("names no folder")
        return cls(Path(folder), is_raw=text.startswith(_RAW))


def read_speculation(text: str) -> int:
    """Returns the drafts of a row and step."""
    value = json_value(text, _SPECULATION)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"is no JSON object; write one such as {_SPECULATION}")
    unknown = sorted(value.keys() - {"max_num_draft_tokens"})
    if unknown:
        raise argparse.ArgumentTypeError(f"has no field {unknown[:1]}; there is max_num_draft_tokens")
    most = value.get("max_num_draft_tokens", MAX_DRAFTS)
    if type(most) is not int or not 0 <= most <= MAX_DRAFTS:
        raise argparse.ArgumentTypeError(f"max_num_draft_tokens has to be a whole number from 0 to {MAX_DRAFTS}")
    return most


def _reachable(text: str) -> str:
    try:
        address = str(parse_endpoint(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form host:port") from None
    if len(address.encode()) > _MAX_ADDRESS_BYTES:
        raise argparse.ArgumentTypeError(f"is longer than {_MAX_ADDRESS_BYTES} bytes")
    return address


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A port of 0 takes any free one."""

    executors: ExecutorAddresses = option(
        _EXECUTORS,
        checked(parse_executors),
        "ADDRESSES",
        text="Executors to drive: host:port,host:port, or dns:///name:port for all addresses of a name, looked up every"
        " 5 seconds.",
    )
    takeover: bool = flag(
        _EXECUTORS,
        text="Take the executors from the scheduler that drives them, once; without it, wait until that one is gone.",
    )
    standby: bool = flag(
        _EXECUTORS, text="Report ready to health checks also while another scheduler drives the executors."
    )
    host: str = option(
        _PORTS,
        host_address,
        "ADDRESS",
        "127.0.0.1",
        text="Address that clients and health probes reach; 0.0.0.0 for all. [default: %(default)s]",
    )
    port: int = option(_PORTS, port_number, "N", 50051, text="Port of InferenceService. [default: %(default)s]")
    advertise: str | None = option(
        _PORTS,
        checked(_reachable),
        "HOST:PORT",
        None,
        text="Where clients reach this scheduler; standby schedulers send their clients there."
        " [default: --host, or this machine's name where that is all addresses, and the port]",
    )
    admin_host: str = option(
        _PORTS, host_address, "ADDRESS", "127.0.0.1", text="Address that operators reach. [default: %(default)s]"
    )
    admin_port: int = option(_PORTS, port_number, "N", 50052, text="Port of AdminService. [default: %(default)s]")
    health_port: int = option(
        _PORTS,
        port_number,
        "N",
        50053,
        text="Plaintext port that answers health checks only, for probes. [default: %(default)s]",
    )
    metrics_port: int | None = option(
        _PORTS, port_or_off, "N|off", 9464, text="Port where Prometheus reads /metrics. [default: %(default)s]"
    )
    tls_dir: TlsFolder | None = option(
        _SECURITY,
        tls_folder,
        "DIR",
        None,
        text="Folder with ca.crt, tls.crt and tls.key, read again when they change. Executors are dialled with it."
        " Operators need a certificate of that authority, and clients too unless there are tokens.",
    )
    tokens: Path | None = option(
        _SECURITY,
        Path,
        "FILE",
        None,
        text="File of hashed tokens, each of a tenant's client or an operator, read again when it changes; 'paceline"
        " token' adds one. Then every call needs a token.",
    )
    insecure: bool = flag(
        _SECURITY, text="Without --tls-dir, listen to other machines too. Tokens and prompts then travel readably."
    )
    max_num_batched_tokens: int | None = option(
        _LIMITS, _AT_LEAST_ONE, "TOKENS", None, text="Largest step, in tokens. [default: what each executor allows]"
    )
    max_num_queued_reqs: int = option(
        _LIMITS,
        _AT_LEAST_ONE,
        "REQUESTS",
        1024,
        text="Requests that may wait; more are refused with a time to try again. [default: %(default)s]",
    )
    max_num_queued_tokens: int = option(
        _LIMITS, _AT_LEAST_ONE, "TOKENS", 4_194_304, text="Prompt tokens that may wait. [default: %(default)s]"
    )
    ttft_budget_s: float = option(
        _LIMITS,
        _ABOVE_ZERO,
        "SECONDS",
        60.0,
        text="A request whose first token is expected later than this is refused. [default: %(default)g]",
    )
    itl_budget_s: float = option(
        _LIMITS,
        _ABOVE_ZERO,
        "SECONDS",
        0.25,
        text="So many requests run together that each still gets its next token within this time."
        " [default: %(default)g]",
    )
    speculation: int = option(
        _LIMITS,
        read_speculation,
        "FILE|JSON",
        MAX_DRAFTS,
        text=f"How many drafts a request gets in a step at most; 0 for none: {_SPECULATION}, or a file with this."
        " [default: as many as make it faster]",
    )
    cache_dir: Path = option(
        _PROCESS,
        Path,
        "DIR",
        lambda: default_cache_dir(os.environ),
        text="Where tokenizers are kept, so that the next start is quicker; what cannot be kept is fetched again."
        " [default: %(default)s]",
    )
    shutdown_timeout_s: float = option(
        _PROCESS,
        decimal(0, 3600, "0 to 3600 seconds"),
        "SECONDS",
        30.0,
        text="How long running requests may go on after SIGTERM. [default: %(default)g]",
    )
    log_requests: float = option(
        _PROCESS,
        decimal(0, 1, "a share from 0 to 1"),
        "SHARE",
        0.0,
        text="Which share of the requests has a line in the log when it ends or is refused, 0 to 1."
        " [default: %(default)g]",
    )
    log_statistics_s: float = option(
        _PROCESS,
        decimal(0, 86400, "0 to 86400 seconds"),
        "SECONDS",
        10.0,
        text="How often a line in the log says how much was done, if anything was; 0: never. [default: %(default)g]",
    )
    record_dir: RecordingConfig | None = option(
        _PROCESS,
        RecordingConfig.parse,
        "DIR",
        None,
        text="Record plans and results there for 'paceline replay', from the start on, 512 MiB at most, the oldest go"
        " first. Numbers stand for token ids, unless it is raw:DIR. [default: nothing is recorded]",
    )
    log_level: str = log_level_option(_PROCESS)
    traces: Traces
    trace_sampler: TraceSampler

    def __post_init__(self) -> None:
        for name, address in (("--host", self.host), ("--admin-host", self.admin_host)):
            if sentence := exposure(name, address, is_protected=self.tls_dir is not None or self.insecure):
                raise ConfigError(sentence)
        ports = [port for port in (self.port, self.admin_port, self.health_port, self.metrics_port) if port]
        if len(set(ports)) < len(ports):
            raise ConfigError("--port, --admin-port, --health-port, --metrics-port: have to differ")

    def reached_at(self, port: int) -> str:
        """Returns where clients reach this scheduler. If it listens on all addresses that is this machine's name, which
        may not lead here from everywhere.
        """
        if self.advertise is not None:
            return self.advertise
        is_all = self.host != "localhost" and ipaddress.ip_address(self.host).is_unspecified
        return str(Endpoint(socket.gethostname() if is_all else self.host, port))


class _Parser(HelpParser):
    """Its complaints are one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def parse_config(arguments: Sequence[str]) -> Config:
    """Raises ConfigError, and SystemExit for --help."""
    values = parse_options(Config, _Parser("paceline-scheduler", _DESCRIPTION, _PANELS), arguments)
    return Config(**values, traces=wanted_traces(os.environ), trace_sampler=trace_sampler(os.environ))


def wanted_traces(environ: Mapping[str, str]) -> Traces:
    """Unlike OpenTelemetry's SDK, this asks for nothing where no variable is set."""

    def value(name: str) -> str:
        return environ.get(name, "").strip().lower()

    exporter = value("OTEL_TRACES_EXPORTER")
    has_endpoint = value("OTEL_EXPORTER_OTLP_ENDPOINT") or value("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if value("OTEL_SDK_DISABLED") == "true" or exporter == "none" or not (exporter or has_endpoint):
        return Traces.OFF
    protocol = value("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or value("OTEL_EXPORTER_OTLP_PROTOCOL")
    is_known = exporter in ("", "otlp") and protocol in ("", "grpc")
    return Traces.OTLP if is_known else Traces.UNSUPPORTED


def prepare_grpc() -> None:
    """Call this before grpc is imported. It logs nothing unless asked: its errors reach us as exceptions. Its fork
    handlers crash in the processes that render templates.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


def prepare_structlog() -> None:
    """Import it without rich, which costs a tenth of the start and is not used."""
    rich = sys.modules.get("rich")
    sys.modules["rich"] = None  # type: ignore[assignment]  # which is how Python is told that there is none
    try:
        import structlog  # noqa: F401
    finally:
        if rich is None:
            del sys.modules["rich"]
        else:
            sys.modules["rich"] = rich

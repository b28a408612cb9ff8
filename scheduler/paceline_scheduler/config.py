"""What the process is told when it starts: the options of its command line, checked. The environment is read here."""

import argparse
import ipaddress
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from paceline.process.help import HelpParser, port_or_off
from paceline.process.small_files import read_small_file
from paceline.process.tls_folder import TlsFolder, TlsFolderError, is_loopback
from paceline_scheduler.errors import ConfigError
from paceline_scheduler.link.discovery import Endpoint, ExecutorAddresses, parse_endpoint, parse_executors
from paceline_scheduler.spans.sampler import UNSET, TraceSampler, trace_sampler

LOG_LEVELS = ("debug", "info", "warning", "error")
_MAX_PORT = 65535
MAX_DRAFTS = 63  # of a row and step, by the plan protocol
_MAX_ADDRESS_BYTES = 256  # that executors take
_RAW = "raw:"
_SPECULATION = '{"max_num_draft_tokens": 4}'
_DESCRIPTION = """\
Decides, step by step, what the executors run, and serves clients over gRPC.

Prints JSON lines on stdout (readable ones on a terminal): "listening", then "ready" when an executor is attached.
Drains on SIGTERM or SIGINT: new requests are refused, running ones finish; a second signal gives them up."""
_PANELS = (
    (
        "Exit codes",
        (
            ("0", "Drained and ended in good order, or asked to stop before it had started."),
            ("1", "Unexpected failure, logged."),
            ("2", "Usage. A start with the same arguments ends the same way; after the others it may succeed."),
            ("4", "A port is in use, or the address is not this machine's."),
            ("6", "--shutdown-timeout passed, or a second signal came, before all requests were finished."),
        ),
    ),
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


@dataclass(frozen=True, slots=True)
class Config:
    """A port of 0 takes any free one."""

    executors: ExecutorAddresses
    cache_dir: Path
    takeover: bool = False
    standby: bool = False
    advertise: str | None = None
    host: str = "127.0.0.1"
    port: int = 50051
    admin_host: str = "127.0.0.1"
    admin_port: int = 50052
    health_port: int = 50053
    metrics_port: int | None = 9464
    max_num_batched_tokens: int | None = None
    max_num_queued_reqs: int = 1024
    max_num_queued_tokens: int = 4_194_304
    ttft_budget_s: float = 60.0
    itl_budget_s: float = 0.25
    max_num_draft_tokens: int = MAX_DRAFTS
    shutdown_timeout_s: float = 30.0
    log_requests: float = 0.0
    log_statistics_s: float = 10.0
    log_level: str = "info"
    tls_dir: TlsFolder | None = None
    tokens: Path | None = None
    insecure: bool = False
    traces: Traces = Traces.OFF
    trace_sampler: TraceSampler = UNSET
    recording: RecordingConfig | None = None

    def __post_init__(self) -> None:
        _require_host("--host", self.host)
        _require_host("--admin-host", self.admin_host)
        for option, host in (("--host", self.host), ("--admin-host", self.admin_host)):
            _require(
                is_loopback(host) or self.tls_dir is not None or self.insecure,
                option,
                f"other machines reach {host}: give --tls-dir, or --insecure if the network itself keeps others out",
            )
        for option, port in (
            ("--port", self.port),
            ("--admin-port", self.admin_port),
            ("--health-port", self.health_port),
            ("--metrics-port", self.metrics_port or 0),
        ):
            _require(0 <= port <= _MAX_PORT, option, f"{port} is not a port")
        ports = [port for port in (self.port, self.admin_port, self.health_port, self.metrics_port) if port]
        _require(len(set(ports)) == len(ports), "--port, --admin-port, --health-port, --metrics-port", "have to differ")
        if self.max_num_batched_tokens is not None:
            _require(self.max_num_batched_tokens >= 1, "--max-num-batched-tokens", "has to be at least 1")
        _require(self.max_num_queued_reqs >= 1, "--max-num-queued-reqs", "has to be at least 1")
        _require(self.max_num_queued_tokens >= 1, "--max-num-queued-tokens", "has to be at least 1")
        _require(self.ttft_budget_s > 0, "--ttft-budget", "has to be above 0 seconds")
        _require(self.itl_budget_s > 0, "--itl-budget", "has to be above 0 seconds")
        _require(0 <= self.shutdown_timeout_s <= 3600, "--shutdown-timeout", "has to be 0 to 3600 seconds")
        _require(0 <= self.log_requests <= 1, "--log-requests", "has to be 0 to 1")
        _require(0 <= self.log_statistics_s <= 86400, "--log-statistics", "has to be 0 to 86400 seconds")
        _require(self.log_level in LOG_LEVELS, "--log-level", f"has to be one of {', '.join(LOG_LEVELS)}")

    def reached_at(self, port: int) -> str:
        """Returns where clients reach this scheduler. If it listens on all addresses that is this machine's name, which
        may not lead here from everywhere.
        """
        if self.advertise is not None:
            return self.advertise
        is_all = self.host != "localhost" and ipaddress.ip_address(self.host).is_unspecified
        return str(Endpoint(socket.gethostname() if is_all else self.host, port))


def parse_config(arguments: Sequence[str]) -> Config:
    """Raises ConfigError, and SystemExit for --help and unknown options."""
    options = _parser().parse_args(arguments)
    try:
        executors = parse_executors(options.executors)
    except ValueError as error:
        raise ConfigError(f"--executors: {error}") from error
    return Config(
        executors=executors,
        cache_dir=options.cache_dir,
        takeover=options.takeover,
        standby=options.standby,
        advertise=None if options.advertise is None else _reachable(options.advertise),
        host=options.host,
        port=options.port,
        admin_host=options.admin_host,
        admin_port=options.admin_port,
        health_port=options.health_port,
        metrics_port=options.metrics_port,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_queued_reqs=options.max_num_queued_reqs,
        max_num_queued_tokens=options.max_num_queued_tokens,
        ttft_budget_s=options.ttft_budget,
        itl_budget_s=options.itl_budget,
        max_num_draft_tokens=MAX_DRAFTS if options.speculation is None else read_speculation(options.speculation),
        shutdown_timeout_s=options.shutdown_timeout,
        log_requests=options.log_requests,
        log_statistics_s=options.log_statistics,
        log_level=options.log_level,
        tls_dir=None if options.tls_dir is None else _tls_folder(options.tls_dir),
        tokens=options.tokens,
        insecure=options.insecure,
        traces=wanted_traces(os.environ),
        trace_sampler=trace_sampler(os.environ),
        recording=None if options.record_dir is None else _recording(options.record_dir),
    )


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """A relative $XDG_CACHE_HOME is ignored, as its specification says."""
    own = environ.get("PACELINE_CACHE_DIR", "")
    if own:
        return Path(own).absolute()
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    home = Path(environ.get("HOME") or os.path.expanduser("~"))  # noqa: PTH111 - Path.home raises where there is none
    return (xdg if xdg.is_absolute() else home / ".cache") / "paceline"


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


class _Parser(HelpParser):
    """Its complaints are one line."""

    def error(self, message: str) -> None:  # type: ignore[override]  # raises instead of exiting
        raise ConfigError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="paceline-scheduler", description=_DESCRIPTION, panels=_PANELS)
    _add_executors(parser.add_argument_group("Executors"))
    _add_ports(parser.add_argument_group("Ports (0 takes any free one)"))
    _add_security(parser.add_argument_group("Security (without it, only this machine is listened to)"))
    _add_limits(parser.add_argument_group("Limits"))
    _add_process(parser.add_argument_group("Process"))
    return parser


def _add_executors(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--executors",
        required=True,
        metavar="ADDRESSES",
        help="Executors to drive: host:port,host:port, or dns:///name:port for all addresses of a name, looked up"
        " every 5 seconds.",
    )
    group.add_argument(
        "--takeover",
        action="store_true",
        help="Take the executors from the scheduler that drives them, once; without it, wait until that one is gone.",
    )
    group.add_argument(
        "--standby",
        action="store_true",
        help="Report ready to health checks also while another scheduler drives the executors.",
    )


def _add_ports(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="Address that clients and health probes reach; 0.0.0.0 for all. [default: %(default)s]",
    )
    group.add_argument(
        "--port", type=int, default=50051, metavar="N", help="Port of InferenceService. [default: %(default)s]"
    )
    group.add_argument(
        "--advertise",
        metavar="HOST:PORT",
        help="Where clients reach this scheduler; standby schedulers send their clients there."
        " [default: --host, or this machine's name where that is all addresses, and the port]",
    )
    group.add_argument(
        "--admin-host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="Address that operators reach. [default: %(default)s]",
    )
    group.add_argument(
        "--admin-port", type=int, default=50052, metavar="N", help="Port of AdminService. [default: %(default)s]"
    )
    group.add_argument(
        "--health-port",
        type=int,
        default=50053,
        metavar="N",
        help="Plaintext port that answers health checks only, for probes. [default: %(default)s]",
    )
    group.add_argument(
        "--metrics-port",
        type=port_or_off,
        default=9464,
        metavar="N|off",
        help="Port where Prometheus reads /metrics. [default: %(default)s]",
    )


def _add_security(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tls-dir",
        type=Path,
        metavar="DIR",
        help="Folder with ca.crt, tls.crt and tls.key, read again when they change. Executors are dialled with it."
        " Operators need a certificate of that authority, and clients too unless there are tokens.",
    )
    group.add_argument(
        "--tokens",
        type=Path,
        metavar="FILE",
        help="File of hashed tokens, each of a tenant's client or an operator, read again when it changes; 'paceline"
        " token' adds one. Then every call needs a token.",
    )
    group.add_argument(
        "--insecure",
        action="store_true",
        help="Without --tls-dir, listen to other machines too. Tokens and prompts then travel readably.",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="TOKENS",
        help="Largest step, in tokens. [default: what each executor allows]",
    )
    group.add_argument(
        "--max-num-queued-reqs",
        type=int,
        default=1024,
        metavar="REQUESTS",
        help="Requests that may wait; more are refused with a time to try again. [default: %(default)s]",
    )
    group.add_argument(
        "--max-num-queued-tokens",
        type=int,
        default=4_194_304,
        metavar="TOKENS",
        help="Prompt tokens that may wait. [default: %(default)s]",
    )
    group.add_argument(
        "--ttft-budget",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="A request whose first token is expected later than this is refused. [default: %(default)g]",
    )
    group.add_argument(
        "--itl-budget",
        type=float,
        default=0.25,
        metavar="SECONDS",
        help="So many requests run together that each still gets its next token within this time."
        " [default: %(default)g]",
    )
    group.add_argument(
        "--speculation",
        metavar="FILE|JSON",
        help=f"How many drafts a request gets in a step at most; 0 for none: {_SPECULATION}, or a file with this."
        " [default: as many as make it faster]",
    )


def read_speculation(text: str) -> int:
    """Returns the drafts of a row and step. Raises ConfigError."""
    try:
        value = json.loads(text if text.lstrip().startswith("{") else read_small_file(Path(text)))
    except OSError as error:
        raise ConfigError(f"--speculation: cannot read {text}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--speculation: {error}; write JSON such as {_SPECULATION}") from error
    _require(isinstance(value, dict), "--speculation", f"is no JSON object; write one such as {_SPECULATION}")
    unknown = sorted(value.keys() - {"max_num_draft_tokens"})
    _require(not unknown, "--speculation", f"has no field {unknown[:1]}; there is max_num_draft_tokens")
    most = value.get("max_num_draft_tokens", MAX_DRAFTS)
    is_count = type(most) is int and 0 <= most <= MAX_DRAFTS
    _require(is_count, "--speculation", f"max_num_draft_tokens has to be a whole number from 0 to {MAX_DRAFTS}")
    return int(most)


def _add_process(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cache-dir",
        type=Path,
        default=default_cache_dir(os.environ),
        metavar="DIR",
        help="Where tokenizers are kept, so that the next start is quicker; what cannot be kept is fetched again."
        " [default: %(default)s]",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="How long running requests may go on after SIGTERM. [default: %(default)g]",
    )
    group.add_argument(
        "--log-requests",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="Which share of the requests has a line in the log when it ends or is refused, 0 to 1."
        " [default: %(default)g]",
    )
    group.add_argument(
        "--log-statistics",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="How often a line in the log says how much was done, if anything was; 0: never. [default: %(default)g]",
    )
    group.add_argument(
        "--record-dir",
        metavar="DIR",
        help="Record plans and results there for 'paceline replay', from the start on, 512 MiB at most, the oldest go"
        " first. Numbers stand for token ids, unless it is raw:DIR. [default: nothing is recorded]",
    )
    group.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default="info",
        metavar="LEVEL",
        help="Least serious event to print: debug, info, warning or error. [default: %(default)s]",
    )


def _tls_folder(path: Path) -> TlsFolder:
    try:
        return TlsFolder(path)
    except TlsFolderError as error:
        raise ConfigError(f"--tls-dir: {error}") from error


def _recording(text: str) -> RecordingConfig:
    folder = text.removeprefix(_RAW)
    _require(bool(folder), "--record-dir", "names no folder")
    return RecordingConfig(Path(folder), is_raw=text.startswith(_RAW))


def _reachable(text: str) -> str:
    try:
        address = str(parse_endpoint(text))
    except ValueError:
        raise ConfigError(f"--advertise: {text!r} is not of the form host:port") from None
    _require(len(address.encode()) <= _MAX_ADDRESS_BYTES, "--advertise", f"is longer than {_MAX_ADDRESS_BYTES} bytes")
    return address


def _require_host(option: str, host: str) -> None:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        _require(host == "localhost", option, f"{host!r} is not an IP address")


def _require(holds: bool, option: str, sentence: str) -> None:
    if not holds:
        raise ConfigError(f"{option}: {sentence}")

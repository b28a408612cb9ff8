"""What the process is told when it starts: the options of its command line, checked."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.process.help import EXIT_CODES, HelpParser
from paceline.process.options import (
    checked,
    decimal,
    flag,
    host_address,
    log_level_option,
    option,
    parse_options,
    port_number,
    port_or_off,
    tls_folder,
)
from paceline.process.tls_folder import TlsFolder, exposure

_PORTS = "Ports (0 takes any free one)"
_SECURITY = "Security (without it, only this machine is listened to)"
_PROCESS = "Process"
_ORIGIN = re.compile(r"\*|https?://[^/\s,]+")
_DESCRIPTION = """\
Serves OpenAI's HTTP API as a client of a scheduler's. It keeps nothing: any number of gateways may run.

Prints JSON lines on stdout (readable ones on a terminal): "listening".
Drains on SIGTERM or SIGINT: /ready answers 503, running requests finish; a second signal gives them up."""
_PANELS = (
    EXIT_CODES,
    (
        "Environment",
        (("GRPC_VERBOSITY", "What gRPC itself says on stderr: NONE, ERROR, INFO or DEBUG. [default: NONE]"),),
    ),
)


def _origins(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if wrong := [each for each in found if not _ORIGIN.fullmatch(each)]:
        raise ValueError(f"{wrong[0]!r} is no origin such as https://chat.example.com")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A port of 0 takes any free one."""

    target: str = option(
        "Scheduler",
        str,
        "HOST:PORT,…",
        "localhost:50051",
        text="The scheduler, or several that stand by for each other; dns:///NAME:PORT: all of a name."
        " [default: %(default)s]",
    )
    admin_target: str | None = option(
        "Scheduler",
        str,
        "HOST:PORT,…",
        None,
        text="The admin ports, where the page's fleet comes from for whoever shows an operator's key."
        " [default: those after --target]",
    )
    host: str = option(
        _PORTS,
        host_address,
        "ADDRESS",
        "127.0.0.1",
        text="Address that clients reach; 0.0.0.0 for all. [default: %(default)s]",
    )
    port: int = option(_PORTS, port_number, "N", 8000, text="Port of the HTTP API. [default: %(default)s]")
    metrics_port: int | None = option(
        _PORTS, port_or_off, "N|off", 9466, text="Port where Prometheus reads /metrics. [default: %(default)s]"
    )
    tls_dir: TlsFolder | None = option(
        _SECURITY,
        tls_folder,
        "DIR",
        None,
        text="Folder with ca.crt, tls.crt and tls.key, read again when they change: HTTPS, and the scheduler is dialled"
        " with it. HTTP clients show no certificate, but their key.",
    )
    insecure: bool = flag(
        _SECURITY, text="Without --tls-dir, listen to other machines too. Keys and prompts then travel readably."
    )
    cors_origins: tuple[str, ...] = option(
        _SECURITY,
        checked(_origins),
        "ORIGINS",
        (),
        text="Pages that may call from a browser, as https://host,https://host, or *. [default: none]",
    )
    shutdown_timeout_s: float = option(
        _PROCESS,
        decimal(0, 3600, "0 to 3600 seconds"),
        "SECONDS",
        30.0,
        text="How long running requests may go on after SIGTERM. [default: %(default)g]",
    )
    log_level: str = log_level_option(_PROCESS)


def parse_config(arguments: Sequence[str]) -> Config:
    """Raises SystemExit for --help and for what is wrong."""
    parser = HelpParser("paceline-gateway", _DESCRIPTION, _PANELS)
    config = Config(**parse_options(Config, parser, arguments))
    if sentence := exposure("--host", config.host, is_protected=config.tls_dir is not None or config.insecure):
        parser.error(sentence)
    if config.port and config.port == config.metrics_port:
        parser.error("--port, --metrics-port: have to differ")
    return config


def prepare_grpc() -> None:
    """Call this before grpc is imported. It logs nothing unless asked: its errors reach us as exceptions."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")

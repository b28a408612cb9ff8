"""Ports for gRPC servers: what all of them allow, and how one is bound."""

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc
    import grpc.aio

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    # Each may cost 64 KiB, also without a call.
    ("grpc.max_allowed_incoming_connections", 8192),
    ("grpc.max_metadata_size", 16 * 1024),
    # A port that is in use must be an error, not a second owner.
    ("grpc.so_reuseport", 0),
    # A peer that vanished without a word is noticed although nothing is said.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class PortError(Exception):
    """A port cannot be listened on; the sentence says why, and which `option` names another one."""

    def __init__(self, host: str, port: int, why: str, option: str | None = None) -> None:
        advice = "" if option is None else f"; choose another with {option}"
        super().__init__(f"cannot listen on {_address(host, port)}: {why}{advice}")


def bind(
    server: "grpc.aio.Server",
    host: str,
    port: int,
    credentials: "grpc.ServerCredentials | None" = None,
    option: str | None = None,
) -> int:
    """Let a server listen on a port once it starts, 0 for a free one; returns its number. Raises PortError."""
    address = _address(host, port)
    try:
        _try_port(host, port)  # gRPC would print lines of its own, and not say why
    except OSError as error:
        raise PortError(host, port, error.strerror or str(error), option) from error
    except UnicodeError as error:
        raise PortError(host, port, "this is not the name of a host", option) from error
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError:  # somebody else was faster
        bound = 0
    if bound == 0:
        raise PortError(host, port, "the port is in use", option)
    return bound


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _try_port(host: str, port: int) -> None:
    """Raise OSError unless the port can be bound on one of the host's addresses, which is enough for gRPC."""
    failed: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            failed = error
        else:
            return
    if failed is not None:
        raise failed

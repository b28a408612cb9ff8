"""The addresses a client may go to: what its target says, with names looked up again and again.

Knows how a target is written and what its names stood for last. Refuses to know connections, and which address is best.
"""

import asyncio
import contextlib
import functools
import ipaddress
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from paceline_client.requests import invalid

Target = str | Sequence[str]
"""`host:port`, several of them with commas between them or as a list, or `dns:///name:port` for all that a name stands
for. A client adds the port where there is none. Other forms that gRPC has, `unix:path` say, are addresses as well."""

Resolver = Callable[[str, int], Awaitable[tuple[str, ...]]]
"""From a name and a port to the IP addresses it stands for; raises OSError."""

DEFAULT_PORT = 50051
ADMIN_PORT = 50052
_DNS_PREFIX = "dns:///"
_GRPC_SCHEMES = frozenset({"dns", "google-c2p", "ipv4", "ipv6", "unix", "unix-abstract", "vsock", "xds"})
_URL_SCHEMES = frozenset({"grpc", "grpcs", "http", "https"})
_HOST_AND_PORT = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):(?P<port>[0-9]{1,5})")
_MAX_ADDRESSES = 1024


@dataclass(frozen=True, slots=True)
class _Name:
    """All of its addresses have this port."""

    host: str
    port: int

    def address(self, ip: str) -> str:
        return f"[{ip}]:{self.port}" if ":" in ip else f"{ip}:{self.port}"


async def resolve_with_system(name: str, port: int) -> tuple[str, ...]:
    """The IP addresses of a name as the operating system finds them; raises OSError. In a thread that nobody waits for:
    a look-up cannot be interrupted, and must not delay the end of the process.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[str, ...]] = loop.create_future()
    look = functools.partial(_look_up, name, port, loop, answer)
    threading.Thread(target=look, name="paceline-resolve", daemon=True).start()
    return await answer


def _look_up(name: str, port: int, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[tuple[str, ...]]) -> None:
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        tell = functools.partial(answer.set_result, tuple(sorted({str(info[4][0]) for info in found})))
    except (OSError, ValueError) as error:
        # ValueError: what no name can be.
        tell = functools.partial(answer.set_exception, error if isinstance(error, OSError) else OSError(str(error)))
    with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
        loop.call_soon_threadsafe(lambda: None if answer.done() else tell())


def admin_target(target: str) -> str:
    """Where the admin ports are, if they follow those of the API as by default. InvalidRequestError where no port can
    be told.
    """
    return ",".join(_admin_address(part.strip()) for part in target.split(","))


def _admin_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    is_bare = not host or (":" in address and address.endswith("]"))
    if is_bare:
        return address
    if not port.isdecimal() or not 0 < int(port) < 65535:
        raise invalid("target", f"{address!r} names no port that an admin port could follow: say --admin-target")
    return f"{host}:{int(port) + 1}"


class Addresses:
    """Where one target leads to. A name that cannot be looked up keeps its last answer. Made without I/O.

    `default_port` completes what names none; None leaves it as it is. `InvalidRequestError` for a target that says
    nothing, is no text, or is a URL.
    """

    def __init__(
        self, target: Target, resolve: Resolver = resolve_with_system, *, default_port: int | None = None
    ) -> None:
        self._parts = _parse(target, default_port)
        self._resolve = resolve
        self._names = tuple(part for part in self._parts if isinstance(part, _Name))
        self._answers: dict[_Name, tuple[str, ...]] = {}
        self._errors: dict[_Name, str] = {}
        # Also of addresses that a name has just ceased to lead to: who dials one may have heard of it before.
        self._name_by_address: dict[str, str] = {}
        self._looking: asyncio.Task[None] | None = None

    @property
    def known(self) -> tuple[str, ...]:
        """Each address once, in the order of the target."""
        found: list[str] = []
        for part in self._parts:
            found += self._answers.get(part, ()) if isinstance(part, _Name) else [part]
        return tuple(dict.fromkeys(found))[:_MAX_ADDRESSES]

    @property
    def trouble(self) -> str:
        """What is the matter with its names, in one sentence; empty when nothing is."""
        return ", ".join(f"cannot resolve {name.host}: {error}" for name, error in self._errors.items())

    def name_of(self, address: str) -> str | None:
        """Its server presents itself by this name; None for an address given as it is."""
        return self._name_by_address.get(address)

    async def look(self) -> None:
        """Waits for the answer only where no address is known yet."""
        if not self._names:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="paceline-resolve")
        if not self.known:
            # Whoever is cancelled here leaves the look to the others.
            await asyncio.wait([self._looking])

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._looking

    async def _look(self) -> None:
        for name in self._names:
            if name not in self._answers:
                self._errors.setdefault(name, "no answer in time")
            try:
                ips = await self._resolve(name.host, name.port)
            except OSError as error:
                self._errors[name] = error.strerror or str(error)
            else:
                self._errors.pop(name, None)
                self._answers[name] = tuple(name.address(ip) for ip in ips)
                for address in self._answers[name]:
                    self._name_by_address.pop(address, None)  # to the end: those heard of last are kept
                    self._name_by_address[address] = name.host
                for address in tuple(self._name_by_address)[: -2 * _MAX_ADDRESSES]:
                    del self._name_by_address[address]

    def __str__(self) -> str:
        return ", ".join(
            f"{_DNS_PREFIX}{part.host}:{part.port}" if isinstance(part, _Name) else part for part in self._parts
        )


def may_be_followed(address: str, named_by: str) -> bool:
    """It has to be a host and a port. One that means "this machine" is followed only where the naming server is on this
    machine.
    """
    match = _HOST_AND_PORT.fullmatch(address)
    if match is None or match["host"] in _GRPC_SCHEMES or not 0 < int(match["port"]) < 65536:
        return False
    return not _is_here(address) or _is_here(named_by)


def _is_here(address: str) -> bool:
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host == "localhost" or address.startswith(("unix:", "unix-abstract:")):
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return ip.is_loopback or ip.is_unspecified


def _parse(target: Target, default_port: int | None) -> tuple[str | _Name, ...]:
    try:
        texts = target.split(",") if isinstance(target, str) else list(target)
        parts = [text.strip() for text in texts]
        "".join(parts).encode()
    except (AttributeError, TypeError, UnicodeEncodeError) as error:
        raise invalid("target", str(error)) from None
    if not all(parts) or not parts:
        raise invalid("target", f"{target!r} has an empty address: write host:port, host:port,... or dns:///name:port")
    return tuple(dict.fromkeys(_parse_part(part, default_port) for part in parts))


def _parse_part(part: str, default_port: int | None) -> str | _Name:
    scheme, is_url, rest = part.partition("://")
    if is_url and scheme.lower() in _URL_SCHEMES:
        raise invalid("target", f"{part!r} is a URL: write {rest.partition('/')[0]!r}, without {scheme}://")
    if not part.startswith(_DNS_PREFIX):
        is_known_to_grpc = part.partition(":")[0] in _GRPC_SCHEMES
        return part if default_port is None or is_known_to_grpc else _with_port(part, default_port)
    host, _, port = part.removeprefix(_DNS_PREFIX).rpartition(":")
    if not host and default_port is not None:
        host, port = port, str(default_port)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise invalid("target", f"{part!r} is not of the form dns:///name:port")
    return _Name(host.removeprefix("[").removesuffix("]"), int(port))


def _with_port(part: str, default_port: int) -> str:
    """gRPC would dial port 443 where none is named, and look up what looks like none."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(part.removeprefix("[").removesuffix("]")).version == 6:
            return f"[{part.removeprefix('[').removesuffix(']')}]:{default_port}"
    complete = part if ":" in part else f"{part}:{default_port}"
    host, _, port = complete.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise invalid("target", f"{part!r} is not of the form host:port")
    return complete

"""Where executors are: a fixed list, or a DNS name that is looked up again and again."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

DNS_PREFIX = "dns:///"
REFRESH_S = 5.0
MAX_EXECUTORS = 1024

Resolver = Callable[[str, int], Awaitable[tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The host may be a name to look up."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ExecutorAddresses:
    """`fixed` are dialled as they are; `names` stand for any number of endpoints."""

    fixed: tuple[Endpoint, ...] = ()
    names: tuple[Endpoint, ...] = ()


def parse_executors(text: str) -> ExecutorAddresses:
    """Reads `host:port,host:port,dns:///name:port`; raises ValueError with a sentence for people."""
    fixed: list[Endpoint] = []
    names: list[Endpoint] = []
    for element in (part.strip() for part in text.split(",")):
        if element.startswith(DNS_PREFIX):
            names.append(_endpoint(element.removeprefix(DNS_PREFIX), element))
        else:
            fixed.append(_endpoint(element, element))
    if len(set(fixed)) != len(fixed):
        raise ValueError("one executor is named twice; name each once")
    if len(fixed) > MAX_EXECUTORS:
        raise ValueError(f"{len(fixed)} executors are named, at most {MAX_EXECUTORS} are allowed")
    return ExecutorAddresses(tuple(fixed), tuple(names))


def parse_endpoint(text: str) -> Endpoint:
    """Raises ValueError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not of the form host:port")
    return Endpoint(host, int(port))


def _endpoint(text: str, element: str) -> Endpoint:
    try:
        return parse_endpoint(text)
    except ValueError:
        raise ValueError(f"{element!r} is not of the form host:port or dns:///name:port") from None


async def resolve_with_system(name: str, port: int) -> tuple[str, ...]:
    """Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return tuple(sorted({str(info[4][0]) for info in found}))


class Discovery:
    """A name that cannot be resolved keeps its last answer."""

    def __init__(self, addresses: ExecutorAddresses, resolver: Resolver) -> None:
        self._addresses = addresses
        self._resolver = resolver
        self._last_answers: dict[Endpoint, tuple[str, ...]] = {}
        self._names: dict[str, str] = {}  # by the address found last
        self.last_error = ""

    def name_of(self, address: str) -> str | None:
        """The address's certificate has to have this name; None for one given as it is."""
        return self._names.get(address)

    @property
    def changes(self) -> bool:
        return bool(self._addresses.names)

    async def look(self) -> tuple[str, ...]:
        found = [str(endpoint) for endpoint in self._addresses.fixed]
        self.last_error = ""
        for name in self._addresses.names:
            try:
                self._last_answers[name] = await self._resolver(name.host, name.port)
            except OSError as error:
                self.last_error = f"cannot resolve {name.host}: {error}"
            hosts = self._last_answers.get(name, ())
            looked_up = [str(Endpoint(host, name.port)) for host in hosts]
            self._names.update((address, name.host) for address in looked_up if address not in found)
            found += looked_up
        known = tuple(dict.fromkeys(found))[:MAX_EXECUTORS]
        self._names = {address: name for address, name in self._names.items() if address in known}
        return known

"""How nodes find one another: node 0 listens until all others have come, and each says first what it was started as.

Whoever comes is told in a sentence why it cannot stay, and the others are waited for. Refuses to know models.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import structlog

from paceline.process.ports import PortError
from paceline_executor.config import Config
from paceline_executor.errors import RankError
from paceline_executor.ranks.link import Link, LinkMessage, link_over
from paceline_executor.version import this_version

MEETING_S = 600.0
"""Images are pulled meanwhile, and pods placed."""
_HANDSHAKE_S = 10.0
_RETRY_S = 0.5
_MAX_GUESTS = 16  # that have not said yet who they are
# What may differ: where a node is, and what it says of itself.
_OWN = frozenset(
    {
        *("node", "host", "port", "health_port", "metrics_port", "tls_dir", "log_level"),
        *("arguments", "cache_dir", "hub_endpoint", "offline"),
    }
)


class Meeting:
    """Node 0's."""

    def __init__(self, config: Config, patience_s: float = MEETING_S) -> None:
        """Listens from now on. Raises PortError."""
        assert config.node is not None, "there are several nodes"
        self._config = config
        self._num_nodes = config.node.count
        self._patience_s = patience_s
        self._end_s = time.monotonic() + patience_s
        self._links: dict[int, Link] = {}
        self._changed = threading.Condition()
        self._guests = threading.Semaphore(_MAX_GUESTS)
        self._listener = listen(config.host, config.node.port, "--node")
        self.port = int(self._listener.getsockname()[1])
        structlog.get_logger().info("waiting_for_nodes", num_nodes=self._num_nodes, host=config.host, port=self.port)
        threading.Thread(target=self._accept, name="meeting", daemon=True).start()

    def links(self) -> Mapping[int, Link]:
        """Waits for all, by node. Raises RankError that names those that have not come."""
        with self._changed:
            is_full = self._changed.wait_for(lambda: not self._missing(), max(0.0, self._end_s - time.monotonic()))
            missing = self._missing()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts
        self._listener.close()
        if not is_full:
            for link in self._links.values():
                link.close()
            names = f"node {missing[0]} has" if len(missing) == 1 else f"nodes {', '.join(map(str, missing))} have"
            raise RankError(f"{names} not come within {self._patience_s:g} s: look at their logs")
        return self._links

    def _missing(self) -> list[int]:
        return [node for node in range(1, self._num_nodes) if node not in self._links]

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return  # all have come
            if self._guests.acquire(blocking=False):
                threading.Thread(target=self._welcome, args=(connection, address[0]), daemon=True).start()
            else:
                connection.close()

    def _welcome(self, connection: socket.socket, address: str) -> None:
        log = structlog.get_logger()
        try:
            with _link(connection, self._config, is_server=True) as link:
                told = _object_of(link.receive_one(LinkMessage.HELLO, _HANDSHAKE_S))
                self._take(told, link)
            log.info("node_joined", node=told["node"], address=address)
        except (OSError, RankError) as error:
            log.warning("node_refused", address=address, reason=str(error))
        finally:
            self._guests.release()

    def _take(self, told: Mapping[str, Any], link: Link) -> None:
        """It is one of the group from now on. Raises RankError where it cannot be."""
        with self._changed:
            if why := self._why_not(told):
                link.send(LinkMessage.HELLO, json.dumps({"error": why}).encode())
                raise RankError(why)
            link.send(LinkMessage.HELLO, b"{}")
            if earlier := self._links.pop(told["node"], None):
                earlier.close()
            self._links[told["node"]] = link
            self._changed.notify()

    def _why_not(self, told: Mapping[str, Any]) -> str:
        """Empty where nothing is."""
        own, node = hello_of(self._config), told.get("node")
        if told.get("version") != own["version"]:
            return f"node 0 has version {own['version']}: give all nodes the same"
        if told.get("count") != own["count"] or node not in range(1, self._num_nodes):
            return f"--node: this group has nodes 0 to {self._num_nodes - 1}"
        ours, options = own["options"], told.get("options")
        differing = [name for name in ours if not isinstance(options, dict) or options.get(name) != ours[name]]
        if differing:
            return f"node 0 has another {' and '.join(differing)}: give all nodes the same"
        if node in self._links and self._links[node].is_open():
            return f"--node: node {node} is here already"
        return ""


def join(config: Config, patience_s: float = MEETING_S) -> Link:
    """Another node's. Waits for node 0. Raises RankError where it does not come, or does not want this one."""
    assert config.node is not None, "there are several nodes"
    end_s, last = time.monotonic() + patience_s, ""
    while True:
        try:
            link = _called(config)
            break
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > end_s:
            raise RankError(f"node 0 at {config.node.address} was not reached within {patience_s:g} s: {reason}")
        if reason != last:
            structlog.get_logger().warning("node_0_away", address=config.node.address, reason=reason)
            last = reason
        time.sleep(_RETRY_S)
    structlog.get_logger().info("joined", node=config.node.index, num_nodes=config.node.count)
    return link


def _called(config: Config) -> Link:
    assert config.node is not None, "there are several nodes"
    connection = socket.create_connection((config.node.host, config.node.port), _HANDSHAKE_S)
    with _link(connection, config, is_server=False) as link:
        link.send(LinkMessage.HELLO, json.dumps(hello_of(config)).encode())
        answer = _object_of(link.receive_one(LinkMessage.HELLO, _HANDSHAKE_S))
        if "error" in answer:
            raise RankError(f"node 0 refuses this one: {answer['error']}")
    return link


@contextlib.contextmanager
def _link(connection: socket.socket, config: Config, *, is_server: bool) -> Iterator[Link]:
    """Closed where something fails."""
    connection.settimeout(_HANDSHAKE_S)
    link = link_over(connection, config.tls_dir, is_server=is_server)
    try:
        yield link
    except (OSError, RankError):
        link.close()
        raise


def hello_of(config: Config) -> dict[str, Any]:
    """What a node was started as."""
    assert config.node is not None, "there are several nodes"
    options = {
        f"--{each.name.replace('_', '-')}": str(getattr(config, each.name))
        for each in fields(config)
        if each.name not in _OWN
    }
    return {"node": config.node.index, "count": config.node.count, "version": this_version(), "options": options}


def listen(host: str, port: int, option: str | None = None) -> socket.socket:
    """Raises PortError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise PortError(host, port, error.strerror or str(error), option) from error
    return listener


def _object_of(body: bytearray) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RankError("what came is no message between nodes: give all nodes one version")
    return found

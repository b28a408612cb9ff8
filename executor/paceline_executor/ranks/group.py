"""The followers of rank 0: a node's child processes, how they begin, and whether they and other nodes live.

Each is told its order, says what it has opened, reads its part, and is ready once all agree and kernels are compiled.
One thread watches them from their start on: whatever happens to one rank ends all. Refuses to know steps.
"""

import contextlib
import json
import os
import queue
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import structlog

from paceline_executor.errors import RankError
from paceline_executor.limits import RowLimits
from paceline_executor.ranks.link import Link, LinkMessage
from paceline_executor.ranks.memory import NUM_POSTS, Descriptors, GroupMemory
from paceline_executor.ranks.order import Order

_LOOK_S = 0.1
# So many looks without a beat: a follower that starts imports libraries and reads files, and networks lose packets.
_STARTING_LOOKS, _RUNNING_LOOKS, _NODE_LOOKS = 600, 10, 30

Answer = Mapping[str, Any]
OnLost = Callable[[RankError], None]
"""Called by the thread that watches; what it does must not wait for a step, which may never end."""


@dataclass(slots=True)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    pidfd: int
    received: bytes = b""
    last_beat: int = 0
    num_still: int = 0  # looks without a beat


@dataclass(slots=True)
class _Node:
    index: int
    link: Link
    has_beaten: bool = False  # since the last look
    num_still: int = 0


class RankGroup:
    """As rank 0 has it, or the head of another node its own part. Its processes end with this one, or by `close`."""

    def __init__(
        self,
        order: Order,
        on_lost: OnLost,
        links: Mapping[int, Link] | None = None,
        on_answer: Callable[[int, Answer], None] | None = None,
        on_leaving: Callable[[], None] = lambda: None,
        listening: int | None = None,
    ) -> None:
        """Starts them. links: of rank 0, to other nodes, one of which may be told to stop: on_leaving. on_answer: of a
        head, who tells rank 0. listening: see Descriptors.
        """
        self._order = order
        self._on_lost, self._on_leaving = on_lost, on_leaving
        self._descriptors = Descriptors.new(order.share.degree, listening)
        self.memory = GroupMemory(self._descriptors, order.share.ranks.start, order.share, order.store_at)
        self._children: list[_Child] = []
        self._nodes = [_Node(index, link) for index, link in (links or {}).items()]
        self._answers: queue.SimpleQueue[tuple[int, Answer | RankError]] = queue.SimpleQueue()
        self._on_answer = on_answer or (lambda rank, answer: self._answers.put((rank, answer)))
        self._max_still = self._max_still_of_nodes = _STARTING_LOOKS
        self._is_closed = False
        # The system ends a child with the thread that made it, so that is the one that stays.
        self._watch = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._watch.start()

    def agree(self, identity: Mapping[str, str], num_blocks: int) -> int:
        """Waits until all have opened the model. num_blocks: that rank 0 has memory for. Returns for how many all have.

        Raises RankError where a rank has another version, model or device.
        """
        for rank, opened in self._collect():
            differing = [name for name, value in identity.items() if opened["identity"].get(name) != value]
            if differing:
                name = self._order.share.name_of(rank)
                raise RankError(f"{name} has another {' and '.join(differing)} than rank 0: give all ranks the same")
            if opened["num_blocks"] < num_blocks:
                num_blocks = opened["num_blocks"]
                structlog.get_logger().warning("least_memory", rank=rank, num_blocks=num_blocks)
        return num_blocks

    def begin(self, limits: RowLimits) -> None:
        """Kernels are compiled, and kept where they find them."""
        told = json.dumps(asdict(limits)).encode()
        self.tell_limits(told)
        self.tell_nodes(LinkMessage.LIMITS, told)

    def tell_limits(self, limits: bytes | bytearray) -> None:
        for child in self._children:
            with contextlib.suppress(OSError):  # whoever watches says what has become of it
                child.control.sendall(limits + b"\n")

    def tell_nodes(self, kind: LinkMessage, body: bytes) -> None:
        for node in self._nodes:
            with contextlib.suppress(OSError):  # as above
                node.link.send(kind, body)

    def until_ready(self) -> None:
        self._collect()

    def has_warmed_up(self) -> None:
        """From now on nothing keeps a rank from its beats, so one that stands still is lost soon."""
        self._max_still, self._max_still_of_nodes = _RUNNING_LOOKS, _NODE_LOOKS
        self.tell_nodes(LinkMessage.WARM, b"")

    def close(self) -> None:
        """Ends them."""
        self._is_closed = True
        self._watch.join()
        self._kill()
        for child in self._children:
            child.process.wait()
            child.control.close()
            os.close(child.pidfd)
        self._descriptors.close()

    def _collect(self) -> list[tuple[int, Answer]]:
        """An answer of each. Raises RankError where one is lost."""
        answers: list[tuple[int, Answer]] = []
        for _ in range(1, self._order.share.degree):
            rank, answer = self._answers.get()
            if isinstance(answer, RankError):
                raise answer
            answers.append((rank, answer))
        return answers

    def _run(self) -> None:
        try:
            self.tell_nodes(LinkMessage.ORDER, json.dumps([self._order.runner, self._order.store_at]).encode())
            for rank in self._order.share.followers:
                self._children.append(_start(rank, self._order, self._descriptors))
            while not self._is_closed:
                self._look()
        except RankError as error:
            self._kill()
            self._on_lost(error)
            self._answers.put((0, error))

    def _look(self) -> None:
        by_file = {file: child for child in self._children for file in (child.control.fileno(), child.pidfd)}
        nodes = {node.link.fileno(): node for node in self._nodes}
        poll = select.poll()
        for file in (*by_file, *nodes):
            poll.register(file, select.POLLIN)
        end_s = time.monotonic() + _LOOK_S
        while (left_s := end_s - time.monotonic()) > 0:
            files = [file for file, _ in poll.poll(1000 * left_s)]
            ready = [by_file[file] for file in files if file in by_file]
            for child in ready:
                self._receive(child)
            for child in ready:
                if child.process.poll() is not None:
                    name = self._order.share.name_of(child.rank)
                    raise RankError(f"{name} {_ended(child.process.returncode)}, so all ranks end")
            for file in nodes.keys() & files:
                self._receive_of(nodes[file])
        self._check_beats()

    def _receive_of(self, node: _Node) -> None:
        ranks = self._order.share.ranks_of(node.index)
        try:
            for kind, body in node.link.receive():
                if kind is LinkMessage.POSTS:
                    _post(self.memory, ranks, body)
                elif kind is LinkMessage.ANSWER:
                    self._on_answer(*_answer_of(body, ranks))
                elif kind is LinkMessage.LEAVING:
                    self._on_leaving()
                node.has_beaten = True
        except ConnectionError as error:
            raise RankError(f"the connection to node {node.index} has ended, so all ranks end") from error

    def _receive(self, child: _Child) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            child.received += child.control.recv(1 << 16)
        *lines, child.received = child.received.split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "error" in answer:
                name = self._order.share.name_of(child.rank)
                raise RankError(f"{name} has failed, so all ranks end: {answer['error']}")
            self._on_answer(child.rank, answer)

    def _check_beats(self) -> None:
        """By looks, not by a clock: this process may have stood still itself, or all of them."""
        for child in self._children:
            beat = int(self.memory.beats[child.rank])
            child.num_still = child.num_still + 1 if beat == child.last_beat else 0
            child.last_beat = beat
            if child.num_still > self._max_still:
                name = self._order.share.name_of(child.rank)
                raise RankError(f"{name} (process {child.process.pid}) stands still, so all ranks end")
        for node in self._nodes:
            node.num_still = 0 if node.has_beaten else node.num_still + 1
            node.has_beaten = False
            if node.num_still > self._max_still_of_nodes:
                raise RankError(f"node {node.index} stands still, so all ranks end")

    def _kill(self) -> None:
        for child in self._children:
            child.process.kill()


def _start(rank: int, order: Order, descriptors: Descriptors) -> _Child:
    ours, theirs = socket.socketpair()
    arguments = [str(rank), str(os.getpid()), str(theirs.fileno()), descriptors.json()]
    with theirs:
        try:
            process = subprocess.Popen(  # noqa: S603, of this program alone
                [sys.executable, "-m", "paceline_executor.start.follower", *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *descriptors.all),
            )
        except OSError as error:
            raise RankError(f"{order.share.name_of(rank)} could not be started: {error.strerror}") from error
    with contextlib.suppress(OSError):
        ours.sendall(order.json().encode() + b"\n")
    ours.setblocking(False)
    return _Child(rank, process, ours, os.pidfd_open(process.pid))


def _answer_of(body: bytearray, ranks: range) -> tuple[int, Answer]:
    """Raises RankError for a node that has failed, or talks of what is not its own."""
    try:
        answer = json.loads(body)
        if "error" in answer:
            raise RankError(str(answer["error"]))
        rank, opened = answer
        if rank in ranks and (not opened or (opened["identity"].keys() and int(opened["num_blocks"]) > 0)):
            return rank, opened
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise RankError("another node sent what is no answer: give all nodes one version")


def _post(memory: GroupMemory, ranks: range, body: bytearray) -> None:
    words = np.frombuffer(body, "<i8") if len(body) == 8 * (1 + len(ranks)) else np.zeros(0, "<i8")
    if words.size == 0 or words[0] < 0:
        raise RankError("another node sent what are no hashes: give all nodes one version")
    places = memory.posts[ranks.start : ranks.stop, int(words[0]) % NUM_POSTS]
    places[:, 1] = words[1:]
    places[:, 0] = words[0] + 1
    memory.post_wake.give()


def _ended(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

"""The followers of rank 0: its child processes, how they begin, and whether they live.

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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from paceline_executor.errors import RankError
from paceline_executor.limits import RowLimits
from paceline_executor.ranks.memory import Descriptors, GroupMemory
from paceline_executor.ranks.order import Order

_LOOK_MS = 100
# So many looks without a beat: a follower that starts imports libraries and reads files.
_STARTING_LOOKS, _RUNNING_LOOKS = 600, 10

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


class RankGroup:
    """As rank 0 has it. Its processes end with this one, or by `close`."""

    def __init__(self, order: Order, on_lost: OnLost) -> None:
        """Starts them."""
        self._order = order
        self._on_lost = on_lost
        self._descriptors = Descriptors.new(order.degree)
        self.memory = GroupMemory(self._descriptors, 0, order.degree)
        self._children: list[_Child] = []
        self._answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._max_still = _STARTING_LOOKS
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
                raise RankError(
                    f"rank {rank} has another {' and '.join(differing)} than rank 0: give all ranks the same"
                )
            if opened["num_blocks"] < num_blocks:
                num_blocks = opened["num_blocks"]
                structlog.get_logger().warning("least_memory", rank=rank, num_blocks=num_blocks)
        return num_blocks

    def begin(self, limits: RowLimits) -> None:
        """Kernels are compiled, and kept where they find them."""
        for child in self._children:
            with contextlib.suppress(OSError):  # whoever watches says what has become of it
                child.control.sendall(json.dumps(asdict(limits)).encode() + b"\n")

    def until_ready(self) -> None:
        self._collect()

    def has_warmed_up(self) -> None:
        """From now on nothing keeps a rank from its beats, so one that stands still is lost soon."""
        self._max_still = _RUNNING_LOOKS

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

    def _collect(self) -> list[tuple[int, Any]]:
        """An answer of each. Raises RankError where one is lost."""
        answers = [self._answers.get() for _ in range(self._order.degree - 1)]
        for _, answer in answers:
            if isinstance(answer, RankError):
                raise answer
        return answers

    def _run(self) -> None:
        try:
            for rank in range(1, self._order.degree):
                self._children.append(_start(rank, self._order, self._descriptors))
            while not self._is_closed:
                self._look()
        except RankError as error:
            self._kill()
            self._on_lost(error)
            for rank in range(1, self._order.degree):
                self._answers.put((rank, error))

    def _look(self) -> None:
        by_file = {file: child for child in self._children for file in (child.control.fileno(), child.pidfd)}
        poll = select.poll()
        for child in self._children:
            poll.register(child.pidfd, select.POLLIN)
            poll.register(child.control, select.POLLIN)
        ready = [by_file[file] for file, _ in poll.poll(_LOOK_MS)]
        for child in ready:
            self._receive(child)
        for child in ready:
            if child.process.poll() is not None:
                raise RankError(f"rank {child.rank} {_ended(child.process.returncode)}, so all ranks end")
        if not ready:
            self._check_beats()

    def _receive(self, child: _Child) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            child.received += child.control.recv(1 << 16)
        *lines, child.received = child.received.split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if "error" in answer:
                raise RankError(f"rank {child.rank} has failed, so all ranks end: {answer['error']}")
            self._answers.put((child.rank, answer))

    def _check_beats(self) -> None:
        """By looks, not by a clock: this process may have stood still itself, or all of them."""
        for child in self._children:
            beat = int(self.memory.beats[child.rank])
            child.num_still = child.num_still + 1 if beat == child.last_beat else 0
            child.last_beat = beat
            if child.num_still > self._max_still:
                raise RankError(f"rank {child.rank} (process {child.process.pid}) stands still, so all ranks end")

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
            raise RankError(f"rank {rank} could not be started: {error.strerror}") from error
    with contextlib.suppress(OSError):
        ours.sendall(order.json().encode() + b"\n")
    ours.setblocking(False)
    return _Child(rank, process, ours, os.pidfd_open(process.pid))


def _ended(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

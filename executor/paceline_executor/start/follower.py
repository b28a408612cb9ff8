"""The process of any rank but 0: loads its part of the model and follows. It has no port, no rows and no requests.

It ends with rank 0, whatever it waits for then. Runs by itself, as `ranks.group` starts it.
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import structlog

from paceline.process.command import ExitCode, end
from paceline.process.logs import set_up_logs
from paceline_executor.config import Config, RunnerKind, let_waiting_threads_sleep, parse_config
from paceline_executor.errors import ExecutorError
from paceline_executor.limits import RowLimits
from paceline_executor.ranks.guard import Posts
from paceline_executor.ranks.memory import Descriptors, GroupMemory
from paceline_executor.ranks.messages import Message, decode
from paceline_executor.ranks.order import Order, identity_of
from paceline_executor.ranks.ring import BatchRingReader
from paceline_executor.start.opening import read_model

if TYPE_CHECKING:
    from paceline_executor.runner.device.runner import DeviceRunner

_BEAT_MS = 100
_PR_SET_PDEATHSIG = 1


class Rank(Protocol):
    """What a follower loads."""

    @property
    def device(self) -> str:
        """For people: all ranks have the same kind."""
        ...

    @property
    def num_blocks(self) -> int:
        """That fit beside its part of the model."""
        ...

    def build(self, limits: RowLimits) -> "DeviceRunner":
        """Once kernels are compiled, and kept where this process finds them."""
        ...


def main(arguments: Sequence[str]) -> NoReturn:
    """arguments: as `RankGroup` gives them."""
    rank, parent, control_file = map(int, arguments[:3])
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all: rank 0 drains, and ends this one
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ExitCode.FAILED)
    control = socket.socket(fileno=control_file)
    order = Order.from_json(_line_of(control))
    config = parse_config(order.arguments)
    let_waiting_threads_sleep()
    memory = GroupMemory(Descriptors.from_json(arguments[3]), rank, order.share, order.store_at)
    threading.Thread(target=_live, args=(control, memory), name="life", daemon=True).start()
    log = set_up_logs(config.log_level)
    try:
        _follow(config, order, memory, control)
    except ExecutorError as error:
        sentence = str(error)
    except Exception as error:
        structlog.get_logger().exception("rank_failed", rank=rank)
        sentence = f"an unexpected {type(error).__name__}; its log says more"
    _tell(control, {"error": sentence})
    end(log, ExitCode.FAILED)


def _live(control: socket.socket, memory: GroupMemory) -> NoReturn:
    """Until rank 0 ends. Whatever the others of this process wait for then, it ends, too."""
    poll = select.poll()
    poll.register(control, select.POLLRDHUP)
    while not poll.poll(_BEAT_MS):
        memory.beat()
    os._exit(ExitCode.OK)


def _follow(config: Config, order: Order, memory: GroupMemory, control: socket.socket) -> NoReturn:
    opened, kind = read_model(config, Path(order.path)), RunnerKind(order.runner)

    from paceline_executor.ranks.ranked_runner import FollowingRank  # with torch, which takes seconds to import

    if kind is RunnerKind.CPU:
        from paceline_executor.start.loading_cpu import CpuRank

        rank: Rank = CpuRank(config, opened.checkpoint, memory)
    else:
        from paceline_executor.start.loading_device import rank_on_device

        rank = rank_on_device(config, kind, opened, memory)
    _tell(control, {"identity": identity_of(opened.checkpoint, rank.device), "num_blocks": rank.num_blocks})
    limits = RowLimits(**json.loads(_line_of(control)))
    follower = FollowingRank(rank.build(limits), Posts(memory))
    gc.collect()
    gc.freeze()
    _tell(control, {})
    reader = BatchRingReader(memory)

    def read(timeout_s: float | None) -> Message | None:
        message = reader.read(timeout_s)
        return None if message is None else decode(message)

    follower.follow(read)


def _line_of(control: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n"):
        received = control.recv(1 << 16)
        if not received:
            os._exit(ExitCode.OK)
        line += received
    return line.decode()


def _tell(control: socket.socket, answer: Mapping[str, object]) -> None:
    with contextlib.suppress(OSError):
        control.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The first process of a node other than 0: it joins node 0, starts its node's ranks, and carries word between them.

It has no rank, no device and no port, and ends with node 0, or when one of its ranks does. Refuses to know steps.
"""

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import numpy as np

from paceline.process.command import ExitCode
from paceline_executor.config import Config
from paceline_executor.errors import ExecutorError, RankError
from paceline_executor.ranks.group import Answer, RankGroup
from paceline_executor.ranks.link import Link, LinkMessage
from paceline_executor.ranks.meeting import join
from paceline_executor.ranks.memory import NUM_POSTS, GroupMemory
from paceline_executor.ranks.order import Order
from paceline_executor.ranks.ring import BatchRingWriter
from paceline_executor.start.opening import ProgressLog, open_model

_BEAT_S = 0.1


def run_node(config: Config, fail: Callable[[RankError], NoReturn]) -> NoReturn:
    """fail: ends the process, from any thread. Raises ModelError, LimitError, RankError."""
    link = join(config)
    head = _Head(config, link, fail)
    try:
        path = str(open_model(config, ProgressLog()).path)
    except ExecutorError as error:
        head.say_lost(RankError(f"node {config.share.node} has failed, so all ranks end: {error}"))
        raise
    head.serve(path)


class _Head:
    def __init__(self, config: Config, link: Link, fail: Callable[[RankError], NoReturn]) -> None:
        """Beats from now on."""
        self._config = config
        self._link = link
        self._fail = fail
        self._ending = threading.Lock()  # for ever of whoever ends this process
        self._is_stopping = False
        threading.Thread(target=self._beat, name="life", daemon=True).start()

    def serve(self, path: str) -> NoReturn:
        """path: of the model."""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        group: RankGroup | None = None
        while True:
            try:
                for kind, body in self._link.receive():
                    group = self._take(kind, body, group, path)
            except OSError:
                self._leave()
            poll.poll()

    def say_lost(self, error: RankError) -> None:
        self._tell(LinkMessage.ANSWER, json.dumps({"error": str(error)}).encode())

    def _take(self, kind: LinkMessage, body: bytearray, group: RankGroup | None, path: str) -> RankGroup:
        if kind is LinkMessage.ORDER and group is None:
            return self._start(body, path)
        if group is None:
            raise RankError("node 0 sent another message than was due: give all nodes one version")
        if kind is LinkMessage.LIMITS:
            group.tell_limits(body)
        elif kind is LinkMessage.WARM:
            group.has_warmed_up()
        elif kind is LinkMessage.BATCH:
            BatchRingWriter(group.memory).write(body)
        return group

    def _start(self, body: bytearray, path: str) -> RankGroup:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        runner, store_at = json.loads(body)
        order = Order(self._config.arguments, path, runner, self._config.share, tuple(store_at))
        group = RankGroup(order, self._lose, on_answer=self._answer)
        threading.Thread(target=self._send_posts, args=(group.memory,), name="posts", daemon=True).start()
        return group

    def _stop(self, number: int, _: object) -> None:
        """Node 0 is told by the next beat, and drains; this node ends with it."""
        if self._is_stopping:
            os._exit(128 + number)
        self._is_stopping = True

    def _answer(self, rank: int, answer: Answer) -> None:
        self._tell(LinkMessage.ANSWER, json.dumps([rank, answer]).encode())

    def _lose(self, error: RankError) -> NoReturn:
        self._ending.acquire()
        self.say_lost(error)
        self._fail(error)

    def _leave(self) -> NoReturn:
        self._ending.acquire()
        if self._is_stopping:
            os._exit(ExitCode.OK)
        self._fail(RankError("the connection to node 0 has ended, so all ranks end"))

    def _beat(self) -> NoReturn:
        while True:
            try:
                self._link.send(LinkMessage.LEAVING if self._is_stopping else LinkMessage.BEAT)
            except OSError:
                self._leave()
            time.sleep(_BEAT_S)

    def _send_posts(self, memory: GroupMemory) -> NoReturn:
        """Step by step, what each rank drew."""
        ranks = memory.share.ranks
        step = 0
        while True:
            posts = memory.posts[ranks.start : ranks.stop, step % NUM_POSTS]
            memory.post_wake.wait_until(partial(_are_posted, posts, step))
            self._tell(LinkMessage.POSTS, np.array([step, *posts[:, 1]], "<i8").tobytes())
            step += 1

    def _tell(self, kind: LinkMessage, body: bytes) -> None:
        with contextlib.suppress(OSError):  # the thread that beats, or that receives, ends this process
            self._link.send(kind, body)


def _are_posted(posts: np.ndarray, step: int) -> bool:
    return bool((posts[:, 0] > step).all())

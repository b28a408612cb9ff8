"""Ranks as threads of one process, of which one computes at a time, and which meet where they gather their parts."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
_PATIENCE_S = 30


class Turns:
    """Whoever computes has the turn; whoever waits for the others' parts gives it back meanwhile."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(degree)
        self._parts = [torch.empty(0)] * degree

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Nobody waits for the parts of one that has failed."""
        try:
            with self._lock:
                yield
        except BaseException:
            self._barrier.abort()
            raise

    def gather(self, rank: int, part: torch.Tensor) -> torch.Tensor:
        self._parts[rank] = part
        self._meet()
        gathered = torch.stack(self._parts)
        self._meet()
        return gathered

    def _meet(self) -> None:
        self._lock.release()
        try:
            self._barrier.wait(_PATIENCE_S)
        finally:
            self._lock.acquire()


def by_ranks(degree: int, work: Callable[[int, Callable[[torch.Tensor], torch.Tensor]], T]) -> list[T]:
    """work: is given a rank and its `gather`. Returns what each rank's returns."""
    turns = Turns(degree)

    def in_turn(rank: int) -> T:
        with turns.turn():
            return work(rank, lambda part: turns.gather(rank, part))

    with ThreadPoolExecutor(degree) as threads:
        return list(threads.map(in_turn, range(degree)))

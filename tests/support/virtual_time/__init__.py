"""An event loop whose time passes only when nothing else is left to do, so that timeouts cost a test nothing."""

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_LIMIT_S = 3600
_Ready = list[tuple[selectors.SelectorKey, int]]


class _IdleSelector(selectors.DefaultSelector):
    """Lets virtual time pass instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> _Ready:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits for something that never comes"
            self.now_s += max(0.0, timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code that uses no sockets and no threads."""

    def __init__(self) -> None:
        self._idle_selector = _IdleSelector()
        super().__init__(self._idle_selector)

    def time(self) -> float:
        return self._idle_selector.now_s


def run_in_virtual_time(main: Coroutine[Any, Any, _T]) -> _T:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def in_virtual_time(test: Callable[_P, Coroutine[Any, Any, None]]) -> Callable[_P, None]:
    """Runs a coroutine, an hour at most."""

    @functools.wraps(test)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        run_in_virtual_time(asyncio.wait_for(test(*args, **kwargs), _LIMIT_S))

    return run


def now() -> float:
    """Seconds of the loop that runs."""
    return asyncio.get_running_loop().time()

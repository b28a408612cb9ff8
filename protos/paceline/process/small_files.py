"""Small files that an operator names: regular ones, whole, and in bounded time.

A FIFO or a device would keep its reader waiting for somebody. A disk that hangs cannot be interrupted: it costs a
thread, which nobody waits for.
"""

import errno
import os
import stat
import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import BinaryIO, TypeVar

MAX_BYTES = 4 << 20
PATIENCE_S = 10.0
_Result = TypeVar("_Result")
_given_up: dict[Hashable, threading.Thread] = {}


def read_small_file(path: Path, max_bytes: int = MAX_BYTES, patience_s: float = PATIENCE_S) -> bytes:
    """Raises OSError, whose `errno` is EFBIG where there are more bytes."""
    return in_time(lambda: read_regular(path, max_bytes), path, patience_s)


def in_time(call: Callable[[], _Result], what: Hashable, patience_s: float = PATIENCE_S) -> _Result:
    """Call something on a thread of its own. Raises TimeoutError, an OSError, where that takes longer; then at once,
    until that call has ended.
    """
    results, errors = list[_Result](), list[BaseException]()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    if (hanging := _given_up.get(what)) is None or not hanging.is_alive():
        thread = threading.Thread(target=run, name="small files", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error), str(what)) from None
        thread.join(patience_s)
        if errors:
            raise errors[0]
        if results:
            return results[0]
        _given_up[what] = thread
    raise TimeoutError(errno.ETIMEDOUT, "its disk does not answer", str(what))


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Raises OSError, as above."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", str(path))
    return data


def open_regular(path: Path) -> BinaryIO:
    """Raises OSError also for what is no regular file."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(file, "rb")

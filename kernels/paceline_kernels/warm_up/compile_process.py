"""Has operations compiled by a process of its own, so that what serves never holds a compiler's memory.

Compiling takes some 250 MiB that nothing gives back. The other process writes the code to disk, where this one finds
it, and ends when this one does, however that ends. `python -m paceline_kernels.warm_up.compile_process OPERATION...`
does the same beforehand, for an image.

Knows processes. It refuses to know what an operation is, and where its code is kept.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from paceline_kernels.compiler import jit
from paceline_kernels.warm_up.calls import CPU_CALLS

_POLL_S = 0.2

_log = logging.getLogger(__name__)


def have_ready(operations: Sequence[str], on_begin: Callable[[str, bool], None]) -> None:
    """Make these operations (names of `calls.CPU_CALLS`) ready for this process: no later call compiles.

    Takes a second or two where their code is on disk, else about a minute. `on_begin` is told each operation that
    is about to be read from disk, or, with True, compiled. Where code cannot be kept on disk, this process compiles it.
    For the thread that will call the operations; it computes with one thread afterwards.
    """
    jit.set_num_threads(1)
    missing = []
    for name in operations:
        on_begin(name, False)
        if not _is_kept(name):
            missing.append(name)
    if missing:
        _compile_elsewhere(missing, on_begin)
    for name in missing:
        on_begin(name, False)
        CPU_CALLS[name]()


def _is_kept(name: str) -> bool:
    """Call the operation with what is on disk, if it is."""
    try:
        with jit.only_kept():
            CPU_CALLS[name]()
    except jit.NotKeptError:
        return False
    return True


def _compile_elsewhere(names: Sequence[str], on_begin: Callable[[str, bool], None]) -> None:
    command = [sys.executable, "-P", "-m", "paceline_kernels.warm_up.compile_process", *names]
    try:
        # Ctrl-C is for this process, and the other one ends with it.
        with subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, process_group=0
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() in names:  # libraries print, too, where they are told to
                    on_begin(line.strip(), True)
    except OSError as error:
        _log.warning("no process can be started to compile kernels, this one does: %s", error)
        return
    if process.returncode:
        _log.warning("the process that compiles kernels ended with %d, this one goes on", process.returncode)


def _main() -> None:
    """Compile the operations on the command line, naming each on stdout as it begins."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # without a traceback, where nobody reads any more
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    jit.set_num_threads(1)
    for name in sys.argv[1:]:
        print(name, flush=True)
        CPU_CALLS[name]()


def _end_with_parent(parent: int) -> None:
    """Who loses its parent gets another one."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(1)


if __name__ == "__main__":
    _main()

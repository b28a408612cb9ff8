"""Has kernels for GPUs compiled by several processes at once, onto disk, where whoever launches them finds them.

Triton compiles one kernel after another in the process that launches it, and a model needs a hundred. Each process gets
the next launch when it is done with one: they read lines and write lines, and end when their input does, also because
who started them died. Ctrl-C does not reach them. None of them uses the GPU.

What launches them from C is compiled, too, where there is a driver of CUDA to link it with.

Knows processes and Triton's cache. It refuses to know what launches are for.
"""

import contextlib
import json
import logging
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline_kernels.errors import KernelCompileError
from paceline_kernels.warm_up.triton_launches import KernelLaunch

_log = logging.getLogger(__name__)
_MAX_PROCESSES = 24  # each takes 150 MB and compiles a kernel in half a second: a model needs fifty


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of launches."""

    num_compiled: int
    num_kept: int  # were on disk
    num_lost: int  # of processes that ended; whoever launches those compiles them


def compile_launches(
    find: Callable[[], Sequence[KernelLaunch]],
    capability: int,
    folder: Path,
    num_processes: int,
    on_done: Callable[[int, int], object] = lambda _done, _all: None,
) -> Compiled:
    """Compile launches for a GPU of this compute capability, times ten, into Triton's cache in `folder`.

    find: called while the processes start, which takes as long. on_done: told by several threads how many of how many
    are done. Raises what `find` raises; KernelCompileError, after the others are done, for what the compiler refuses.
    """
    pool = _Pool(on_done)
    command = [sys.executable, "-P", "-m", "paceline_kernels.warm_up.triton_processes", str(capability), str(folder)]
    threads = [
        threading.Thread(target=pool.serve, args=(command,), name=f"compile {number}")
        for number in range(min(num_processes, _MAX_PROCESSES))
    ]
    for thread in threads:
        thread.start()
    try:
        pool.fill(launches := find())
    finally:
        pool.close()
        for thread in threads:
            thread.join()
    if pool.errors:
        raise KernelCompileError("; ".join(pool.errors[:3]))
    num_lost = len(launches) - len(pool.was_kept)
    return Compiled(pool.was_kept.count(False), pool.was_kept.count(True), num_lost)


class _Pool:
    """What is left to compile, and what became of the rest."""

    def __init__(self, on_done: Callable[[int, int], object]) -> None:
        self._left: deque[KernelLaunch] = deque()
        self._num_launches = 0
        self._is_filled = threading.Event()
        self._on_done = on_done
        self._lock = threading.Lock()
        self.was_kept: list[bool] = []
        self.errors: list[str] = []

    def fill(self, launches: Sequence[KernelLaunch]) -> None:
        self._left.extend(launches)
        self._num_launches = len(launches)
        self._on_done(0, self._num_launches)

    def close(self) -> None:
        """No launch comes any more: processes end when none is left."""
        self._is_filled.set()

    def serve(self, command: Sequence[str]) -> None:
        """Start a process and give it launches until none is left, or it has ended."""
        try:
            process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
            )
        except OSError as error:
            _log.warning("no process can be started to compile kernels: %s", error)
            return
        with contextlib.suppress(BrokenPipeError), process:  # what it did not read is written again at the end
            assert process.stdin is not None
            assert process.stdout is not None
            self._is_filled.wait()
            while self._left:
                try:
                    launch = self._left.popleft()
                except IndexError:  # another process took the last one
                    break
                try:
                    print(json.dumps([launch.kernel, launch.specialization]), file=process.stdin, flush=True)
                    answer = process.stdout.readline()
                except BrokenPipeError:
                    answer = ""
                if not answer:
                    _log.warning("a process that compiles kernels ended with %s at %s", process.wait(), launch.kernel)
                    return
                self._note(launch, json.loads(answer))

    def _note(self, launch: KernelLaunch, answer: bool | str) -> None:
        with self._lock:
            if isinstance(answer, str):
                self.errors.append(f"{launch.kernel}: {answer}")
            else:
                self.was_kept.append(answer)
            self._on_done(len(self.was_kept) + len(self.errors), self._num_launches)


def _main() -> None:
    """Compile what comes in, line by line; answer whether it was on disk, or in a sentence what is wrong with it."""
    import triton

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # without a traceback, where nobody reads any more
    triton.knobs.cache.dir = sys.argv[2]

    from paceline_kernels.gpu.no_gpu import compile_for
    from paceline_kernels.warm_up.triton_kernels import KERNELS, settle_keys

    compile_for(int(sys.argv[1]))
    settle_keys()
    hits: list[bool] = []

    def listen(*, src: object, metadata: object, metadata_group: object, times: object, cache_hit: bool) -> None:  # noqa: ARG001
        hits.append(cache_hit)

    triton.knobs.compilation.listener = listen
    answers, sys.stdout = sys.stdout, sys.stderr  # a compiler that fails prints
    for line in sys.stdin:
        kernel, specialization = json.loads(line)
        try:
            _build_launcher(KERNELS[kernel].preload(specialization))
            answer: bool | str = hits[-1]
        except Exception as error:  # whatever the compiler raises is about this kernel
            answer = " ".join(f"{type(error).__name__}: {error}".split())
        print(json.dumps(answer), file=answers, flush=True)


def _build_launcher(kernel: Any) -> None:  # noqa: ANN401  Triton has no types
    """Of each signature, by the C compiler. It takes as long as a small kernel, at the first launch otherwise."""
    from triton.backends.nvidia.driver import CudaLauncher

    with contextlib.suppress(Exception):  # whoever launches it is told what is wrong
        CudaLauncher(kernel.src, kernel.metadata)


if __name__ == "__main__":
    _main()

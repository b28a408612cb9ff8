"""Becomes another program after asking the kernel to kill it when its parent dies.

Apart, because it is run as a script:

    python launcher.py PARENT_PROCESS_ID PROGRAM ARGUMENT...

A child that is left behind would keep its ports and its memory. The usual way, code between fork and exec, is not safe
in a process with threads, so this small program asks for it in its own process and then replaces itself. The signal is
SIGKILL: it is sent only when the parent was killed itself and can no longer wait for a drain. It comes when the
*thread* that started this process ends, so that must be the parent's main thread. Linux only; elsewhere it does nothing
but replace itself. It imports nothing of this package, so that it costs a few milliseconds.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Never returns."""
    parent_id, program, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have died before the kernel was asked: then nobody will ever be told.
        if os.getppid() != int(parent_id):
            sys.exit(1)
    try:
        os.execv(program, [program, *arguments])  # noqa: S606  the program is the supervisor's choice
    except OSError as error:
        sys.exit(f"cannot run {program}: {error.strerror}")


if __name__ == "__main__":
    main()

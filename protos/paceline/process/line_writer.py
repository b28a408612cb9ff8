"""Lines for a file descriptor, written by a thread of their own.

A disk that is full, a pipe that nobody reads and one that is closed stop no work: lines that find no room are lost,
are counted, and their number is told as soon as a line can be written again.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable

MAX_WAITING_LINES = 1024


class LineWriter:
    """Writes lines to a file descriptor, in order. Who hands one in never waits and never fails.

    `tell_lost` makes the line that says how many were lost. The file belongs to the caller.
    """

    def __init__(
        self,
        file: int,
        tell_lost: Callable[[int], str],
        max_waiting_lines: int = MAX_WAITING_LINES,
        encoding: str = "utf-8",
    ) -> None:
        self._file = file
        self._tell_lost = tell_lost
        self._encoding = encoding
        self._max_waiting_lines = max_waiting_lines
        self._waiting: deque[str] = deque()  # the first one is being written
        self._held: dict[Hashable, tuple[float, str]] = {}  # lines by their cause, and when they are due
        self._changed = threading.Condition()
        self._num_lost = self._num_told = 0
        self._is_cut = False
        self._is_closed = False
        threading.Thread(target=self._run, name="logs", daemon=True).start()

    @property
    def num_lost(self) -> int:
        return self._num_lost

    def write(self, text: str) -> int:
        """Take whole lines; they are lost if too many wait already."""
        with self._changed:
            if len(self._waiting) < self._max_waiting_lines and not self._is_closed:
                self._waiting.append(text)
                self._changed.notify_all()
            else:
                self._num_lost += 1
        return len(text)

    def hold(self, cause: Hashable, due_s: float, text: str) -> None:
        """Take a whole line to be written later, in place of one of the same cause that is still held."""
        with self._changed:
            self._held[cause] = due_s, text
            self._changed.notify_all()

    def flush(self) -> None:
        """Do nothing: each line is written at once."""

    def finish(self, timeout_s: float) -> None:
        """Wait until everything is written or lost, but not for longer than this."""
        self._release(float("inf"))
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Wait like `finish`, then let the thread end. What comes later is lost."""
        self.finish(timeout_s)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            self._release(time.monotonic())
            with self._changed:
                if not self._waiting and not self._is_closed:
                    self._changed.wait(self._until_due())  # a line that is held meanwhile may be due earlier
                if not self._waiting and self._is_closed:
                    return
                if not self._waiting:
                    continue
                text, num_lost = self._waiting[0], self._num_lost
            if num_lost > self._num_told:
                text = self._tell_lost(num_lost - self._num_told) + text
            is_written = self._put(text.encode(self._encoding, "backslashreplace"))
            with self._changed:
                if is_written:
                    self._num_told = num_lost
                else:
                    self._num_lost += 1
                self._waiting.popleft()
                self._changed.notify_all()

    def _release(self, now_s: float) -> None:
        """Let those lines that are due wait to be written."""
        with self._changed:
            due = [cause for cause, (due_s, _) in self._held.items() if due_s <= now_s]
            lines = [self._held.pop(cause)[1] for cause in due]
        for line in lines:
            self.write(line)

    def _until_due(self) -> float | None:
        due = [due_s for due_s, _ in self._held.values()]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _put(self, data: bytes) -> bool:
        """Write all of it, beginning with a new line if the last one was cut off; returns whether that succeeded."""
        rest = b"\n" + data if self._is_cut else data
        try:
            while rest:
                num_written = os.write(self._file, rest)
                written, rest = rest[:num_written], rest[num_written:]
                self._is_cut = bool(rest) and written[-1:] != b"\n"
        except OSError:
            return False
        return True

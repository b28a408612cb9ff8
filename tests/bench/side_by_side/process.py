"""An engine's driver as a process: started, asked, stopped in between, ended; waited for as long as it computes.

Knows the protocol's lines. Refuses to know what is measured.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

from side_by_side.drivers.protocol import Answer, Facts, Workload
from side_by_side.errors import EngineError, RefusedError
from side_by_side.machine import group_cpu_s

_END_S = 30.0
_NUM_LAST_LINES = 3
_LEAST_WORK = 0.05  # CPU time of an engine that computes, by the time that passes


class DriverProcess:
    """One driver, in a process group of its own, so that all of an engine's processes end and stop together."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._num_asked = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def group(self) -> int:
        return self._process.pid

    def wait_until_ready(self, silence_s: float) -> Facts:
        """Return what the driver says of its engine. `EngineError` when it ends, or is silent for so long."""
        try:
            ready = self._next_line(silence_s)["ready"]
        except EngineError as error:
            raise EngineError(f"did not start: {error}") from error
        assert isinstance(ready, dict)
        return Facts(ready["version"], ready["harness"], ready["configuration"], tuple(ready["memory_pids"]))

    def ask(self, workload: Workload, silence_s: float) -> Answer:
        """Run a workload. `EngineError` when it ends, or is silent for so long: then it is ended."""
        self._num_asked += 1
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps({"id": self._num_asked, "workload": asdict(workload)}) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise EngineError(self._last_words()) from None
        message = self._next_line(silence_s)
        if "error" in message:
            raise RefusedError(str(message["error"]))
        answer = message["answer"]
        assert isinstance(answer, dict)
        return Answer(answer["sent_s"], answer["token_s"], answer["steps"])

    def suspend(self) -> None:
        """Take the engine off the cores until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Let the driver end by itself, and see to it that nothing of it stays."""
        self.resume()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        stdout: IO[str] | None = self._process.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                self._lines.put(line)
        self._lines.put("")

    def _next_line(self, silence_s: float) -> dict[str, object]:
        """However slow the machine is: who neither answers nor computes for so long is silent."""
        line, before_s = None, group_cpu_s(self.group)
        while line is None:
            try:
                line = self._lines.get(timeout=silence_s)
            except queue.Empty:
                now_s = group_cpu_s(self.group)
                if abs(now_s - before_s) < _LEAST_WORK * silence_s:  # processes that ended take theirs along
                    self._signal(signal.SIGKILL)
                    raise EngineError(f"neither an answer nor work within {silence_s:g} s") from None
                before_s = now_s
        if not line:
            raise EngineError(self._last_words())
        message: dict[str, object] = json.loads(line)
        return message

    def _last_words(self) -> str:
        """How the process ended and the end of its log, in one line."""
        deadline = time.monotonic() + _END_S
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = " / ".join([line.strip() for line in lines if line.strip()][-_NUM_LAST_LINES:])
        return f"ended with code {self._process.returncode}: {said}"[:400]

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

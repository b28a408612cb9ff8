"""`paceline up --gateway` without a model, and its processes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TIMES = {"points": [{"num_tokens": 1, "duration_us": 4000}, {"num_tokens": 2048, "duration_us": 200000}]}


class System:
    """`url` is the gateway's."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self._process = process
        self.url = url

    def kill(self, program: str) -> int:
        """With SIGKILL, all of its processes; returns how many there were."""
        num_killed = 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                command = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # it has just ended
            if parent == self._process.pid and any(part.endswith(program.encode()) for part in command[:2]):
                os.kill(int(folder.name), signal.SIGKILL)
                num_killed += 1
        return num_killed


@contextmanager
def running_system(port: int = 26051) -> Iterator[System]:
    """Two executors and two schedulers, one of which stands by. A token takes 4 ms."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as times:
        json.dump(_TIMES | {"us_per_million_pairs": 1}, times)
        times.flush()
        command = [
            str(Path(sys.executable).parent / "paceline"), "up", "--gateway", "--standby", "--executors", "2",
            "--runner", f"simulated:{times.name}", "--max-model-len", "32768",
            "--port", str(port), "--executor-port", str(port + 10),
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None, "it is a pipe"
            try:
                until_s = time.monotonic() + 60
                for line in process.stdout:
                    print("  ", line, end="")
                    if "OpenAI" in line:
                        yield System(process, line.split()[-1].removesuffix("/v1"))
                        break
                    if time.monotonic() > until_s:
                        break
            finally:
                process.terminate()
                process.communicate()

"""`make conformance`: installs the clients, serves a random model that has tools, prints client, check, result.

Ends with 1 where a check failed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx2

from part_rig.calling_model import write_calling_model
from process_groups import end_group, end_with_what_was_started, run_program
from side_by_side.engines import Environment
from side_by_side.errors import InstallError
from side_by_side.install import install

HOME = Path(".conformance")
CLIENTS = Path(__file__).parent / "clients"
NPM = CLIENTS / "npm"
PORT, EXECUTOR_PORT, HTTP_PORT = 23451, 23461, 23458  # the last one follows from the first
START_S, CHECKS_S = 600.0, 300.0
# By the script that runs it.
REQUIREMENTS: Mapping[str, str] = {
    "openai_sdk": "openai==3.57.0",
    "langchain": "langchain-openai==1.7.4",
    "litellm_sdk": "litellm==1.110.2",
    "llm_tool": "llm==0.36",
    "instructor_sdk": "instructor==1.17.0",
    "pydantic_agent": "pydantic-ai-slim[openai]==2.68.0",
    "agents_sdk": "openai-agents==0.24.0",
}
NPM_SCRIPTS = ("openai_sdk", "ai_sdk")


def main() -> int:
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="clients with this in their script's name")
    only = parser.parse_args().only
    end_with_what_was_started()
    commands = [command for command in _python_commands() + _npm_commands() if only in command[-1]]
    with tempfile.TemporaryDirectory() as folder, _served(Path(folder)) as model:
        results = [_checked(command, model) for command in commands]
    return 0 if all(results) else 1


def _python_commands() -> list[list[str]]:
    commands = []
    for script, requirement in REQUIREMENTS.items():
        environment = Environment(HOME.absolute() / script, (requirement,), "a minute")
        install(environment, _say)
        commands.append([environment.python, str(CLIENTS / f"{script}.py")])
    return commands


def _npm_commands() -> list[list[str]]:
    """Empty where there is no node."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        _say("no node: the clients of npm are not run")
        return []
    folder = HOME.absolute() / "npm"
    shutil.copytree(NPM, folder, dirs_exist_ok=True)
    installed = run_program([npm, "--prefix", str(folder), "ci", "--no-audit", "--no-fund"], os.environ)
    if installed.code != 0:
        raise InstallError(f"not installed: {folder}")
    return [[node, str(folder / f"{script}.mjs")] for script in NPM_SCRIPTS]


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    """Its name. `InstallError` where it does not come up."""
    write_calling_model(folder / "caller", "Qwen-Qwen2.5-7B-Instruct")
    ports = ["--port", str(PORT), "--executor-port", str(EXECUTOR_PORT)]
    command = [str(Path(sys.executable).parent / "paceline"), "up", "--gateway", "--model", str(folder / "caller")]
    log = HOME / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *ports], stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        end_s = time.monotonic() + START_S
        while not _is_ready():
            if process.poll() is not None or time.monotonic() > end_s:
                raise InstallError(f"the system did not come up, see {log}")
            time.sleep(0.5)
        yield "caller"
    finally:
        end_group(process)


def _is_ready() -> bool:
    try:
        return bool(httpx2.get(f"http://127.0.0.1:{HTTP_PORT}/v1/models", timeout=5).json().get("data"))
    except httpx2.TransportError:
        return False


def _checked(command: list[str], model: str) -> bool:
    """Whether every check of a script passed."""
    environment = {**os.environ, "LLM_USER_PATH": str(HOME / "llm"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    finished = run_program(
        [*command, f"http://127.0.0.1:{HTTP_PORT}", model],
        environment,
        limit_s=CHECKS_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    results = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("[")]
    for client, check, result in results:
        _say(f"{client:28} {check:22} {result[:300]}")
    if finished.code != 0 or not results:
        _say(f"{Path(command[-1]).name} ended with {finished.code}: {finished.stderr[-300:]}")
        return False
    return all(result == "passed" for _, _, result in results)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())

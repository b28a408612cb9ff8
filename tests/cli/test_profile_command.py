"""`paceline profile`: a file that is a trace, whatever ends the recording, and words where there is none."""

import asyncio
import signal
import sys
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from both_sides.chrome_trace import check_steps, read_trace, steps_of
from edge_rig.edge_server import serve_edge
from edge_rig.scripted_backend import ScriptedBackend
from edge_rig.tokenizers import served_model
from executor_rig.hash_executor import hash_executor
from executor_rig.plan_client import attached, grants, request
from paceline.v1 import plan_pb2
from paceline_cli.app import app
from paceline_cli.wire_profile import trace_parts
from paceline_client.credentials import Credentials
from paceline_scheduler.backend import ExecutorStatus
from paceline_scheduler.observers.steps import StepTotals

EXECUTOR = ExecutorStatus("10.0.0.1:50061", 3, 7, 2, "tiny", 1, 100, 60, 10, 30, 0, 3, 4, 2, "", StepTotals())
COMMAND = """
import sys
from paceline_cli.commands import profile
profile._IDLE_SECONDS = 0.2
from paceline_cli.__main__ import main
sys.argv = ["paceline", "profile", *sys.argv[1:]]
main()
"""
PLACING = plan_pb2.BatchPlan(new_requests=[request(0, [5, 6, 7])], grants=grants([(0, i, i) for i in range(8)]))
MAX_WAIT_S = 120


@pytest.fixture
async def executor():
    async with hash_executor() as executor:
        yield executor


@asynccontextmanager
async def profiling(*arguments):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(MAX_WAIT_S):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def recorded(executor):
    while not executor.runner.profiler.is_on:
        await asyncio.sleep(0.01)


async def invoked(*arguments):
    """The command in a thread of this process: its exit code and what it printed on stdout and stderr."""
    result = await asyncio.to_thread(CliRunner().invoke, app, ["profile", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@asynccontextmanager
async def scheduler_of(*addresses):
    """A scheduler that knows executors at these addresses; yields where operators ask it, after where nobody is."""
    backend = ScriptedBackend(served_model())
    backend.known_executors = tuple(replace(EXECUTOR, address=address) for address in addresses)
    async with serve_edge(backend) as served:
        yield f"127.0.0.1:1,{served.address}"


async def test_the_next_steps_of_the_executor_that_a_scheduler_knows_are_in_the_file(executor, tmp_path):
    file = tmp_path / "trace.json"
    async with (
        scheduler_of(executor.address) as target,
        attached(executor.address) as client,
    ):
        profile = asyncio.create_task(invoked("--admin-target", target, "--steps", 3, "-o", file))
        await recorded(executor)
        await client.run([(0, 3)], PLACING)
        for _ in range(2):
            await client.run([(0, 1)])
        code, out, _ = await profile
    events = read_trace(file.read_bytes())
    check_steps(events)
    assert (code, out) == (0, f"3 steps in {file}: open it at https://ui.perfetto.dev\n")
    assert len(steps_of(events)) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


async def test_what_has_come_until_ctrl_c_is_kept(executor, tmp_path):
    file = tmp_path / "trace.json"
    options = "--executor", executor.address, "--steps", 500, "-o", file
    async with attached(executor.address) as client, profiling(*options) as process:
        assert b"no step yet: it is idle" in await process.stderr.readline()
        await client.run([(0, 3)], PLACING)
        while b"step 1" not in (tmp_path / "trace.json.part").read_bytes():
            await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
    assert (process.returncode, out.split()[0]) == (130, b"1")
    assert len(steps_of(read_trace(file.read_bytes()))) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--executor", "127.0.0.1:1"), "error: the executor at 127.0.0.1:1 does not answer"),
        (("--target", "127.0.0.1:1"), "error: cannot reach 127.0.0.1:2"),
    ],
    ids=["executor", "scheduler"],
)
async def test_who_does_not_answer_is_one_line(tmp_path, monkeypatch, options, sentence):
    monkeypatch.setattr("paceline_cli.top.source._CONNECT_SECONDS", 0.3)  # to where nobody is
    code, _, errors = await invoked(*options, "-o", tmp_path / "trace.json")
    assert (code, len(errors.splitlines())) == (69, 1), errors
    assert errors.startswith(sentence)
    assert not list(tmp_path.iterdir())


async def test_what_cannot_be_recorded_is_one_line(executor, tmp_path):
    others = "127.0.0.1:1", "10.0.0.9:50061"
    async with scheduler_of(*others) as target:
        for arguments, expected, sentence in (
            (("--target", "unix:/run/paceline"), 65, "say --admin-target"),
            (("--admin-target", executor.address), 69, "is not the admin port of a scheduler"),
            (("--admin-target", target), 65, f"there are {', '.join(others)}"),
            (("--executor", executor.address, "-o", tmp_path / "missing" / "trace.json"), 65, "cannot write"),
        ):
            output = () if "-o" in arguments else ("-o", tmp_path / "trace.json")
            code, _, errors = await invoked(*arguments, *output)
            assert (code, len(errors.splitlines())) == (expected, 1), errors
            assert errors.startswith("error: ")
            assert sentence in errors
    assert not list(tmp_path.iterdir())


async def test_a_second_profile_is_refused(executor, tmp_path):
    """By what to do: exit code 75, as for all that is overloaded."""
    async with aclosing(trace_parts(executor.address, 20, Credentials(None, None))) as parts:
        first = asyncio.ensure_future(anext(parts))
        await recorded(executor)
        code, _, errors = await invoked("--executor", executor.address, "-o", tmp_path / "second.json")
        first.cancel()
        await asyncio.wait((first,))
    assert (code, "another profile is being recorded" in errors) == (75, True)

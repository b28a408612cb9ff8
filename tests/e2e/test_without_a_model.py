"""The whole system without a model, as its README starts it: through real processes, with the `paceline` command."""

import asyncio
import os
import select
import shlex
import signal
import subprocess
import time
from pathlib import Path

import grpc
import pytest

from client_loads.rapid_reset import RapidReset
from executor_rig.hash_runner import continuation
from paceline.bytes_tokenizer import PRINTABLE
from paceline.v1.inference_pb2 import GenerateRequest
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline_cli.supervisor.programs import free_ports
from paceline_client import AsyncClient, Sampling, Stopping
from repository_checks.programs import BIN, run
from service_processes.measured import scheduler_of, simulated_executor

MANY_RESETS = [pytest.param("Generate", 100_000, marks=pytest.mark.slow)]


@pytest.fixture
async def target():
    """Where a scheduler serves an executor without a model, with steps of 1 ms."""
    async with simulated_executor(step_ms=1.0) as address, scheduler_of(address) as (_, ready):
        yield f"127.0.0.1:{ready['port']}"


async def test_paceline_generate_streams_as_many_characters_as_were_asked_for(target):
    options = ("--target", target, "--max-tokens", "40", "--seed", "3")
    first, second = [await asyncio.to_thread(run, "paceline", "generate", *options, "Hello") for _ in range(2)]

    assert first.returncode == second.returncode == 0, first.stdout
    assert first.stdout == second.stdout
    assert len(first.stdout.rstrip("\n")) == 40


async def test_paceline_models_shows_what_it_is(target):
    """Nobody takes it for a model."""
    shown = await asyncio.to_thread(run, "paceline", "models", "--target", target)

    assert shown.stdout.splitlines()[1].split()[:2] == ["simulated", "simulated"]


async def test_64_requests_at_once_get_the_tokens_that_their_prompts_lead_to(target):
    prompts = [[number % 5, 7, 9] * (1 + number % 40) for number in range(64)]
    async with AsyncClient(target) as client:
        results = await asyncio.gather(
            *(
                client.generate(token_ids=prompt, sampling=Sampling(seed=seed), stopping=Stopping(max_tokens=30))
                for seed, prompt in enumerate(prompts)
            )
        )

    expected = [continuation(prompt, 30, PRINTABLE, seed) for seed, prompt in enumerate(prompts)]
    assert [list(result.token_ids) for result in results] == expected


@pytest.mark.parametrize(("method", "num_resets"), [("Generate", 20_000), ("ListModels", 20_000), *MANY_RESETS])
async def test_a_connection_that_resets_streams_in_a_loop_costs_others_no_request(target, method, num_resets):
    host, _, port = target.rpartition(":")
    attack = RapidReset(host, int(port), f"/paceline.v1.InferenceService/{method}")
    attacking = asyncio.create_task(asyncio.to_thread(attack.run))
    try:
        async with grpc.aio.insecure_channel(target) as channel:
            stub = InferenceServiceStub(channel)
            number = 0
            while number < 10 or attack.num_streams < num_resets:
                number += 1
                request = GenerateRequest(request_id=f"{number}", text="Hello", stopping={"max_tokens": 5})
                assert [response async for response in stub.Generate(request)][-1].delta.finish.reason
    finally:
        attack.stop()
        await attacking


def started(*command, redirected, stdout=subprocess.PIPE):
    """A program with the descriptors that the shell gives it."""
    line = shlex.join(map(str, command))
    return subprocess.Popen(["sh", "-c", f"exec {line} {redirected}"], stdout=stdout, text=True)


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("paceline-executor", ("--runner", "simulated")),
        pytest.param("paceline-scheduler", ("--executors", "a:1", "--admin-port", "0"), marks=pytest.mark.slow),
    ],
)
def test_a_program_without_stdin_and_stderr_ends_in_good_order(program, options):
    """Though it is given no descriptor for them."""
    ports = ("--port", "0", "--health-port", "0", "--metrics-port", "0")
    with started(BIN / program, *options, *ports, redirected="<&- 2>&-") as process:
        assert any('"listening"' in line for line in process.stdout)
        process.terminate()
        assert process.wait() == 0


def up_command(*options):
    """`paceline up` on free ports, without a model."""
    ports = free_ports(1)
    where = ("--port", ports.scheduler.api, "--executor-port", ports.executors[0].api)
    return BIN / "paceline", "up", "--runner", "simulated", *where, *options


def test_paceline_up_runs_it_also_without_a_stderr():
    with started(*up_command(), redirected="2>&-") as up:
        ready = next((line for line in up.stdout if line.startswith("Ready: ")), "")
        up.send_signal(signal.SIGINT)
        assert (ready, up.wait()) == ("Ready: simulated\n", 0)


def kill_executor(up, log):
    """Return once another one is ready in its place."""
    num_ready = log.read_text().count('"event": "ready"')
    children = Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()
    [executor] = [child for child in children if "paceline-executor" in Path(f"/proc/{child}/cmdline").read_text()]
    os.kill(int(executor), signal.SIGKILL)
    while log.read_text().count('"event": "ready"') == num_ready:
        assert up.poll() is None
        time.sleep(0.05)


def clog(pipe):
    """Fill it, by its writing end."""
    while select.select((), (pipe,), (), 0)[1]:
        os.write(pipe, b"\n" * select.PIPE_BUF)


def test_paceline_up_keeps_running_without_a_stdin_and_whatever_becomes_of_its_output(tmp_path):
    reading, writing = os.pipe()
    command = up_command("--log-dir", tmp_path)
    with started(*command, redirected="<&- 2>&1", stdout=writing) as up, os.fdopen(reading) as output:
        assert any(line.startswith("Ready: ") for line in output)
        clog(writing)
        kill_executor(up, tmp_path / "executor.log")
        output.close()
        os.close(writing)
        kill_executor(up, tmp_path / "executor.log")
        up.terminate()
        assert up.wait() == 0

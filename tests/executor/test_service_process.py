"""The executor process: its command line, its exit codes, its events, how it follows signals, what it runs short of."""

import asyncio
import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import structlog

from executor_rig.cpu import cpu_runner
from executor_rig.driving import Driver
from executor_rig.hash_runner import continuation
from executor_rig.plan_client import attached, grants, request, tokens_by_row
from paceline.bytes_tokenizer import PRINTABLE
from paceline.forms.library import LIBRARY
from paceline.process.command import ExitCode
from paceline.v1 import executor_pb2, executor_pb2_grpc, plan_pb2
from paceline_executor import __main__ as program
from paceline_executor.config import let_waiting_threads_sleep, parse_config
from paceline_executor.errors import DeviceError
from random_models import RandomCheckpoint, gguf_parts

PYTHON = [sys.executable, "-c"]
COMMAND = [sys.executable, "-m", "paceline_executor"]
ANY_PORTS = ["--port", "0", "--health-port", "0", "--metrics-port", "0"]
PLACING = plan_pb2.BatchPlan(new_requests=[request(0, [5, 6, 7])], grants=grants([(0, 0, 0)]))
GENEROUS_S = 30.0
NUM_CONTROL = 3  # tokens of the model, before those of bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random model as a GGUF file."""
    return gguf_parts(RandomCheckpoint()).write(tmp_path_factory.mktemp("model") / "tiny.gguf")


@contextmanager
def _process(*arguments):
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _events(process, name):
    """Events up to the one of this name."""
    events = []
    for line in process.stdout:
        events.append(json.loads(line))
        if events[-1]["event"] == name:
            return events
    raise AssertionError(f"no event {name!r}: {process.stderr.read()}")


def _is_one_line(text):
    return text.count("\n") == 1 and text.startswith("paceline-executor: error: ") and "Traceback" not in text


@pytest.fixture
def ended(monkeypatch, capfd):
    """Runs the program in this process: its exit code, and what it printed."""

    def end(code):
        raise SystemExit(code)

    def run(*arguments):
        with pytest.raises(SystemExit) as ending:
            program.main([*map(str, arguments)])
        return ending.value.code, capfd.readouterr()

    before = structlog.get_config()
    monkeypatch.setattr(program, "end_quietly_on_signals", lambda: None)
    monkeypatch.setattr("paceline_executor.config.let_waiting_threads_sleep", lambda: None)
    monkeypatch.setattr("os._exit", end)
    yield run
    structlog.configure(**before)


def _metrics(port):
    """What Prometheus would read."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return answer.read().decode()


async def test_an_executor_serves_and_drains_on_sigterm(model):
    """Events tell how far it is; SIGTERM reaches the scheduler, whose rows finish; the exit code is 0."""
    with _process("--model", model, "--served-model-name", "tiny", "--kv-cache-memory", "4MiB", *ANY_PORTS) as process:
        *events, ready = _events(process, "ready")
        async with attached(f"127.0.0.1:{ready['port']}") as client:
            await client.run([(0, 3)], PLACING)
            process.send_signal(signal.SIGTERM)
            while not client.drains:
                await client.run()
            result = await client.run([(0, 1)])
            shown = await asyncio.to_thread(_metrics, ready["metrics_port"])
            await client.run((), plan_pb2.BatchPlan(releases=[plan_pb2.Release(row=0)]))
            with pytest.raises(grpc.aio.AioRpcError, match="drained"):
                await client.result()
        stdout, stderr = process.communicate(timeout=30)

    assert {event["event"] for event in events} == {"listening", "model", "model_load", "warm_up", "numerics"}
    numerics = next(event for event in events if event["event"] == "numerics")
    assert (numerics["weights"], numerics["kv_cache"]) == ("float32", "float32")  # its heads have 16 dimensions
    assert numerics["instructions"] in {"AVX-512 VNNI", "AVX2", "none"}
    assert (ready["model"], ready["max_model_len"], client.welcome.model.name) == ("tiny", 256, "tiny")
    assert len(tokens_by_row(result)[0]) == 1
    assert "paceline_executor_generation_tokens_total " in shown
    assert [json.loads(line)["event"] for line in stdout.splitlines()] == ["draining", "stopped"]
    assert (process.returncode, stderr) == (ExitCode.OK, "")


async def test_a_second_signal_ends_the_process_at_once():
    with _process("--runner", "simulated", *ANY_PORTS) as process:
        ready = _events(process, "ready")[-1]
        async with attached(f"127.0.0.1:{ready['port']}") as client:
            await client.run([(0, 3)], PLACING)
            process.send_signal(signal.SIGTERM)
            _events(process, "draining")
            process.send_signal(signal.SIGINT)
            process.wait(timeout=30)

    assert process.returncode == 128 + signal.SIGINT


def test_a_signal_while_loading_ends_the_process_in_good_order(model):
    with _process("--model", model, *ANY_PORTS) as process:
        _events(process, "listening")
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)

    assert (process.returncode, stderr) == (ExitCode.OK, "")


FAILURES = {
    "missing model": (["--model", "{folder}/nowhere.gguf"], ExitCode.MODEL, "nowhere.gguf"),
    "empty model": (["--model", "{folder}/empty.gguf"], ExitCode.MODEL, "empty.gguf"),
    "truncated model": (["--model", "{folder}/cut.gguf"], ExitCode.MODEL, "cut.gguf"),
    "KV cache that does not fit": (
        ["--model", "{model}", "--kv-cache-memory", "900TiB"],
        ExitCode.MACHINE,
        "--kv-cache-memory",
    ),
    "GPU that is not there": (["--runner", "cuda"], ExitCode.MACHINE, "--runner cuda cannot be used: "),
    # Its heads have 16 dimensions, so it is computed in float32 throughout.
    "numbers that the model forbids": (
        ["--model", "{model}", "--kv-cache-dtype", "int8"],
        ExitCode.USAGE,
        "leave --kv-cache-dtype int8 out",
    ),
    "bad file of step times": (
        ["--runner", "simulated:{folder}/bad.json"],
        ExitCode.USAGE,
        "bad.json has no step times: points[0].duration_us is not a number",
    ),
    "FIFO as the configuration": (["--model", "{folder}/fifo"], ExitCode.MODEL, "fifo/config.json: it is not"),
    "FIFO as the weights": (["--model", "{folder}/fifo.gguf"], ExitCode.MODEL, "fifo.gguf: it is not"),
    "FIFO as the step times": (["--runner", "simulated:{folder}/fifo.gguf"], ExitCode.USAGE, "fifo.gguf: it is not"),
}


@pytest.mark.parametrize(("arguments", "code", "told"), FAILURES.values(), ids=FAILURES)
def test_a_failure_is_one_line_and_its_own_exit_code(model, tmp_path, ended, arguments, code, told):
    """Never a traceback."""
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "cut.gguf").write_bytes(model.read_bytes()[:5000])
    (tmp_path / "bad.json").write_text('{"points": [{"num_tokens": 1}]}')
    (tmp_path / "fifo").mkdir()
    (tmp_path / "fifo" / "model.safetensors").touch()
    for name in ("fifo.gguf", "fifo/config.json"):
        os.mkfifo(tmp_path / name)
    found, printed = ended(*(each.format(model=model, folder=tmp_path) for each in arguments), *ANY_PORTS)
    assert found == code
    assert _is_one_line(printed.err)
    assert told in printed.err


def test_memory_that_runs_out_while_the_model_is_loaded_is_one_line_and_its_own_exit_code(model, ended, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("paceline_executor.start.loading_cpu.choose_cpu_numerics", fail)
    code, printed = ended("--model", model, *ANY_PORTS)
    assert code == ExitCode.MACHINE
    assert _is_one_line(printed.err)
    assert "ulimit -v" in printed.err


def test_a_process_that_may_hardly_have_addresses_is_told_so():
    command = f"ulimit -v 400000; exec {shlex.join([*COMMAND, '--runner', 'simulated', *ANY_PORTS])}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (ExitCode.MACHINE, "")
    assert _is_one_line(done.stderr)
    assert "ulimit -v" in done.stderr


def test_a_port_in_use_is_one_line_and_its_own_exit_code(model, ended):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, printed = ended("--model", model, "--port", port, "--health-port", "0", "--metrics-port", "0")
    assert code == ExitCode.PORT
    assert _is_one_line(printed.err)
    assert str(port) in printed.err


def test_why_an_executor_that_worked_has_ended_is_in_its_log(ended, monkeypatch):
    async def fail(*_):
        raise DeviceError("steps fail")

    monkeypatch.setattr("paceline_executor.process.run", fail)
    code, printed = ended("--model", "any")
    event = json.loads(printed.out)
    assert (event["event"], event["level"], event["reason"]) == ("failed", "error", "steps fail")
    assert printed.err == "paceline-executor: error: steps fail\n"
    assert code == ExitCode.FAILED


async def test_an_executor_without_a_model_is_ready_with_nothing_fetched(tmp_path, monkeypatch):
    times = tmp_path / "times.json"
    times.write_text('{"points": [{"num_tokens": 1, "duration_us": 2000}]}')
    options = ("--runner", f"simulated:{times}", "--served-model-name", "none", *ANY_PORTS)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with _process("--cache-dir", tmp_path / "nothing", *options) as process:
        ready = _events(process, "ready")[-1]
        async with attached(f"127.0.0.1:{ready['port']}") as client:
            result = await client.run([(0, 3)], PLACING)
    model = client.welcome.model

    assert (model.name, model.architecture, model.vocab_size, ready["device"]) == (
        "none",
        "simulated",
        259,
        "simulated",
    )
    assert [(point.num_tokens, point.duration_ns) for point in client.welcome.step_points] == [
        (1, 2_000_000),
        (513, 2_000_000),
    ]
    assert tokens_by_row(result) == {0: continuation([5, 6, 7], 1, PRINTABLE)}
    assert result.timings.forward_ns >= 2_000_000


@pytest.mark.parametrize(
    "arguments",
    [
        ["--runner", "tpu"],
        ["--gpu-memory-utilization", "2"],
        ["--runner", "simulated", "--model", "tiny.gguf"],
        ["--runner", "cpu:times.json"],
        ["--port", "65536"],
        ["--port", "-1"],
        ["--port", "5", "--health-port", "5"],
        ["--kv-cache-memory", "many"],
        ["--kv-cache-memory", "0"],
        ["--shutdown-timeout", "nan"],
        ["--max-num-seqs", "100", "--max-num-batched-tokens", "10"],
        ["--block-size", "1e3"],
        ["--log-level", "loud"],
        ["--unknown"],
    ],
)
def test_a_usage_mistake_is_explained_with_the_options_name(arguments, capsys):
    """Exit code 2."""
    with pytest.raises(SystemExit) as ending:
        parse_config(arguments)

    assert ending.value.code == ExitCode.USAGE
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize("value", ["abc", "", "0", "-1"])
def test_a_variable_that_numba_cannot_read_is_named(monkeypatch, capsys, value):
    monkeypatch.setenv("NUMBA_NUM_THREADS", value)
    parse_config(["--runner", "cuda"])  # which has other kernels
    with pytest.raises(SystemExit) as ending:
        parse_config([])
    assert ending.value.code == ExitCode.USAGE
    assert f"error: NUMBA_NUM_THREADS is {value!r}" in capsys.readouterr().err


def test_help_loads_nothing_heavy_and_names_every_exit_code():
    script = (
        "import sys\nfrom paceline_executor.__main__ import main\ntry:\n    main(['--help'])\n"
        "except SystemExit:\n    print(sorted(m for m in ('torch', 'numba', 'grpc') if m in sys.modules))"
    )
    done = subprocess.run([*PYTHON, script], capture_output=True, text=True, check=True)

    assert done.stdout.endswith("[]\n")
    assert all(f"│ {code.value}  " in done.stdout for code in ExitCode)


def test_threads_that_wait_sleep_soon_which_is_decided_before_torch_is_imported():
    """OpenMP's runtime reports what it goes by when it is loaded."""
    script = (
        "import sys, paceline_executor.__main__\nfrom paceline_executor.config import let_waiting_threads_sleep\n"
        "assert 'torch' not in sys.modules, 'afterwards it would be too late'\nlet_waiting_threads_sleep()\n"
        "import torch\ntorch.ones(512, 512) @ torch.ones(512, 512)"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP", "OMP"))}
    environment = inherited | {"OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run([*PYTHON, script], env=environment, capture_output=True, text=True, check=True)
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    ids=["spins", "policy"],
)
def test_threads_wait_as_the_user_says(monkeypatch, chosen, spins):
    environment = dict(chosen)
    monkeypatch.setattr(os, "environ", environment)
    let_waiting_threads_sleep()
    assert environment.get("GOMP_SPINCOUNT") == spins


async def test_the_twin_starts_as_a_gpu_does_and_draws_what_the_cpu_draws(model):
    """In float32, greedy; schedulers are told which steps it has captured, and that it holds outputs to forms."""
    pytest.importorskip("paceline_executor.runner.device.runner")
    limits = ["--max-num-seqs", "2", "--max-num-batched-tokens", "64"]
    with _process("--model", model, "--runner", "twin", *limits, *ANY_PORTS) as process:
        *events, ready = _events(process, "ready")
        async with attached(f"127.0.0.1:{ready['port']}") as client:
            results = [await client.run([(0, 3)], PLACING)]
            results += [await client.run([(0, 1)]) for _ in range(5)]
            formed = request(1, [5, 6, 7], end_token_ids=client.welcome.model.end_token_ids)
            formed.structured.choice.options[:] = ["far", "near"]
            placing = plan_pb2.BatchPlan(new_requests=[formed], grants=grants([(1, 0, 1), (1, 1, 2)]))
            formed_results = [await client.run([(1, 3)], placing)]
            while not formed_results[-1].finishes[0]:
                formed_results.append(await client.run([(1, 1)]))
    driver = Driver(cpu_runner(RandomCheckpoint(), num_blocks=4, block_size=16))
    expected = driver.run([driver.add([5, 6, 7], max_chunk=8)], 6)[0]

    assert [token for result in results for token in tokens_by_row(result)[0]] == expected
    *letters, end = [token for result in formed_results for token in tokens_by_row(result)[1]]
    assert bytes(letter - NUM_CONTROL for letter in letters) in (b"far", b"near")
    assert end in client.welcome.model.end_token_ids
    assert client.welcome.model.structured_output == LIBRARY
    assert (client.welcome.graphs.num_rows[-1], client.welcome.graphs.num_tokens[-1]) == (2, 64)
    assert [event["event"] for event in events if event["event"] in ("memory", "numerics")] == ["memory", "numerics"]


@contextmanager
def _without_descriptors(process):
    """As long as it lasts the process can open nothing more."""
    before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    num_open = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (num_open, before[1]))
    try:
        yield
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)


async def _answers(channel, timeout_s):
    """Whether the executor says who it is, over a connection of its own."""
    stub = executor_pb2_grpc.ExecutorServiceStub(channel)
    try:
        await stub.GetInfo(executor_pb2.GetInfoRequest(), timeout=timeout_s, wait_for_ready=True)
    except grpc.aio.AioRpcError:
        return False
    return True


async def test_an_executor_lives_through_a_closed_log_and_a_want_of_descriptors():
    """The stream that is there goes on; new ones are taken again by itself; the drain ends with 0."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200))
    with _process("--runner", "simulated", *ANY_PORTS) as process:
        address = f"127.0.0.1:{_events(process, 'ready')[-1]['port']}"
        process.stdout.close()
        async with attached(address) as client, grpc.aio.insecure_channel(address, options) as other:
            output = tokens_by_row(await client.run([(0, 3)], PLACING))[0]
            with _without_descriptors(process):
                assert not await _answers(other, 0.5)
                output += tokens_by_row(await client.run([(0, 1)]))[0]
            assert await _answers(other, GENEROUS_S)
            output += tokens_by_row(await client.run([(0, 1)]))[0]
            await client.run((), plan_pb2.BatchPlan(releases=[plan_pb2.Release(row=0)]))
            process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError, match="drained"):
                await client.result()
        code = await asyncio.to_thread(process.wait, GENEROUS_S)

    assert len(output) == 3
    assert code == ExitCode.OK

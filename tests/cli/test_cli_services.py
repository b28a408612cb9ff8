"""`up` and `demo` with stand-ins for the services: order, output, exit codes, signals."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline_cli.app import app
from paceline_cli.options import DEFAULT_MODEL, model_for
from paceline_cli.supervisor import programs
from paceline_cli.supervisor.programs import (
    Deployment,
    ProgramMissingError,
    find_script,
    fixed_ports,
    free_ports,
    programs_of,
)

FAKE_SERVICES = Path(__file__).with_name("fake_services.py")

PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.fixture
def fake_scripts(tmp_path):
    """A folder with stand-ins for both console scripts."""
    for name in ("scheduler", "executor"):
        script = tmp_path / f"paceline-{name}"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE_SERVICES}" {name} "$@"\n')
        script.chmod(0o755)
    return tmp_path


@pytest.fixture
def use_fakes(fake_scripts, monkeypatch):
    """Make this process start the stand-ins."""
    monkeypatch.setattr(programs, "find_script", lambda name: str(fake_scripts / name))


def start_up(fake_scripts, *options, attach_seconds=3.0, stderr=subprocess.PIPE, **environment):
    """`paceline up` as a process of its own, on free ports, and its lines on stdout."""
    ports = free_ports(1)
    while not can_listen(ports.scheduler.api + 3):  # where a standby would
        ports = free_ports(1)
    code = f"""
import sys
from paceline_cli import services
from paceline_cli.supervisor import programs
services._ATTACH_SECONDS = {attach_seconds}
programs.find_script = lambda name: {str(fake_scripts)!r} + "/" + name
from paceline_cli.__main__ import main
sys.argv = ["paceline", "up", *{list(options)!r},
            "--port", "{ports.scheduler.api}", "--executor-port", "{ports.executors[0].api}", "--shutdown-timeout", "5"]
main()
"""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, **environment},
    )


def can_listen(port):
    """Whether a port is free."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def read_until(stream, text):
    """The lines up to and including the first with this text."""
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return "".join(lines)
    pytest.fail(f"no {text!r} in {lines}")


def deployment(num_executors=1, **options):
    """A deployment on the documented ports."""
    ports = fixed_ports(50051, 50061, num_executors)
    return Deployment(**{"model": "m", **options}, host="127.0.0.1", ports=ports, shutdown_timeout_seconds=30)


def test_the_demo_streams_an_answer_and_leaves_nothing_behind(use_fakes):
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 0
    assert "What is the capital of France?\nfake: The capital of France is Paris.\n" in result.stdout
    assert re.search(r"6 tokens, time to first token \d+ ms", result.stdout)
    for step in ("fetching the model 100%", "loading the model 100%", "warming up 100%", "ready"):
        assert f"executor: {step}\n" in result.stderr


def test_the_demo_fails_with_one_line(use_fakes):
    result = CliRunner().invoke(app, ["demo", "--model", "broken"])
    assert result.exit_code == 3
    assert result.stderr.splitlines()[-1] == "error: executor ended with exit code 3: there is no model 'broken'"
    assert result.stderr.count("broken") == 1


def test_the_demo_does_not_try_a_crash_again(use_fakes):
    result = CliRunner().invoke(app, ["demo", "--model", "crash"])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "error: executor ended with exit code 1: RuntimeError: a bug"


def test_up_says_what_is_where_and_what_it_waits_for_when_it_ends(fake_scripts, tmp_path):
    """Addresses and what to try next; exit code 0 and no process left."""
    file, folder = tmp_path / "drained", tmp_path / "logs"
    options = "--executors", "2", "--log-dir", str(folder)
    with start_up(fake_scripts, *options, DRAIN_UNTIL_THERE=str(file), DRAIN_REQUESTS="3") as process:
        text = read_until(process.stdout, "Ctrl-C stops everything")
        process.send_signal(signal.SIGINT)
        read_until(process.stderr, "Stopping; what runs may finish")
        assert re.search(
            r"scheduler: 3 requests still run, for \d+ s at most", read_until(process.stderr, "3 requests")
        )
        file.touch()
        read_until(process.stderr, "Stopped.")
        assert process.wait(30) == 0
    assert "Ready: fake" in text
    assert re.search(r"Executors +127\.0\.0\.1:\d+, 127\.0\.0\.1:\d+\n", text)
    assert re.search(r"paceline chat --target 127\.0\.0\.1:\d+\n", text)
    logs = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(logs) == ["executor-0.log", "executor-1.log", "scheduler.log"]
    assert all('"draining"' in log for log in logs.values())


def children_of(process):
    """The ids of its processes, in the order in which it started them."""
    return [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def test_up_starts_a_killed_service_again_and_waits_for_executors_as_long_as_there_is_hope(fake_scripts, tmp_path):
    file = tmp_path / "attach"
    with start_up(fake_scripts, attach_seconds=0.1, ATTACH_WHEN_THERE=str(file)) as process:
        read_until(process.stderr, "scheduler: waiting for its executors")
        scheduler, executor = children_of(process)
        os.kill(executor, signal.SIGKILL)
        read_until(process.stderr, "executor: was killed by signal 9; starting it again now")
        read_until(process.stderr, "executor: ready")
        file.touch()
        assert "Ready: fake" in read_until(process.stdout, "Ctrl-C stops everything")
        os.kill(scheduler, signal.SIGKILL)
        read_until(process.stderr, "scheduler: was killed by signal 9; starting it again now")
        read_until(process.stderr, "scheduler: ready")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_up_serves_although_nobody_can_be_told(fake_scripts):
    """A stderr on a full disk costs its lines, not the service."""
    with Path("/dev/full").open("w") as full, start_up(fake_scripts, stderr=full) as process:
        read_until(process.stdout, "Ctrl-C stops everything")
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def test_up_gives_up_on_what_can_never_work(fake_scripts):
    with start_up(fake_scripts, "--model", "broken") as process:
        assert process.wait(30) == 3
        lines = process.stderr.read().splitlines()
    assert lines[-1] == "error: executor ended with exit code 3: there is no model 'broken'"


def test_up_can_be_stopped_before_it_is_ready(fake_scripts):
    with start_up(fake_scripts, "--model", "crash") as process:
        text = read_until(process.stderr, "starting it again in 0.2 s")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert "executor: ended with exit code 1 (RuntimeError: a bug); starting it again in 0.1 s" in text


def test_ports_follow_the_documentation(use_fakes):
    """Scheduler +0, +1, +2; each executor ten further, its health port two above, and so are the ports of metrics."""
    first, second = [program.command for program in programs_of(deployment(2))[1:]]
    assert option(first, "--model") == "m"
    assert option(first, "--port") == "50061"
    assert option(first, "--health-port") == "50063"
    assert option(second, "--port") == "50071"
    assert option(second, "--health-port") == "50073"
    assert [option(executor, "--metrics-port") for executor in (first, second)] == ["9465", "9475"]
    (scheduler, *_) = [program.command for program in programs_of(deployment(2))]
    assert option(scheduler, "--executors") == "127.0.0.1:50061,127.0.0.1:50071"
    assert [option(scheduler, f"--{name}port") for name in ("", "admin-", "health-")] == ["50051", "50052", "50053"]
    schedulers = [program.command for program in programs_of(deployment(2, with_standby=True))[:2]]
    assert [option(scheduler, "--metrics-port") for scheduler in schedulers] == ["9464", "9467"]


def test_a_standby_is_a_second_scheduler_of_the_same_executors(use_fakes):
    pair = deployment(2, with_standby=True)
    programs = programs_of(pair)
    schedulers = [program.command for program in programs[:2]]
    assert [program.name for program in programs] == ["scheduler-0", "scheduler-1", "executor-0", "executor-1"]
    assert [program.stop_stage for program in programs] == [0, 0, 1, 1]
    ports = [[option(command, f"--{name}port") for name in ("", "admin-", "health-")] for command in schedulers]
    assert ports == [["50051", "50052", "50053"], ["50054", "50055", "50056"]]
    assert all("--standby" in command for command in schedulers)
    assert option(schedulers[0], "--executors") == option(schedulers[1], "--executors")
    assert pair.target == "127.0.0.1:50051,127.0.0.1:50054"


def option(command, name):
    """The value after an option."""
    return command[command.index(name) + 1]


def test_only_what_is_asked_for_is_passed_on(use_fakes):
    asked = {
        "--max-num-seqs": "3",
        "--num-threads": "1",
        "--kv-cache-memory": "1GiB",
        "--kv-cache-dtype": "int8",
        "--quantization": "none",
        "--revision": "v1",
    }
    (_, alone) = programs_of(deployment())
    assert not asked.keys() & set(alone.command)
    assert not alone.environment
    assert alone.name == "executor"
    full = deployment(
        max_num_seqs=3,
        num_threads=1,
        kv_cache_memory="1GiB",
        kv_cache_dtype="int8",
        quantization="none",
        revision="v1",
        offline=True,
    )
    (_, executor) = programs_of(full)
    assert executor.environment == (("HF_HUB_OFFLINE", "1"),)
    assert {name: option(executor.command, name) for name in asked} == asked


@pytest.mark.parametrize(
    ("runner", "named", "model"),
    [
        (None, None, DEFAULT_MODEL),
        ("cpu", None, DEFAULT_MODEL),
        ("simulated", None, None),
        ("simulated:steps.json", None, None),
        ("simulated", "m", "m"),  # which the executor refuses with a sentence
    ],
)
def test_only_a_simulated_runner_has_no_default_model(runner, named, model):
    assert model_for(runner, named) == model


def test_without_a_model_executors_are_told_none(use_fakes):
    (_, executor) = programs_of(deployment(model=None, runner="simulated"))
    assert "--model" not in executor.command
    assert option(executor.command, "--runner") == "simulated"


def test_speculation_is_for_every_scheduler(use_fakes):
    wanted = '{"max_num_draft_tokens": 0}'
    first, second, executor = programs_of(deployment(speculation=wanted, with_standby=True))
    assert [option(scheduler.command, "--speculation") for scheduler in (first, second)] == [wanted, wanted]
    assert "--speculation" not in executor.command
    assert not any("--speculation" in program.command for program in programs_of(deployment()))


@pytest.mark.parametrize(("num_executors", "share"), [(2, "3"), (3, "2"), (4, "1"), (64, "1")])
def test_several_executors_share_what_this_process_may_use(use_fakes, monkeypatch, num_executors, share):
    """Not what the machine has: an executor refuses more threads than its affinity allows."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(40, 46)))
    _, *executors = programs_of(deployment(num_executors))
    assert [option(executor.command, "--num-threads") for executor in executors] == [share] * num_executors
    _, *executors = programs_of(deployment(num_executors, runner="cuda"))
    assert not any("--num-threads" in executor.command for executor in executors), "a GPU takes none"


@pytest.mark.parametrize(
    ("host", "target"),
    [
        ("127.0.0.1", "127.0.0.1:50051"),
        ("0.0.0.0", "127.0.0.1:50051"),  # noqa: S104  recognised, not bound
        ("::1", "[::1]:50051"),
        ("::", "127.0.0.1:50051"),
    ],
)
def test_only_the_api_listens_elsewhere(use_fakes, host, target):
    deployment = Deployment(model="m", host=host, ports=fixed_ports(50051, 50061, 1), shutdown_timeout_seconds=30)
    scheduler, executor = (program.command for program in programs_of(deployment))
    assert (option(scheduler, "--host"), option(executor, "--host")) == (host, "127.0.0.1")
    assert option(scheduler, "--executors") == "127.0.0.1:50061"
    assert deployment.target == target


@pytest.mark.parametrize("insecure", [True, False])
def test_other_machines_are_let_in_only_on_purpose(use_fakes, insecure):
    """The scheduler refuses to start otherwise."""
    ports = fixed_ports(50051, 50061, 1)
    deployment = Deployment(model="m", host="::", ports=ports, shutdown_timeout_seconds=30, insecure=insecure)
    scheduler, executor = (program.command for program in programs_of(deployment))
    assert ("--insecure" in scheduler, "--insecure" in executor) == (insecure, False)


def test_certificates_are_those_of_both_programs_and_tokens_of_the_scheduler(use_fakes):
    plain, secure = deployment(), deployment(tls_dir=Path("certificates"), tokens=Path("tokens"))
    assert not {"--tls-dir", "--tokens"} & {part for program in programs_of(plain) for part in program.command}
    scheduler, executor = (program.command for program in programs_of(secure))
    assert option(scheduler, "--tls-dir") == option(executor, "--tls-dir") == "certificates"
    assert option(scheduler, "--tokens") == "tokens"
    assert "--tokens" not in executor


def test_metrics_of_other_ports_are_anywhere():
    ports = fixed_ports(50151, 50161, 2)
    assert [one.metrics for one in (ports.scheduler, ports.standby, *ports.executors)] == [0] * 4


def test_free_ports_are_different():
    ports = free_ports(2)
    numbers = [
        port for one in (ports.scheduler, ports.standby) for port in (one.api, one.admin, one.health, one.metrics)
    ]
    numbers += [number for executor in ports.executors for number in (executor.api, executor.health, executor.metrics)]
    assert len(set(numbers)) == 14


@pytest.mark.skipif(not PORT_RANGE.exists(), reason="only Linux says which ports it gives to outgoing connections")
def test_free_ports_are_none_that_an_outgoing_connection_may_get():
    lowest, highest = map(int, PORT_RANGE.read_text().split())
    ports = free_ports(20)
    assert not [port.api for port in ports.executors if lowest <= port.api <= highest]


def test_scripts_are_found_beside_the_interpreter_then_on_the_path(fake_scripts, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(fake_scripts / "python"))
    assert find_script("paceline-scheduler") == str(fake_scripts / "paceline-scheduler")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "python"))
    monkeypatch.setenv("PATH", str(fake_scripts))
    assert find_script("paceline-executor") == str(fake_scripts / "paceline-executor")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ProgramMissingError, match=r"pip install 'paceline\[executor\]'"):
        find_script("paceline-executor")


def test_up_with_a_standby_says_how_to_reach_both(fake_scripts):
    with start_up(fake_scripts, "--standby") as process:
        text = read_until(process.stdout, "Ctrl-C stops everything")
        os.kill(children_of(process)[1], signal.SIGKILL)
        read_until(process.stderr, "scheduler-1: was killed by signal 9; starting it again in 0.5 s")
        read_until(process.stderr, "scheduler-1: ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    first = int(re.search(r"API +127\.0\.0\.1:(\d+)", text)[1])
    assert f"paceline chat --target 127.0.0.1:{first},127.0.0.1:{first + 3}\n" in text
    assert f"Admin      127.0.0.1:{first + 1}, 127.0.0.1:{first + 4}\n" in text
    assert "One scheduler drives the executors, the other one stands by." in text


def test_up_fails_where_running_requests_were_given_up(fake_scripts):
    with start_up(fake_scripts, DRAIN_EXIT_CODE="6") as process:
        read_until(process.stdout, "Ctrl-C stops everything")
        process.send_signal(signal.SIGTERM)
        assert "error: scheduler ended with exit code 6" in process.stderr.read()
        assert process.wait(30) == 6


def test_a_second_interrupt_is_no_success(fake_scripts, tmp_path):
    with start_up(fake_scripts, DRAIN_UNTIL_THERE=str(tmp_path / "never")) as process:
        read_until(process.stdout, "Ctrl-C stops everything")
        process.send_signal(signal.SIGINT)
        read_until(process.stderr, "Stopping; what runs may finish")
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 130

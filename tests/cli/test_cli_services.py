"""`up` and `demo` with stand-ins for the services: order, output, exit codes, signals."""

import ast
import inspect
import io
import os
import re
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import paceline_executor
import paceline_scheduler
from paceline_cli.app import app
from paceline_cli.commands.chaos import chaos
from paceline_cli.commands.demo import demo
from paceline_cli.commands.up import up as up_command
from paceline_cli.options import DEFAULT_MODEL, Handed, hands_on, model_for, names_of
from paceline_cli.supervisor import programs
from paceline_cli.supervisor.programs import (
    Deployment,
    ProgramMissingError,
    find_script,
    fixed_ports,
    free_ports,
    gateway_ports,
    programs_of,
    retold,
)

FAKE_SERVICES = Path(__file__).with_name("fake_services.py")
READY = "Ctrl-C stops everything"
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


class Screen(io.StringIO):
    """What is shown to a person, who waits for one text after another and acts when it is there."""

    def __init__(self, person):
        super().__init__()
        self._person, self._seen = person, 0
        self._awaited = next(person, None)

    def write(self, text):
        super().write(text)
        while self._awaited is not None and (found := self.getvalue().find(self._awaited, self._seen)) >= 0:
            self._seen = found + len(self._awaited)
            self._awaited = next(self._person, None)
        return len(text)


def stopping(*signals, at=READY):
    """A person who sends the program these signals when that is shown."""
    yield at
    for number in signals:
        os.kill(os.getpid(), number)


@pytest.fixture
def up(use_fakes, run_main, monkeypatch):
    """Run `paceline up` in this process, on free ports; returns its exit code and what was shown."""

    def up(*options, person=(), stderr=None, **environment):
        screen = Screen(iter(person))
        monkeypatch.setattr("sys.stdout", screen)
        monkeypatch.setattr("sys.stderr", stderr or screen)
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        ports = free_ports(1)
        while not can_listen(ports.scheduler.api + 3):  # where a standby would
            ports = free_ports(1)
        addresses = "--port", str(ports.scheduler.api), "--executor-port", str(ports.executors[0].api)
        return run_main("up", *options, *addresses, "--shutdown-timeout", "5"), screen.getvalue()

    return up


def can_listen(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_the_demo_streams_an_answer_and_leaves_nothing_behind(use_fakes):
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 0
    assert "What is the capital of France?\nfake: The capital of France is Paris.\n" in result.stdout
    assert re.search(r"6 tokens, time to first token \d+ ms", result.stdout)
    for step in ("fetching the model 100%", "loading the model 100%", "warming up 100%", "ready"):
        assert f"executor: {step}\n" in result.stderr


def test_the_demo_does_not_try_a_crash_again(use_fakes):
    result = CliRunner().invoke(app, ["demo", "--model", "crash"])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "error: executor ended with exit code 1: RuntimeError: a bug"


def test_up_says_what_is_where_and_what_it_waits_for_when_it_ends(up, tmp_path):
    """Addresses and what to try next; exit code 0, and all were told to end."""
    file, folder = tmp_path / "drained", tmp_path / "logs"

    def person():
        yield from stopping(signal.SIGINT)
        yield "Stopping; what runs may finish"
        yield "scheduler: 3 requests still run, for "
        file.touch()
        yield "Stopped."

    options = "--executors", "2", "--log-dir", str(folder)
    code, shown = up(*options, person=person(), DRAIN_UNTIL_THERE=file, DRAIN_REQUESTS=3)
    assert code == 0
    assert "Ready: fake" in shown
    assert re.search(r"Executors +127\.0\.0\.1:\d+, 127\.0\.0\.1:\d+\n", shown)
    assert re.search(r"paceline chat --target 127\.0\.0\.1:\d+\n", shown)
    assert re.search(r"3 requests still run, for \d+ s at most\n", shown)
    assert shown.endswith("Stopped.\n")
    logs = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(logs) == ["executor-0.log", "executor-1.log", "scheduler.log"]
    assert all('"draining"' in log for log in logs.values())


def kill_stand_in(service):
    """Kill the stand-in for a service that this process has started."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    beginning = f"{sys.executable}\0{FAKE_SERVICES}\0{service}\0"
    [process] = [child for child in children if Path(f"/proc/{child}/cmdline").read_text().startswith(beginning)]
    os.kill(int(process), signal.SIGKILL)


def test_up_starts_a_killed_service_again_and_waits_for_executors_as_long_as_there_is_hope(up, tmp_path, monkeypatch):
    file = tmp_path / "attach"

    def person():
        yield "scheduler: waiting for its executors"
        kill_stand_in("executor")
        yield "executor: was killed by signal 9; starting it again now"
        yield "executor: ready"
        file.touch()
        yield READY
        kill_stand_in("scheduler")
        yield "scheduler: was killed by signal 9; starting it again now"
        yield from stopping(signal.SIGINT, at="scheduler: ready")

    monkeypatch.setattr("paceline_cli.services._ATTACH_SECONDS", 0.1)
    code, shown = up(person=person(), ATTACH_WHEN_THERE=file)
    assert (code, shown.count("Ready: fake")) == (0, 1)


def test_up_serves_although_nobody_can_be_told(up):
    """A stderr on a full disk costs its lines, not the service."""
    with Path("/dev/full").open("w") as full:
        code, shown = up(person=stopping(signal.SIGTERM), stderr=full)
    assert (code, READY in shown) == (0, True)


def test_up_gives_up_on_what_can_never_work(up):
    code, shown = up("--model", "broken")
    assert (code, shown.count("broken")) == (3, 1)
    assert shown.splitlines()[-1] == "error: executor ended with exit code 3: there is no model 'broken'"


def test_an_error_of_a_service_leads_to_an_option_of_up(up):
    code, shown = up("--model", "taken")
    assert code == 4
    sentence = "cannot listen on 127.0.0.1:9465; choose another with --metrics-port"
    assert shown.splitlines()[-1] == f"error: executor ended with exit code 4: {sentence}"


@pytest.mark.parametrize(("kind", "package"), [("scheduler", paceline_scheduler), ("executor", paceline_executor)])
def test_no_error_of_a_service_names_an_option_that_the_command_lacks(kind, package):
    """Without saying whose it is. Of all texts of the service: no list of its errors could be complete."""
    files = [path for path in Path(package.__file__).parent.rglob("*.py") if path.name != "config.py"]
    found = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    texts = [node.value for node in found if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    naming = [text for text in texts if re.search(r"(?<![\w-])--[a-z]", text)]
    assert len(naming) >= 4
    for own in map(names_of, (up_command, demo, chaos)):
        for text in naming:
            shown = retold(kind, own, text)
            named = re.findall(r"--[a-z][a-z-]*[a-z](?![a-z-]| of paceline-)", shown)
            assert set(named) <= own, shown


def test_up_can_be_stopped_before_it_is_ready(up):
    code, shown = up("--model", "crash", person=stopping(signal.SIGINT, at="starting it again in 0.2 s"))
    assert code == 0
    assert "executor: ended with exit code 1 (RuntimeError: a bug); starting it again in 0.1 s" in shown


def test_up_fails_where_running_requests_were_given_up(up):
    code, shown = up(person=stopping(signal.SIGTERM), DRAIN_EXIT_CODE=6)
    assert code == 6
    assert "error: scheduler ended with exit code 6" in shown


def test_a_second_interrupt_is_no_success(up, tmp_path):
    def person():
        yield from stopping(signal.SIGINT)
        yield from stopping(signal.SIGINT, at="Stopping; what runs may finish")

    code, _ = up(person=person(), DRAIN_UNTIL_THERE=tmp_path / "never")
    assert code == 130


def test_up_with_a_standby_says_how_to_reach_both(up):
    code, shown = up("--standby", person=stopping(signal.SIGTERM))
    first = int(re.search(r"API +127\.0\.0\.1:(\d+)", shown)[1])
    assert code == 0
    assert f"paceline chat --target 127.0.0.1:{first},127.0.0.1:{first + 3}\n" in shown
    assert f"Admin      127.0.0.1:{first + 1}, 127.0.0.1:{first + 4}\n" in shown
    assert f"Metrics    127.0.0.1:{first + 6}, 127.0.0.1:{first + 9}, " in shown
    assert "One scheduler drives the executors, the other one stands by." in shown


# Command lines


def deployment(num_executors=1, **options):
    """A deployment on the documented ports."""
    ports = fixed_ports(50051, 50061, num_executors)
    return Deployment(**{"model": "m", "host": "127.0.0.1", **options}, ports=ports, shutdown_timeout_seconds=30)


def commands_of(num_executors=1, **options):
    """Its command lines: those of schedulers, then those of executors."""
    return [program.command for program in programs_of(deployment(num_executors, **options))]


def option(command, name):
    """The value after an option."""
    return command[command.index(name) + 1]


def ports_of(command, *kinds):
    return [option(command, f"--{kind}port") for kind in kinds]


def test_ports_follow_the_documentation(use_fakes):
    """Scheduler +0, +1, +2; each executor ten further, its health port two above, and so are the ports of metrics."""
    scheduler, first, second = commands_of(2)
    assert option(first, "--model") == "m"
    assert ports_of(first, "", "health-", "metrics-") == ["50061", "50063", "9465"]
    assert ports_of(second, "", "health-", "metrics-") == ["50071", "50073", "9475"]
    assert ports_of(scheduler, "", "admin-", "health-", "metrics-") == ["50051", "50052", "50053", "9464"]
    assert option(scheduler, "--executors") == "127.0.0.1:50061,127.0.0.1:50071"


def test_a_standby_is_a_second_scheduler_of_the_same_executors(use_fakes):
    """Where it is started again, the other one has had the time to take over."""
    pair = deployment(2, with_standby=True)
    programs = programs_of(pair)
    assert [program.name for program in programs] == ["scheduler-0", "scheduler-1", "executor-0", "executor-1"]
    assert [program.stop_stage for program in programs] == [0, 0, 1, 1]
    assert [program.min_restart_seconds for program in programs] == [0.5, 0.5, 0, 0]
    first, second = (program.command for program in programs[:2])
    assert ports_of(first, "", "admin-", "health-", "metrics-") == ["50051", "50052", "50053", "9464"]
    assert ports_of(second, "", "admin-", "health-", "metrics-") == ["50054", "50055", "50056", "9467"]
    assert "--standby" in first
    assert "--standby" in second
    assert option(first, "--executors") == option(second, "--executors")
    assert pair.target == "127.0.0.1:50051,127.0.0.1:50054"


def test_a_gateway_is_told_where_the_schedulers_are_and_ends_before_them(use_fakes):
    for first, expected in ((50051, ["8000", "9466"]), (50151, ["50158", "50159"])):
        ports = fixed_ports(first, 50061, 1)
        gateway = programs_of(
            replace(deployment(tls_dir=Path("c"), with_standby=True), ports=ports, gateway=gateway_ports(ports))
        )[-1]
        assert (gateway.name, gateway.stop_stage) == ("gateway", -1)
        assert ports_of(gateway.command, "", "metrics-") == expected
        assert option(gateway.command, "--target") == f"127.0.0.1:{first},127.0.0.1:{first + 3}"
        assert option(gateway.command, "--tls-dir") == "c"


def test_only_what_is_asked_for_is_passed_on_and_to_whom_it_concerns(use_fakes):
    for_executors = {"num_threads": 1, "runner": "cpu"}
    for_schedulers = {"tokens": Path("tokens")}
    for_both = {"tls_dir": Path("certificates")}

    def options_of(asked):
        return {f"--{name.replace('_', '-')}": str(value) for name, value in asked.items()}

    def passed_on(command):
        every = options_of(for_executors | for_schedulers | for_both)
        return {name: option(command, name) for name in every if name in command}

    assert [passed_on(command) for command in commands_of(with_standby=True)] == [{}] * 3
    *schedulers, executor = commands_of(with_standby=True, **for_executors, **for_schedulers, **for_both)
    assert [passed_on(scheduler) for scheduler in schedulers] == [options_of(for_schedulers | for_both)] * 2
    assert passed_on(executor) == options_of(for_executors | for_both)


def test_the_options_of_a_program_are_handed_on_as_they_were_typed(use_fakes):
    taken = []

    @hands_on
    def command(*, handed: Handed) -> None:
        taken.append(handed)

    asked = {"max_num_seqs": "3", "record_dir": "recordings", "cache_dir": "cache"}
    everything = dict.fromkeys(inspect.signature(command).parameters)
    command(**everything | asked)
    (handed,) = taken
    assert handed.scheduler == ("--cache-dir", "cache", "--record-dir", "recordings")
    assert handed.executor == ("--max-num-seqs", "3", "--cache-dir", "cache")
    scheduler, executor = commands_of(scheduler_options=handed.scheduler, executor_options=handed.executor)
    assert scheduler[-4:] == handed.scheduler
    assert executor[-4:] == handed.executor


def test_offline_is_a_matter_of_the_environment(use_fakes):
    (_, alone), (_, offline) = programs_of(deployment()), programs_of(deployment(offline=True))
    assert (alone.name, alone.environment) == ("executor", ())
    assert offline.environment == (("HF_HUB_OFFLINE", "1"),)


def test_without_a_model_executors_are_told_none(use_fakes):
    _, executor = commands_of(model=None, runner="simulated")
    assert "--model" not in executor


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


@pytest.mark.parametrize(("num_executors", "share"), [(2, "3"), (3, "2"), (4, "1"), (64, "1")])
def test_several_executors_share_what_this_process_may_use(use_fakes, monkeypatch, num_executors, share):
    """Not what the machine has: an executor refuses more threads than its affinity allows."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(40, 46)))
    _, *executors = commands_of(num_executors)
    assert [option(executor, "--num-threads") for executor in executors] == [share] * num_executors
    _, *executors = commands_of(num_executors, runner="cuda")
    assert not any("--num-threads" in executor for executor in executors), "a GPU takes none"


@pytest.mark.parametrize(
    ("host", "target"),
    [
        ("127.0.0.1", "127.0.0.1:50051"),
        ("0.0.0.0", "127.0.0.1:50051"),  # noqa: S104  recognised, not bound
        ("::1", "[::1]:50051"),
        ("::", "127.0.0.1:50051"),
    ],
)
def test_only_the_api_listens_elsewhere_and_only_on_purpose(use_fakes, host, target):
    """The scheduler refuses to let other machines in otherwise."""
    scheduler, executor = commands_of(host=host)
    assert ["--insecure" in command for command in (scheduler, executor)] == [False, False]
    assert ["--insecure" in command for command in commands_of(host=host, insecure=True)] == [True, False]
    assert (option(scheduler, "--host"), option(executor, "--host")) == (host, "127.0.0.1")
    assert option(scheduler, "--executors") == "127.0.0.1:50061"
    assert deployment(host=host).target == target


@pytest.mark.parametrize(
    ("metrics_port", "expected"), [(None, [50157, 50160, 50167, 50177]), (7000, [7000, 7003, 7001, 7011])]
)
def test_metrics_of_other_ports_are_six_above_or_where_they_are_wanted(metrics_port, expected):
    ports = fixed_ports(50151, 50161, 2, metrics_port)
    assert [one.metrics for one in (ports.scheduler, ports.standby, *ports.executors)] == expected


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
    with pytest.raises(
        ProgramMissingError, match=r"in the checkout, pip install \./protos \./clients '\.\[executor\]'"
    ):
        find_script("paceline-executor")

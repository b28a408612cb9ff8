"""The scheduler process starts, or says in one line why it does not."""

import re
import signal
import socket
import subprocess
import sys

import pytest

from paceline_scheduler.config import parse_config
from paceline_scheduler.errors import ConfigError
from repository_checks.knobs import MAX_KNOBS, options
from service_processes.logged import SchedulerTestProcess


def run_scheduler(*arguments):
    """Run a scheduler that ends by itself."""
    command = (sys.executable, "-m", "paceline_scheduler", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_option_and_exit_code():
    done = run_scheduler("--help")
    assert done.returncode == 0
    assert len(options(done.stdout)) <= MAX_KNOBS
    for word in ("--executors", "dns:///", "--shutdown-timeout", "Exit codes", "SIGTERM"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("", "--executors"),
        ("--executors nowhere", "'nowhere' is not of the form host:port"),
        ("--executors a:1,a:1", "named twice"),
        ("--executors a:1 --port 70000", "--port: '70000' is not a number from 0 to 65535"),
        ("--executors a:1 --port x", "--port"),
        ("--executors a:1 --speculation nowhere.json", "cannot read nowhere.json"),
        ("--executors a:1 --speculation {", "write JSON such as"),
        ('--executors a:1 --speculation {"drafter":1}', "has no field ['drafter']; there is max_num_draft_tokens"),
        ('--executors a:1 --speculation {"max_num_draft_tokens":64}', "whole number from 0 to 63"),
        ('--executors a:1 --speculation {"max_num_draft_tokens":true}', "whole number from 0 to 63"),
        ("--executors a:1 --port 7 --admin-port 7", "have to differ"),
        ("--executors a:1 --host example.org", "--host: 'example.org' is not an IP address"),
        ("--executors a:1 --max-num-queued-reqs 0", "--max-num-queued-reqs"),
        ("--executors a:1 --max-num-batched-tokens -1", "--max-num-batched-tokens"),
        ("--executors a:1 --shutdown-timeout nan", "--shutdown-timeout"),
        ("--executors a:1 --log-level loud", "--log-level"),
        ("--executors a:1 --host 0.0.0.0", "--host: other machines reach 0.0.0.0: give --tls-dir, or --insecure"),
        ("--executors a:1 --host ::ffff:0.0.0.0", "--host: other machines reach ::ffff:0.0.0.0"),
        ("--executors a:1 --host 10.0.0.1 --tokens a", "--host: other machines reach 10.0.0.1"),
        ("--executors a:1 --admin-host ::", "--admin-host: other machines reach ::"),
        ("--executors a:1 --advertise here", "--advertise: 'here' is not of the form host:port"),
        (f"--executors a:1 --advertise {'x' * 256}:1", "--advertise: is longer than 256 bytes"),
        ("--executors a:1 --exec b:1", "unrecognized arguments: --exec"),
        ("--executors a:1 --cache-dir=", "--cache-dir: is empty"),
    ],
)
def test_a_wrong_option_is_named(arguments, complaint):
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        parse_config(arguments.split())


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ("", "127.0.0.1:7"),
        ("--host ::1", "[::1]:7"),
        ("--host 0.0.0.0 --insecure", f"{socket.gethostname()}:7"),
        ("--host :: --insecure --advertise pod.example:9", "pod.example:9"),
    ],
)
def test_clients_are_sent_to_where_this_scheduler_is_reached(arguments, address):
    assert parse_config(f"--executors a:1 {arguments}".split()).reached_at(7) == address


@pytest.mark.parametrize(("text", "most"), [('{"max_num_draft_tokens": 0}', 0), ("{}", 63), (None, 63)])
def test_drafts_are_bounded_by_json_or_by_a_file_with_it(tmp_path, text, most):
    speculation = [] if text is None else ["--speculation", text]
    assert parse_config(["--executors", "a:1", *speculation]).speculation == most
    path = tmp_path / "speculation.json"
    path.write_text(text or "{}")
    assert parse_config(["--executors", "a:1", "--speculation", str(path)]).speculation == most


@pytest.mark.parametrize(("arguments", "takeover"), [("", False), (" --takeover", True)])
def test_nobody_is_displaced_unless_an_operator_says_so(arguments, takeover):
    """A second scheduler waits in the queue by itself."""
    assert parse_config(f"--executors a:1{arguments}".split()).takeover is takeover


def test_a_wrong_option_ends_the_process_with_one_line():
    """On stderr, with exit code 2."""
    done = run_scheduler("--executors", "nowhere")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "paceline-scheduler: error: --executors: 'nowhere' is not of the form host:port or dns:///name:port"
    ]
    assert done.stdout == ""


@pytest.mark.parametrize("option", ["--port", "--metrics-port"])  # the first and the last; the others: test_ports
def test_a_port_in_use_ends_the_process_with_one_line(option):
    """It names the option to change, with exit code 4."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = dict.fromkeys(("--port", "--admin-port", "--health-port", "--metrics-port"), "0") | {option: str(port)}
        done = run_scheduler("--executors", "127.0.0.1:1", *(word for pair in free.items() for word in pair))
    assert done.returncode == 4
    (line,) = done.stderr.splitlines()
    assert f"cannot listen on 127.0.0.1:{port}" in line
    assert line.endswith(option)


def test_options_are_read_without_the_network_stack():
    """--help and mistakes answer at once: nothing heavy is imported for them."""
    code = (
        "import sys, paceline_scheduler.__main__; print({'grpc', 'numpy', 'tokenizers', 'uvloop'} & set(sys.modules))"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


_STARTED = """
import sys
from paceline_scheduler import __main__
from paceline_scheduler.config import prepare_grpc, prepare_structlog
prepare_grpc()
prepare_structlog()
import paceline.process.logs, uvloop, paceline_scheduler.serving.servicer_ports
listening = set(sys.modules)
import paceline_scheduler.process
print(*sorted({"numpy", "tokenizers", "paceline.v1", "paceline_scheduler.core"} & listening))
heavy = {"torch", "transformers", "numba", "scipy", "pandas", "rich", "jinja2", "email", "http"}
print(*sorted(heavy & set(sys.modules)))
"""


def test_the_ports_are_open_before_most_is_imported_and_what_is_not_needed_never_is():
    done = subprocess.run((sys.executable, "-c", _STARTED), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["", ""]


_IMPORTED = ("argparse", "asyncio", "uvloop", "grpc", "paceline_scheduler.process")
_SIGNALLED = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), int(sys.argv[2]))

sys.meta_path.insert(0, Finder())
from paceline_scheduler.__main__ import main
main(["--executors", "127.0.0.1:1", "--port", "0", "--admin-port", "0", "--health-port", "0", "--metrics-port", "0"])
"""


@pytest.mark.parametrize(
    ("module", "number"),
    [
        *((module, signal.SIGINT) for module in _IMPORTED),
        (_IMPORTED[0], signal.SIGTERM),
        *(pytest.param(module, signal.SIGTERM, marks=pytest.mark.slow) for module in _IMPORTED[1:]),
    ],
)
def test_a_signal_while_the_process_starts_ends_it_without_a_word(module, number):
    """Whatever is being imported then: it was asked to stop before it began, and that is no failure."""
    command = (sys.executable, "-c", _SIGNALLED, module, str(int(number)))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


async def test_an_unreachable_executor_is_tried_again_and_again_without_flooding_the_log():
    process = await SchedulerTestProcess.start("--executors", "127.0.0.1:1")
    try:
        listening = await process.event("listening")
        assert {"port", "admin_port", "health_port", "pid", "scheduler_id"} <= listening.keys()
        complaint = await process.event("waiting_for_executor", lambda event: event["attempts"] >= 1)
        assert "refused" in complaint["reason"].lower()
        assert "ready" not in process.names()
    finally:
        await process.stop()
    assert process.names().count("waiting_for_executor") <= 2

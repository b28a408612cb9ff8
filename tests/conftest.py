"""What all tests share: the three tiers, how Hypothesis searches, and one real system."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
import structlog
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from hypothesis import HealthCheck, settings

from paceline.v1.admin_pb2 import ListExecutorsRequest
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from paceline_executor.config import let_waiting_threads_sleep
from repository_checks.programs import BIN
from suite_cost import ProcessCost, SuiteCost

# GPU kernels are interpreted on the CPU, which Triton wants to know before anything imports it. `TRITON_INTERPRET=0`
# runs their tests on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Executors that tests start without naming a runner are on the CPU, whatever this machine has.
if os.environ["TRITON_INTERPRET"] == "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# As an executor does: where the other core is busy, a thread that waits would burn this one.
let_waiting_threads_sleep()

# What a shell runs in the background ignores Ctrl-C, and its children do, too: programs that are sent one would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Exceptions that tests cause are logged as plain text: the default, a picture of each with the source and the variables
# of all its frames, takes half a second.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)

# On a busy machine an example may be slow: time is never asserted, so there is no deadline. The same examples every
# run: a failure is about the change at hand. `make soak` searches further, from a new seed each time.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("test", derandomize=True, max_examples=30, **PATIENT)
settings.register_profile("all", derandomize=True, max_examples=100, **PATIENT)
settings.register_profile("soak", derandomize=False, max_examples=5000, **PATIENT)

# What a tier leaves out: `make test` finds what a change breaks where it was made, `make test-all` what it breaks
# elsewhere, `make soak` what nobody thought of.
LEFT_OUT = {"test": {"slow", "soak"}, "all": {"soak"}, "soak": set()}

# The first start may have to download the model and compile kernels, on a machine that is busy with other tests.
MAX_START_SECONDS = 480
MAX_STOP_SECONDS = 60

# Modules whose tests share something that takes long to make: a system, models in memory, an oracle.
SHARING_MODULES = (
    "test_gguf_file",
    "test_hostile_connections",
    "test_images",
    "test_kernel_compiling",
    "test_overload",
    "test_real_faults",
    "test_real_model",
    "test_tokenizer_gguf",
)


def pytest_addoption(parser):
    """Which tier runs; the profile of Hypothesis has its name."""
    parser.addoption("--tier", choices=list(LEFT_OUT), default="test", help="run `make test`, `test-all` or `soak`")
    parser.addoption("--revision", help="of the processes that serve together with those of this checkout")


def pytest_configure(config):
    """One profile for the whole run, whose cost is told where all of a tier runs."""
    settings.load_profile(config.getoption("--tier"))
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword + config.option.markexpr:
        config.pluginmanager.register(CostOfTier(config))


class CostOfTier:
    """The CPU time of all tests, written to a file; in continuous integration the run fails where it is above its limit
    by more than what machines differ.
    """

    def __init__(self, config):
        self.config, self.own, self.sum = config, ProcessCost(), SuiteCost()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        result = yield
        self.own.test_ends()
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.sum.add(*getattr(node, "workeroutput", {}).get("cost", (0.0, [])))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["cost"] = self.own.taken()
            return
        # Workers are this process's children: where there are any, they have told theirs.
        if not self.config.getoption("numprocesses", None):
            self.sum.add(*self.own.taken())
        tier = self.config.getoption("--tier")
        self.sum.write(tier)
        if "CI" in os.environ and self.sum.is_above_limit(tier):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.write_line(self.sum.told(self.config.getoption("--tier")))


@pytest.hookimpl(tryfirst=True)  # pytest-xdist looks at the groups next
def pytest_collection_modifyitems(config, items):
    """Leave out what belongs to a longer tier, and keep together what shares something costly."""
    for item in items:
        group = group_of(item)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
    unwanted = LEFT_OUT[config.getoption("--tier")]
    left_out = [item for item in items if any(mark.name in unwanted for mark in item.iter_markers())]
    items[:] = [item for item in items if all(mark.name not in unwanted for mark in item.iter_markers())]
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Torch computes on one thread: others wait for each other, spinning, longer than they compute on a busy machine.
    Triton's interpreter does in a third of the time what it did.

    Before each test, because numba's threads set the number anew when they start, and tests import what they need.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
    if "triton.runtime.interpreter" in sys.modules:
        from kernel_rig.quick_interpreter import quicken

        quicken()


def pytest_collection_finish():
    """What was imported and collected stays: to look through it again and again costs tests that collect garbage."""
    gc.freeze()


def group_of(item):
    """The tests that one process should run, since they share a running system or what else their module sets up."""
    if "running_system" in item.fixturenames:
        return "running_system"
    return item.path.stem if item.path.stem in SHARING_MODULES else None


@dataclass(frozen=True)
class RunningSystem:
    """A scheduler and an executor with the default model, as `paceline up` starts them, on free ports."""

    port: int
    executor_port: int
    output: Path

    @property
    def api(self):
        return f"127.0.0.1:{self.port}"

    @property
    def executor(self):
        return f"127.0.0.1:{self.executor_port}"

    @property
    def addresses(self):
        """From the addresses written in READMEs, which are the default ones, to those of this system."""
        ours = {50051 + i: self.port + i for i in range(3)} | {50061 + i: self.executor_port + i for i in (0, 2)}
        return {f"localhost:{default}": f"127.0.0.1:{port}" for default, port in ours.items()}

    async def num_running_requests(self):
        """How many requests are on executors now, as the scheduler sees it."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port + 1}") as channel:
            listed = await AdminServiceStub(channel).ListExecutors(ListExecutorsRequest())
        return sum(executor.num_running_requests for executor in listed.executors)


@pytest.fixture
def first_free_port():
    return free_ports(3, start=first_port())


@pytest.fixture(scope="session")
def running_system(tmp_path_factory):
    """The real thing, once for all tests that talk to it and leave it as it was; it must end in good order, with 0."""
    port = free_ports(3, start=first_port())
    system = RunningSystem(port, free_ports(3, start=port + 3), tmp_path_factory.mktemp("system") / "output.txt")
    command = [BIN / "paceline", "up", "--port", str(system.port), "--executor-port", str(system.executor_port)]
    with system.output.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_ready(system, process)
        yield system
        process.send_signal(signal.SIGTERM)
        assert process.wait(MAX_STOP_SECONDS) == 0, system.output.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A GGUF file of random weights: what it says means nothing, is the same whenever it is asked, and soon repeats."""
    from random_models import TINY_CONFIG, RandomCheckpoint, gguf_parts  # imports torch

    checkpoint = RandomCheckpoint(replace(TINY_CONFIG, head_dim=32, num_layers=8, max_model_len=1024))
    return gguf_parts(checkpoint).write(tmp_path_factory.mktemp("model") / "tiny.gguf")


def first_port():
    """Where to look for free ports: elsewhere than other processes of this run, and than other runs."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return 20000 + 2500 * (worker % 4) + os.getpid() % 2000


def free_ports(count, start):
    """The first of `count` neighbouring free ports, below those that the operating system gives out by itself."""
    for first in range(start, 32000, count):
        with ExitStack() as sockets:
            try:
                for port in range(first, first + count):
                    sockets.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


def wait_until_ready(system, process):
    """Return when the scheduler says that it serves; fail with its output when it ends or takes too long."""
    request = HealthCheckRequest(service="paceline.v1.InferenceService")
    deadline = time.monotonic() + MAX_START_SECONDS
    with grpc.insecure_channel(system.api, options=[("grpc.max_reconnect_backoff_ms", 500)]) as channel:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if HealthStub(channel).Check(request, timeout=1).status == HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass
            time.sleep(0.1)
    pytest.fail(f"the system did not become ready\n{system.output.read_text()}", pytrace=False)

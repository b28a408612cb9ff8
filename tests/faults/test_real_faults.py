"""Faults done to a real system under load: every stream is what it is undisturbed, bit by bit.

One system and one load for most of them: two schedulers, two executors, and 32 streams of a real model; in `make test`
12 streams of executors whose tokens are hashes of all before, at a pace that leaves the machine time. Others have
executors that run the GPU's code, on its twin, with rows on the device, rings and two steps in flight, or in which a
second model drafts. No time is asserted; the figures are printed at the end. In `make soak` each kind is done 50 times
to a system of its own, with freezes of a minute.
"""

import asyncio
import contextlib

import grpc.aio
import pytest
import pytest_asyncio
from rich.console import Console

from paceline.v1.admin_pb2 import ListExecutorsRequest
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from paceline_cli.chaos.campaign import FaultTiming, SettledWhen
from paceline_cli.chaos.experiment import Experiment, Setting
from paceline_cli.chaos.faults import Fault, FaultKind, FaultTimes
from paceline_cli.chaos.metrics import between
from paceline_cli.chaos.report import figures_of
from paceline_cli.chaos.tables import print_summary
from paceline_cli.chaos.views import FaultLines
from paceline_cli.chaos.waiting import until
from paceline_cli.supervisor.programs import Deployment, free_ports

MAX_END_SECONDS = 60

# The five that `make test` tries.
FAULTS = [
    Fault(FaultKind.SCHEDULER_KILL),
    Fault(FaultKind.EXECUTOR_KILL),
    Fault(FaultKind.CLIENT_CUT),
    Fault(FaultKind.SCHEDULER_FREEZE, 2.0),
    Fault(FaultKind.BOTH_KILL),
]
# A freeze of up to a second is waited for, one of 2 s ends with another scheduler, or executor, at work.
MORE_FAULTS = [
    Fault(FaultKind.SCHEDULERS_KILL),
    Fault(FaultKind.SCHEDULER_KILL),
    Fault(FaultKind.CLIENT_SILENCE, 1.0),
    Fault(FaultKind.SCHEDULER_FREEZE, 0.1),
    Fault(FaultKind.SCHEDULER_FREEZE, 0.5),
    Fault(FaultKind.CLIENT_KILL),
    Fault(FaultKind.CLIENT_DELAY, 1.0),
    Fault(FaultKind.CLIENT_THROTTLE, 1.0),
    Fault(FaultKind.CLIENT_CUT),
    Fault(FaultKind.SCHEDULERS_KILL),
    Fault(FaultKind.RIVAL, 1.0),
    Fault(FaultKind.EXECUTOR_FREEZE, 0.1),
    Fault(FaultKind.EXECUTOR_FREEZE, 0.5),
    Fault(FaultKind.EXECUTOR_FREEZE, 2.0),
    Fault(FaultKind.EXECUTOR_CUT),
    Fault(FaultKind.EXECUTOR_CUT),
    Fault(FaultKind.EXECUTOR_SILENCE, 1.0),
    Fault(FaultKind.EXECUTOR_SILENCE, 2.0),
    Fault(FaultKind.EXECUTOR_DELAY, 1.0),
    Fault(FaultKind.EXECUTOR_THROTTLE, 1.0),
    Fault(FaultKind.SCHEDULER_KILL),
    Fault(FaultKind.CLIENT_SILENCE, 2.0),
    Fault(FaultKind.EXECUTORS_KILL),
]
# After an executor died the others of this list come while it loads again, which takes longer than anything else.
NEEDS_A_SPARE = {FaultKind.EXECUTOR_KILL, FaultKind.BOTH_KILL, FaultKind.EXECUTORS_KILL}


def setting(kinds, *, timing, times=None, model="smollm2-135m-instruct", num_streams=32, seed=0, **options):
    """Streams on two executors with these options, with a standby."""
    return Setting(
        deployment=Deployment(
            model=model,
            host="127.0.0.1",
            ports=free_ports(2),
            shutdown_timeout_seconds=10,
            with_standby=True,
            **options,
        ),
        kinds=kinds,
        num_streams=num_streams,
        max_tokens=40,
        seed=seed,
        # On a busy machine an executor takes longer to start than clients wait by default.
        max_outage_seconds=300.0,
        timing=timing,
        times=times or FaultTimes(),
    )


@contextlib.asynccontextmanager
async def undamaged(chosen, config):
    """An experiment that ends with every stream whole and nothing left running; its figures are printed."""
    experiment = Experiment(chosen, FaultLines(Console(stderr=True, soft_wrap=True), None))
    async with experiment:
        yield experiment
        await experiment.finish()
        async with asyncio.timeout(MAX_END_SECONDS):
            while await num_running_requests(experiment.system):
                await asyncio.sleep(0.1)
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print_summary(Console(width=120, highlight=False), experiment.ledger)
    assert figures_of("", experiment.ledger.windows).is_clean, experiment.ledger.first_failure


async def executors_of(*schedulers):
    """What the schedulers at these ports say of their executors."""
    told = []
    for ports in schedulers:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.admin}") as channel:
            told += (await AdminServiceStub(channel).ListExecutors(ListExecutorsRequest())).executors
    return told


async def num_running_requests(system):
    """How many requests are on executors, as the scheduler that serves sees it."""
    schedulers = dict(zip(system.deployment.scheduler_names, system.deployment.schedulers, strict=True))
    told = await executors_of(schedulers[await system.active_scheduler()])
    return sum(executor.num_running_requests for executor in told)


@pytest.fixture(scope="module")
def paced(tmp_path_factory):
    """Executors without a model, whose steps take 20 ms. Unpaced, streams that nothing slows would load two cores."""
    times = tmp_path_factory.mktemp("steps") / "times.json"
    times.write_text('{"points": [{"num_tokens": 1, "duration_us": 20000}]}')
    return {"model": None, "runner": f"simulated:{times}"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--runner", "twin"),
        ("--quantization", "none", "--speculation", '{"drafter": "target_copy"}'),
    ],
    ids=["a device that keeps rows", "a model that drafts"],
)
async def test_no_token_is_lost_when_executors_of_other_kinds_die(options, tiny_model, request):
    kinds = (FaultKind.SCHEDULER_KILL, FaultKind.EXECUTOR_KILL)
    load = {"model": str(tiny_model), "num_streams": 8, "executor_options": ("--max-num-seqs", "8", *options)}
    async with undamaged(setting(kinds, timing=FaultTiming(settle_seconds=120), **load), request.config) as running:
        await running.campaign.run(kinds)
        told = await executors_of(*running.system.deployment.schedulers)
    assert sum(window.num_in_flight for window in running.ledger.windows) > 0
    assert sum(executor.steps.num_accepted_draft_tokens for executor in told) > 0


@pytest.mark.slow
async def test_streams_go_on_between_executors_of_two_ranks_and_of_one(tiny_model, request):
    """A rank of the first is frozen, then killed, then the other executor dies."""
    kinds = (FaultKind.RANK_FREEZE, FaultKind.RANK_KILL, FaultKind.EXECUTOR_KILL)
    options = ("--max-num-seqs", "8", "--quantization", "none", "--tensor-parallel-size", "2,1")
    load = {"model": str(tiny_model), "num_streams": 8, "executor_options": options, "seed": 1}
    timing, times = FaultTiming(settle_seconds=120), FaultTimes(freezes=(2.0,))
    async with undamaged(setting(kinds, timing=timing, times=times, **load), request.config) as running:
        await running.campaign.run(kinds)
    _, _, *faults = running.ledger.windows
    assert [window.detail for window in faults] == ["executor-0's rank 1 for 2 s", "executor-0's rank 1", "executor-1"]
    assert [len(window.ranks.seconds) for window in faults] == [1, 1, 0]
    assert running.ledger.seen.num_placed_again > 0


async def test_metrics_say_what_clients_saw_when_nothing_is_left_that_could_go_on(paced, request):
    kinds = (FaultKind.EXECUTORS_KILL,)
    quick = setting(kinds, timing=FaultTiming(settle_seconds=120), num_streams=8, **paced)
    async with undamaged(quick, request.config) as running:
        before = await running.system.metrics()
        await running.campaign.run(kinds)
        await running.system.whole()
        claims = between(before, await running.system.metrics())
    assert claims.is_whole
    assert claims.sum_of("recoveries_total", 'kind="executor"') >= 1


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def experiment(request, paced):
    """The one that all faults below are done to; a load runs on it meanwhile."""
    kinds = tuple({fault.kind for fault in (*FAULTS, *MORE_FAULTS)})
    is_quick = request.config.getoption("--tier") == "test"
    load = {"num_streams": 12, **paced} if is_quick else {}
    async with undamaged(setting(kinds, timing=FaultTiming(settle_seconds=240), **load), request.config) as running:
        yield running


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "fault",
    [*FAULTS, *(pytest.param(fault, marks=pytest.mark.slow) for fault in MORE_FAULTS)],
    ids=lambda fault: f"{fault.kind}-{fault.seconds:g}",
)
async def test_what_is_delivered_under_a_fault_is_what_is_delivered_without(fault, experiment):
    if fault.kind in NEEDS_A_SPARE:
        await experiment.system.whole()
    ledger = experiment.ledger
    # The others wait for their first token, or have just ended.
    num_in_flight = experiment._setting.num_streams // 2
    await until(lambda: sum(stream.num_tokens > 0 for stream in ledger.running) >= num_in_flight)
    window = await experiment.campaign.inject(fault, SettledWhen.STREAMS)
    assert not window.is_given_up, f"{ledger.num_waiting} streams got nothing any more"
    assert window.num_in_flight > 0
    assert (window.num_failed, window.mismatches.first) == (0, None), ledger.first_failure


@pytest.mark.soak
@pytest.mark.parametrize("kind", FaultKind)
async def test_each_fault_fifty_times(kind, request):
    chosen = setting(
        (kind,),
        timing=FaultTiming(settle_seconds=300),
        times=FaultTimes(freezes=(0.1, 1.0, 5.0, 60.0), links=(0.2, 1.0, 3.0, 10.0)),
        executor_options=("--quantization", "none", "--tensor-parallel-size", "3") if kind.is_of_ranks else (),
    )
    async with undamaged(chosen, request.config) as experiment:
        await experiment.campaign.run([kind] * 50)

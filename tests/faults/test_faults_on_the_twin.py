"""Faults done to executors other than the default one: those that run the GPU's code, on its twin, with rows on the
device, rings and two steps in flight; and those in which a second model drafts.

A tiny model of random weights: what it says means nothing, and is the same whenever it is asked.
"""

import grpc.aio
import pytest
from rich.console import Console

from paceline.v1.admin_pb2 import ListExecutorsRequest
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from paceline_cli.chaos.campaign import FaultTiming
from paceline_cli.chaos.experiment import Experiment, Setting
from paceline_cli.chaos.faults import FaultKind
from paceline_cli.chaos.report import figures_of
from paceline_cli.chaos.views import FaultLines
from paceline_cli.supervisor.programs import Deployment, free_ports

pytestmark = pytest.mark.slow

KINDS = (FaultKind.SCHEDULER_KILL, FaultKind.EXECUTOR_KILL)


def setting(tiny_model, **options):
    """Eight streams on two executors, with a standby."""
    deployment = Deployment(
        model=str(tiny_model),
        host="127.0.0.1",
        ports=free_ports(2),
        shutdown_timeout_seconds=10,
        max_num_seqs=8,
        with_standby=True,
        **options,
    )
    return Setting(
        deployment=deployment,
        kinds=KINDS,
        num_streams=8,
        max_tokens=40,
        max_outage_seconds=300.0,
        timing=FaultTiming(settle_seconds=120),
    )


async def num_right_drafts(system):
    """Of all executors."""
    num_right = 0
    for ports in system.deployment.schedulers:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.admin}") as channel:
            listed = await AdminServiceStub(channel).ListExecutors(ListExecutorsRequest())
        num_right += sum(executor.steps.num_accepted_draft_tokens for executor in listed.executors)
    return num_right


@pytest.mark.parametrize(
    "options",
    [
        {"runner": "twin"},
        {"quantization": "none", "executor_options": ("--speculation", '{"drafter": "target_copy"}')},
    ],
    ids=["a device that keeps rows", "a model that drafts"],
)
async def test_no_token_is_lost_when_processes_die(options, tiny_model):
    chosen = setting(tiny_model, **options)
    async with Experiment(chosen, FaultLines(Console(stderr=True, soft_wrap=True), None)) as experiment:
        await experiment.campaign.run(KINDS)
        num_right = await num_right_drafts(experiment.system)
        await experiment.finish()
    windows = experiment.ledger.windows
    assert figures_of("", windows).is_clean, experiment.ledger.first_failure
    assert sum(window.num_in_flight for window in windows) > 0
    assert num_right > 0

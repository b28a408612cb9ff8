"""Faults done to executors other than the default one: those that run the GPU's code, on its twin, with rows on the
device, rings and two steps in flight; and those in which a second model drafts.

A tiny model of random weights: what it says means nothing, and is the same whenever it is asked.
"""

from functools import partial

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


async def ledger_of(setting, look=None):
    """What became of all streams while processes died. look: at the system, while streams run."""
    async with Experiment(setting, FaultLines(Console(stderr=True, soft_wrap=True), None)) as experiment:
        await experiment.campaign.run(KINDS)
        if look is not None:
            await look(experiment.system)
        await experiment.finish()
    return experiment.ledger


async def count_drafts(num_accepted, system):
    """Those that were right, of every executor."""
    for ports in system.deployment.schedulers:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.admin}") as channel:
            listed = await AdminServiceStub(channel).ListExecutors(ListExecutorsRequest())
        num_accepted.extend(executor.steps.num_accepted_draft_tokens for executor in listed.executors)


async def test_a_device_that_keeps_rows_loses_no_token_when_processes_die(tiny_model):
    num_accepted = []
    ledger = await ledger_of(setting(tiny_model, runner="twin"), partial(count_drafts, num_accepted))
    assert figures_of("", ledger.windows).is_clean, ledger.first_failure
    assert sum(window.num_in_flight for window in ledger.windows) > 0
    assert sum(num_accepted) > 0, num_accepted


async def test_a_model_that_drafts_loses_no_token_when_processes_die(tiny_model):
    num_accepted = []
    copy = ("--speculation", '{"drafter": "target_copy"}')
    drafting = setting(tiny_model, quantization="none", executor_options=copy)
    ledger = await ledger_of(drafting, partial(count_drafts, num_accepted))
    assert figures_of("", ledger.windows).is_clean, ledger.first_failure
    assert sum(window.num_in_flight for window in ledger.windows) > 0
    assert sum(num_accepted) > 0, num_accepted

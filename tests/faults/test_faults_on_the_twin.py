"""Faults done to executors that run the GPU's code, on its twin: rows on the device, rings, two steps in flight.

A tiny model of random weights: what it says means nothing, and is the same whenever it is asked.
"""

from dataclasses import replace

import pytest
from rich.console import Console

from paceline_cli.chaos.campaign import FaultTiming
from paceline_cli.chaos.experiment import Experiment, Setting
from paceline_cli.chaos.faults import FaultKind
from paceline_cli.chaos.report import figures_of
from paceline_cli.chaos.views import FaultLines
from paceline_cli.supervisor.programs import Deployment, free_ports
from paceline_executor.testing.models import TINY_CONFIG, RandomCheckpoint, gguf_parts

KINDS = (FaultKind.SCHEDULER_KILL, FaultKind.EXECUTOR_KILL)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A file with room for the questions that are asked."""
    checkpoint = RandomCheckpoint(replace(TINY_CONFIG, max_model_len=1024))
    return gguf_parts(checkpoint).write(tmp_path_factory.mktemp("model") / "tiny.gguf")


async def test_a_device_that_keeps_rows_loses_no_token_when_processes_die(tiny_model):
    """Another scheduler takes over what is in flight, another executor what was on the one that died."""
    deployment = Deployment(
        model=str(tiny_model),
        host="127.0.0.1",
        ports=free_ports(2),
        shutdown_timeout_seconds=10,
        max_num_seqs=8,
        runner="twin",
        with_standby=True,
    )
    setting = Setting(
        deployment=deployment,
        kinds=KINDS,
        num_streams=8,
        max_tokens=40,
        max_outage_seconds=300.0,
        timing=FaultTiming(settle_seconds=120),
    )
    async with Experiment(setting, FaultLines(Console(stderr=True, soft_wrap=True), None)) as experiment:
        await experiment.campaign.run(KINDS)
        await experiment.finish()
    ledger = experiment.ledger
    assert figures_of("", ledger.windows).is_clean, ledger.first_failure
    assert sum(window.num_in_flight for window in ledger.windows) > 0

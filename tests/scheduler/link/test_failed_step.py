"""What a welcome says of the last step that failed, as an executor writes it and the link reads it."""

import asyncio

import pytest
from structlog.testing import capture_logs

from both_sides.audited import expected_output, make_executor
from both_sides.deployment import Deployment, scenario
from both_sides.harness import CoreHarness
from paceline_executor.errors import StepFailedError
from paceline_scheduler.link.linked_executor import ShownState
from paceline_scheduler.testing.requests import make_request


def failed_step_of(executor):
    """What a scheduler that attaches now is told of steps that failed."""
    description, _ = executor.attach("executor-0")
    return description.failed_step


def test_a_failed_step_is_named_until_the_executor_boots_again():
    harness = CoreHarness(make_executor())
    executor, request = harness.executors["executor-0"], make_request(3, 4)
    harness.submit(request)
    assert failed_step_of(make_executor()) is None
    executor.failing.add(request.key)
    executor.receive(harness.core.plan("executor-0", harness.clock()))
    with pytest.raises(StepFailedError):
        executor.run_next()
    failed = failed_step_of(executor)
    assert (failed.epoch, failed.step_id) == (1, 1)
    assert failed.message.startswith("a step failed on the executor")
    executor.restart()
    assert failed_step_of(executor) is None


@scenario
async def test_bad_requests_in_a_row_neither_lose_the_executor_nor_stop_the_others():
    """Streams that end so soon, again and again, are no reason to wait longer each time."""
    good = [make_request(3, 50) for _ in range(16)]
    bad = [make_request(3, 8) for _ in range(8)]
    seen = []
    with capture_logs():  # of how each step failed
        async with Deployment("executor:1") as deployment, deployment.rig() as rig:
            await rig.until_ready()
            executor = deployment["executor:1"]
            executor.failing |= {request.key for request in bad}
            for number, request in enumerate(bad):
                rig.submit(request, *good[2 * number : 2 * number + 2])
                await asyncio.sleep(0.5)
                seen.append(rig.states()["executor:1"])
            began_s = asyncio.get_running_loop().time()
            await rig.until_idle()
            lasted_s = asyncio.get_running_loop().time() - began_s

    assert ShownState.LOST not in seen
    assert executor.epoch <= 1 + 3 * len(bad)
    assert lasted_s < 5  # virtual ones
    assert rig.client.failures.keys() == {request.handle for request in bad}
    for request in good:
        assert tuple(rig.client.token_ids[request.handle]) == expected_output(request)

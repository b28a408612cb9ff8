"""The scheduler's links and the executor's fence over real sockets: versions that do not meet, and a takeover."""

import pytest

from executor_rig.hash_executor import HASH_LIMITS, hash_executor
from executor_rig.hash_runner import continuation
from paceline.plan.values import Approach, Claim
from paceline.plan.versions import ProtocolRange
from paceline_executor.link.fence import FenceTimes
from paceline_executor.link.service import ServiceConfig
from paceline_scheduler.link.linked_executor import ShownState
from paceline_scheduler.link.transport_grpc import GrpcTransport
from scheduler_rig.requests import make_request
from scheduler_rig.rig import SchedulerRig

NEVER_SILENT = FenceTimes(lease_ns=60_000_000_000)  # a busy machine is no reason to lose an executor here


def executor_of(lowest=1, highest=1):
    protocols = ProtocolRange(lowest, highest)
    return hash_executor(config=ServiceConfig("127.0.0.1", 0, None, times=NEVER_SILENT, protocols=protocols))


def scheduler_for(executor, **options):
    return SchedulerRig(executor.address, GrpcTransport(), **options)


async def served(rig):
    request = make_request(3, 4, model="hash", seed=5)
    rig.submit(request)
    await rig.until(lambda: request.handle in rig.client.ended)
    expected = continuation(request.prompt_token_ids.tolist(), 4, HASH_LIMITS.vocab_size, seed=5)
    return rig.client.token_ids.get(request.handle) == expected


@pytest.mark.parametrize(
    ("executor_range", "scheduler_range", "older"), [((1, 1), (2, 3), "executor"), ((2, 3), (1, 1), "scheduler")]
)
async def test_ranges_that_do_not_meet_are_refused_with_a_sentence(executor_range, scheduler_range, older):
    async with (
        executor_of(*executor_range) as executor,
        scheduler_for(executor, protocols=ProtocolRange(*scheduler_range)) as rig,
    ):
        await rig.until(lambda: rig.states().get(executor.address) is ShownState.LOST)
        (status,) = rig.executors.statuses()

    (low, high), (from_low, to_high) = executor_range, scheduler_range
    sentence = f"this executor speaks protocol {low} to {high}, the scheduler {from_low} to {to_high}"
    assert f"{sentence}; upgrade the {older}" in status.last_error
    assert executor.service.plan_streams.fence.epoch == 0


async def test_a_takeover_displaces_a_live_scheduler_which_stands_in_line_from_then_on():
    """Although it was told to take over as well, when it started: an operator's act counts once."""
    options = {"approach": Approach.TAKE_OVER}
    async with executor_of() as executor, scheduler_for(executor, scheduler_id="scheduler-z", **options) as old:
        await old.until_ready()
        async with scheduler_for(executor, scheduler_id="scheduler-a", **options) as new:
            await new.until_ready()
            fence = executor.service.plan_streams.fence
            await old.until(lambda: fence.num_waiting == 1)
            (status,) = old.executors.statuses()

            assert status.holder == Claim(new.leadership.claim.term, "scheduler-a", "scheduler-a:50051")
            assert await served(new)
            assert (fence.holder.scheduler_id, fence.epoch) == ("scheduler-a", 2)
        await old.until_ready()

        assert fence.holder.scheduler_id == "scheduler-z"

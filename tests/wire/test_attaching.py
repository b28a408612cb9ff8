"""The scheduler's links and the executor's fence over real sockets: versions, waiting in the queue, taking over."""

import pytest

from paceline.plan.values import Approach, Claim, Hello
from paceline.plan.versions import ProtocolRange
from paceline_executor.link.fence import FenceTimes
from paceline_executor.link.service import ServiceConfig
from paceline_executor.testing.hash_executor import HASH_LIMITS, hash_executor
from paceline_executor.testing.hash_runner import continuation
from paceline_scheduler.errors import LinkError
from paceline_scheduler.link.leadership import ServingStatus
from paceline_scheduler.link.linked_executor import ShownState
from paceline_scheduler.link.transport_grpc import GrpcTransport
from paceline_scheduler.testing.requests import make_request
from paceline_scheduler.testing.rig import SchedulerRig

NEVER_SILENT = FenceTimes(lease_ns=60_000_000_000)  # a busy machine is no reason to lose an executor here


def executor_of(lowest=1, highest=1):
    """An executor that speaks these versions."""
    protocols = ProtocolRange(lowest, highest)
    return hash_executor(config=ServiceConfig("127.0.0.1", 0, None, times=NEVER_SILENT, protocols=protocols))


def scheduler_for(executor, **options):
    """A scheduler that drives it."""
    return SchedulerRig(executor.address, GrpcTransport(), **options)


async def served(rig):
    """Whether a request gets the right tokens."""
    request = make_request(3, 4, model="hash", seed=5)
    rig.submit(request)
    await rig.until(lambda: request.handle in rig.client.ended)
    expected = continuation(request.prompt_token_ids.tolist(), 4, HASH_LIMITS.vocab_size, seed=5)
    return rig.client.token_ids.get(request.handle) == expected


@pytest.mark.parametrize(("executor_range", "scheduler_range"), [((1, 1), (1, 3)), ((1, 3), (1, 1)), ((1, 2), (2, 3))])
async def test_ranges_that_overlap_work_together(executor_range, scheduler_range):
    """An older and a newer side speak the highest version that both know, as in a rolling upgrade."""
    async with (
        executor_of(*executor_range) as executor,
        scheduler_for(executor, protocols=ProtocolRange(*scheduler_range)) as rig,
    ):
        await rig.until_ready()

        assert await served(rig)


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


async def test_a_stranger_with_the_highest_term_of_all_takes_nothing_from_an_honest_scheduler():
    async with executor_of() as executor:
        async with scheduler_for(executor) as rig:
            await rig.until_ready()
            stranger = GrpcTransport().connect(executor.address)
            stream = stranger.attach()
            await stream.write(Hello(Claim(2**63 - 1, "stranger"), ProtocolRange(1, 1), takeover=True))
            with pytest.raises(LinkError, match=r"INVALID_ARGUMENT: hello\.term is .*, must be 1 to"):
                await stream.read()
            await stranger.close()

            assert await served(rig)
            assert executor.service.plan_streams.fence.epoch == 1
        async with scheduler_for(executor, scheduler_id="scheduler-b") as after:
            await after.until_ready()

            assert await served(after)
            assert after.leadership.claim.term == 2


@pytest.mark.parametrize("told", ["term", "refusal"])
async def test_an_executor_that_lies_about_terms_costs_only_itself(told):
    async with executor_of() as honest, executor_of() as liar:
        fence = liar.service.plan_streams.fence
        if told == "term":
            fence._highest_term = 2**63
        else:
            fence._last = Claim(2**63, "evil", "evil.example:1")
        options = {"executors": f"{honest.address},{liar.address}"}
        async with SchedulerRig(transport=GrpcTransport(), **options) as rig:
            await rig.until(lambda: rig.states().get(liar.address) is ShownState.LOST)
            await rig.until_ready()

            assert await served(rig)
            assert (honest.service.plan_streams.fence.epoch, rig.leadership.claim.term) == (1, 1)
            assert rig.executors.readiness.status is ServingStatus.SERVING

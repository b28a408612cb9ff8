"""The link keeps executors attached, through every way in which a stream can end. In virtual time."""

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from both_sides.audited import make_executor
from both_sides.deployment import Deployment, assert_whole, attached, scenario
from both_sides.harness import CoreHarness
from both_sides.served import ServedExecutor
from paceline.plan.values import Claim
from paceline_executor.errors import StepFailedError
from paceline_scheduler.core.events import DrainExecutor, UndrainExecutor
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.errors import ExecutorLeavingError, NoExecutorError, NoLongerServedError, StillLoadingError
from paceline_scheduler.link.executors import REPLACED_S
from paceline_scheduler.link.leadership import Readiness, ServingStatus
from paceline_scheduler.link.linked_executor import ShownState
from scheduler_rig.requests import make_request
from scheduler_rig.rig import SchedulerRig
from virtual_time import now

FIRST, SECOND = "executor:1", "executor:2"


@scenario
async def test_a_broken_stream_is_attached_again_and_all_requests_continue():
    """What was under way goes on from the snapshot; clients see neither a gap nor a doubled token."""
    async with attached(FIRST) as (deployment, rig):
        requests = [make_request(9, 60) for _ in range(12)]
        rig.submit(*requests)
        for epoch in range(2, 6):
            await asyncio.sleep(0.02)
            deployment[FIRST].break_stream()
            await rig.until(lambda wanted=epoch: deployment[FIRST].epoch == wanted)
        await rig.until_idle()
        assert_whole(rig, *requests)
        assert deployment[FIRST].epoch == 5
        assert rig.statuses == [ServingStatus.SERVING], "a stream that comes back at once is no reason to tell clients"


@scenario
async def test_an_executor_that_restarts_gets_its_requests_again():
    """Another incarnation knows nothing: prompt and output so far are computed again."""
    async with attached(FIRST) as (deployment, rig):
        requests = [make_request(9, 20) for _ in range(4)]
        rig.submit(*requests)
        await asyncio.sleep(0.02)
        deployment.network.stop(FIRST)
        await rig.until(lambda: rig.states()[FIRST] is ShownState.LOST)
        deployment.network.start(FIRST)
        await rig.until_idle()
        assert_whole(rig, *requests)
        assert rig.executors.statuses()[0].incarnation == 1001
        assert set(rig.client.attempts.values()) == {2}
        assert rig.statuses == [ServingStatus.SERVING, ServingStatus.NOT_SERVING, ServingStatus.SERVING]


@scenario
async def test_a_frozen_executor_is_noticed_by_its_silence_and_given_up():
    """No heartbeat for 1.2 s ends the stream; 1.5 s later its requests run elsewhere."""
    async with attached(FIRST, SECOND) as (deployment, rig):
        requests = [make_request(9, 30) for _ in range(8)]
        rig.submit(*requests)
        await asyncio.sleep(0.02)
        frozen_s = now()
        deployment.network.freeze(FIRST)
        await rig.until(lambda: rig.states()[FIRST] is not ShownState.READY)
        noticed_s = now()
        assert 1.2 <= noticed_s - frozen_s <= 1.5
        await rig.until(lambda: rig.states()[FIRST] is ShownState.LOST)
        assert now() - noticed_s == pytest.approx(1.5, abs=0.02)
        await rig.until_idle()
        assert_whole(rig, *requests)


@scenario
async def test_the_tokenizer_is_fetched_once_per_digest():
    async with attached(FIRST, SECOND) as (deployment, rig):
        deployment[FIRST].break_stream()
        await rig.until(lambda: deployment[FIRST].epoch == 2)
        await rig.until_ready(2)
        assert deployment.network.num_tokenizer_calls == 1
        (model,) = rig.executors.models()
        assert (model.name, model.num_executors) == ("simulated", 2)


@scenario
async def test_executors_with_other_weights_do_not_serve_a_model_together():
    """Where both say which they have; once the one has left, the other serves it."""
    kind = make_executor().kind
    async with Deployment() as deployment:
        for number, (address, digest) in enumerate([(FIRST, "1st"), (SECOND, "2nd"), ("executor:3", "")], 1):
            served = ServedExecutor(replace(kind, weights_digest=digest), 1000 * number, 4)
            deployment.network.add(address, served)
        async with deployment.rig() as rig:
            await rig.until_ready(2)
            (model,) = rig.executors.models()
            assert (model.num_executors, model.weights_digest) == (2, "1st")
            second = next(each for each in rig.executors.statuses() if each.address == SECOND)
            assert second.state is ShownState.CONNECTING
            assert second.last_error == (
                "it has unquantised weights of digest '2nd' for model 'simulated', which another executor serves with "
                "unquantised weights of digest '1st'; start one of them with another --served-model-name"
            )
            await asyncio.sleep(60)
            assert deployment[FIRST].epoch == 1, "who is refused is no trouble of the others"
            deployment.network.stop(FIRST)
            await rig.until(lambda: rig.states()[SECOND] is ShownState.READY)


@scenario
async def test_streams_that_end_at_once_again_and_again_are_opened_less_and_less_often():
    """Whatever ends them would end them ten times a second otherwise."""
    async with attached(FIRST) as (deployment, rig):
        start_s = now()
        for epoch in range(2, 13):
            deployment[FIRST].break_stream()
            await rig.until(lambda wanted=epoch: deployment[FIRST].epoch == wanted)
            await rig.until_ready()
        assert now() - start_s > 10
        await asyncio.sleep(2)
        deployment[FIRST].break_stream()
        start_s = now()
        await rig.until(lambda: deployment[FIRST].epoch == 13)
        assert now() - start_s < 10


@scenario
async def test_one_executor_under_two_addresses_gets_one_stream():
    """As with a name that resolves to both loopback addresses: two streams would end each other for ever."""
    async with Deployment(FIRST) as deployment:
        deployment.network.add(SECOND, deployment[FIRST])
        async with deployment.rig() as rig:
            await rig.until_ready(1)
            await asyncio.sleep(10)
            assert deployment[FIRST].epoch == 1
            assert sorted(rig.states().values()) == [ShownState.READY, ShownState.LOST]
            assert any("lead to the same executor" in status.last_error for status in rig.executors.statuses())


@scenario
async def test_a_scheduler_that_was_displaced_gives_up_its_requests_and_stands_by():
    """After a freeze another one holds the executors: nothing is driven any more, clients are told to come again."""
    async with Deployment(FIRST, SECOND) as deployment, deployment.rig(scheduler_id="scheduler-a") as rig:
        await rig.until_ready(2)
        request = make_request(9, 200)
        rig.submit(request)
        await asyncio.sleep(0.02)
        await deployment.stranger(FIRST, "scheduler-z", 9, takes_over=True)
        await rig.until(lambda: request.handle in rig.client.failures)
        assert "took over" in str(rig.client.failures[request.handle])
        assert rig.leadership.claim.term > 9
        assert rig.runtime.views.num_waiting() == (0, 0)
        await rig.until(lambda: deployment[SECOND].holder_scheduler_id == "")
        assert rig.executors.readiness == Readiness(ServingStatus.STANDBY, Claim(9, "scheduler-z"))


@scenario
async def test_requests_leave_an_executor_that_drains_without_losing_a_token():
    async with attached(FIRST, SECOND) as (deployment, rig):
        early = make_request(9, 50)
        rig.submit(early)
        await asyncio.sleep(0.02)
        (busy,) = [address for address in (FIRST, SECOND) if deployment[address].rows]
        deployment[busy].drain("going away")
        await rig.until(lambda: rig.states()[busy] is ShownState.DRAINING)
        late = [make_request(9, 5) for _ in range(6)]
        rig.submit(*late)
        await rig.until_idle()
        assert_whole(rig, early, *late)
        await rig.until(lambda: not deployment[busy].rows)
        await rig.until(lambda: not deployment[busy].records)
        (other,) = {FIRST, SECOND} - {busy}
        assert set(deployment[other].records) == {request.key for request in [early, *late]}


@scenario
async def test_executors_come_and_go_while_requests_run():
    """A name that stands for one executor, then for two, then for the second alone: all requests end as they should."""
    answers, asked_s = [("10.0.0.1",)], []

    async def resolve(*_):
        asked_s.append(now())
        return answers[-1]

    async with Deployment("10.0.0.1:1", "10.0.0.2:1", max_num_rows=2) as deployment:
        rig = SchedulerRig("dns:///executors:1", deployment.network, resolver=resolve)
        async with rig:
            await rig.until_ready()
            requests = [make_request(9, 160) for _ in range(8)]
            answers.append(("10.0.0.1", "10.0.0.2"))
            await asyncio.sleep(asked_s[-1] + 4.9 - rig.runtime.now_s())  # the name is looked up every 5 s
            rig.submit(*requests[:4])
            await rig.until(lambda: bool(deployment["10.0.0.2:1"].rows))
            answers.append(("10.0.0.2",))
            rig.submit(*requests[4:])
            await asyncio.sleep(0.05)
            deployment.network.stop("10.0.0.1:1")
            await rig.until_idle()
            assert_whole(rig, *requests)
            await rig.until(lambda: set(rig.states()) == {"10.0.0.2:1"})


@scenario
async def test_what_waits_for_a_pod_goes_on_in_the_next_one_which_has_another_address():
    """Another model's pod stays in the DNS answer. The new one is named long before it has loaded its model."""
    answers = [("10.0.0.1", "10.0.0.9")]

    async def resolve(*_):
        return answers[-1]

    async with Deployment("10.0.0.1:1", "10.0.0.2:1") as deployment:
        deployment.network.add("10.0.0.9:1", ServedExecutor(make_executor(model="other").kind, 9000, 4))
        deployment.network.stop("10.0.0.2:1")
        async with SchedulerRig("dns:///executors:1", deployment.network, resolver=resolve) as rig:
            await rig.until_ready(2)
            begun, new = make_request(9, 100), make_request(9, 5)
            rig.submit(begun)
            await asyncio.sleep(0.05)
            answers.append(("10.0.0.9",))
            deployment.network.stop("10.0.0.1:1")
            await asyncio.sleep(30)
            assert [(model.name, model.num_executors) for model in rig.executors.known_models()] == [
                ("other", 1),
                ("simulated", 0),
            ]
            rig.submit(new)
            answers.append(("10.0.0.2", "10.0.0.9"))
            await asyncio.sleep(40)
            deployment.network.start("10.0.0.2:1")
            await rig.until_idle()
            assert_whole(rig, begun, new)
            await rig.until(lambda: set(rig.states()) == {"10.0.0.2:1", "10.0.0.9:1"})


@scenario
async def test_a_model_whose_last_executor_leaves_for_good_is_forgotten_after_a_minute():
    answers = [("10.0.0.1", "10.0.0.9")]

    async def resolve(*_):
        return answers[-1]

    async with Deployment("10.0.0.1:1") as deployment:
        deployment.network.add("10.0.0.9:1", ServedExecutor(make_executor(model="other").kind, 9000, 4))
        async with SchedulerRig("dns:///executors:1", deployment.network, resolver=resolve) as rig:
            await rig.until_ready(2)
            begun = make_request(9, 100)
            rig.submit(begun)
            await asyncio.sleep(0.05)
            answers.append(("10.0.0.9",))
            deployment.network.stop("10.0.0.1:1")
            left_s = now()
            await rig.until(lambda: begun.handle in rig.client.failures)
            assert isinstance(rig.client.failures[begun.handle], NoLongerServedError)
            assert REPLACED_S <= now() - left_s <= REPLACED_S + 10
            assert set(rig.states()) == {"10.0.0.9:1"}


@scenario
async def test_a_drain_notice_that_comes_with_the_welcome_is_not_lost():
    async with Deployment(FIRST) as deployment, deployment.rig() as rig:
        await rig.until(lambda: bool(deployment[FIRST].holder_scheduler_id))
        deployment[FIRST].drain("going away")
        await rig.until(lambda: rig.states()[FIRST] is ShownState.DRAINING)
        with pytest.raises(ExecutorLeavingError):
            rig.runtime.feed(UndrainExecutor(FIRST))


@scenario
async def test_an_operators_drain_survives_a_broken_stream():
    async with attached(FIRST) as (deployment, rig):
        assert rig.runtime.feed(DrainExecutor(FIRST)) == 0
        assert rig.statuses == [ServingStatus.SERVING, ServingStatus.NOT_SERVING]
        deployment[FIRST].break_stream()
        await rig.until(lambda: deployment[FIRST].epoch == 2)
        await rig.until(lambda: rig.states()[FIRST] is ShownState.DRAINING)
        with pytest.raises(NoExecutorError):
            rig.runtime.feed(DrainExecutor("nobody:1"))
        rig.runtime.feed(UndrainExecutor(FIRST))
        assert rig.statuses[-1] is ServingStatus.SERVING


@scenario
async def test_a_deadline_fails_the_request_when_it_passes_and_frees_its_row():
    async with attached(FIRST, limits=CoreLimits()) as (deployment, rig):
        request = make_request(3, 240, deadline_s=rig.runtime.now_s() + 0.05)
        rig.submit(request)
        await rig.until_idle()
        assert rig.runtime.now_s() - request.deadline_s == pytest.approx(0, abs=0.005)
        assert "timeout" in str(rig.client.failures[request.handle])
        await rig.until(lambda: not deployment[FIRST].rows)


@scenario
async def test_an_executor_that_is_slow_but_alive_keeps_its_stream():
    """Now and then a step takes 2 s, which nothing predicts: after the first the scheduler knows that it may."""
    request = make_request(3, 150)
    with capture_logs() as log:
        async with attached(FIRST) as (deployment, rig):
            executor, usual_ns = deployment[FIRST], make_executor().kind.step_times.step_ns(1, 0)
            rig.submit(request)
            for _ in range(10):
                executor.time_scale = 2e9 / usual_ns
                number = executor.num_steps
                await rig.until(lambda: executor.num_steps > number)  # noqa: B023
                executor.time_scale = 1.0
                await rig.until(lambda: executor.num_steps > number + 4)  # noqa: B023
            await rig.until_idle()

    reasons = [line["reason"] for line in log if line["event"] == "executor_detached"]
    assert all("longer than its bound" in reason for reason in reasons)
    assert (len(reasons), executor.epoch) == (1, 2)
    assert_whole(rig, request)


# What a welcome says of the last step that failed, as an executor writes it and the link reads it


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
        async with attached(FIRST) as (deployment, rig):
            executor = deployment[FIRST]
            executor.failing |= {request.key for request in bad}
            for number, request in enumerate(bad):
                rig.submit(request, *good[2 * number : 2 * number + 2])
                await asyncio.sleep(0.5)
                seen.append(rig.states()[FIRST])
            began_s = now()
            await rig.until_idle()
            lasted_s = now() - began_s

    assert ShownState.LOST not in seen
    assert executor.epoch <= 1 + 3 * len(bad)
    assert lasted_s < 5  # virtual ones
    assert rig.client.failures.keys() == {request.handle for request in bad}
    assert_whole(rig, *good)


# What the log says while an executor cannot be reached: no warning at a normal start


def told(events):
    """The level and name of each event about an executor that is not there."""
    names = ("waiting_for_executor", "executor_unreachable", "executor_detached")
    return [(event["log_level"], event["event"]) for event in events if event["event"] in names]


@scenario
async def test_an_executor_that_starts_a_few_seconds_later_is_waited_for_without_a_warning():
    async with Deployment(FIRST) as deployment:
        deployment.network.stop(FIRST)
        with capture_logs() as events:
            async with deployment.rig() as rig:
                await asyncio.sleep(8)
                deployment.network.start(FIRST)
                await rig.until_ready()
    assert set(told(events)) == {("info", "waiting_for_executor")}


@scenario
async def test_an_executor_that_does_not_come_is_warned_of_within_some_seconds_and_then_now_and_then():
    async with Deployment(FIRST) as deployment:
        deployment.network.stop(FIRST)
        with capture_logs() as events:
            async with deployment.rig():
                await asyncio.sleep(9.9)
                assert ("warning", "executor_unreachable") not in told(events)
                await asyncio.sleep(5)
                assert told(events).count(("warning", "executor_unreachable")) == 1
                await asyncio.sleep(30)
                assert told(events).count(("warning", "executor_unreachable")) <= 4


@scenario
async def test_an_executor_that_loads_its_model_is_waited_for_however_long_that_takes():
    """It says so itself: the first start of a large model is no trouble."""
    async with Deployment(FIRST) as deployment:
        reach = deployment.network.reach

        async def loading(*_):
            raise StillLoadingError("UNAVAILABLE: the model is still loading; wait")

        deployment.network.reach = loading
        with capture_logs() as events:
            async with deployment.rig() as rig:
                await asyncio.sleep(100)
                deployment.network.reach = reach
                await rig.until_ready()
    assert set(told(events)) == {("info", "waiting_for_executor")}


@scenario
async def test_an_executor_that_was_attached_and_goes_is_warned_of_at_once():
    async with attached(FIRST) as (deployment, _):
        with capture_logs() as events:
            deployment.network.stop(FIRST)
            await asyncio.sleep(1)
    assert told(events)[:2] == [("warning", "executor_detached"), ("warning", "executor_unreachable")]

"""AdminService over real gRPC: what operators see and may change."""

from dataclasses import replace

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from google.rpc.status_pb2 import Status

from paceline.v1 import admin_pb2 as pb
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from paceline.v1.plan_pb2 import StepTimings
from paceline_scheduler.backend import ExecutorStatus
from paceline_scheduler.core.limits import LimitValues
from paceline_scheduler.observers.steps import StepRecord, StepTotals
from paceline_scheduler.testing.edge_server import serve_edge, wait_until
from paceline_scheduler.testing.scripted_backend import ScriptedBackend
from paceline_scheduler.testing.tokenizers import served_model

STEPS = StepTotals(
    9,
    70,
    60,
    1,
    2,
    3,
    4,
    7,
    starved_ns=5,
    planning_ns=6,
    draft_ns=8,
    num_draft_tokens=30,
    num_accepted_draft_tokens=20,
    num_drafted_at=(20, 10),
    num_accepted_at=(15, 5),
)
EXECUTOR = ExecutorStatus(
    "10.0.0.1:50061", pb.EXECUTOR_STATE_READY, 7, 2, "tiny", 5, 100, 60, 10, 25, 5, 380, 400, 2, "", STEPS
)


def step(step_id, address="10.0.0.1:50061"):
    """A finished step."""
    return StepRecord(address, 2, step_id, 8, 20, 8, 1000, 1, 2, 3, 4, 5, 7, 6, 12, 9, 3, 100, 60, 10, 25, 5)


@pytest.fixture
async def server():
    """A server that knows one executor."""
    backend = ScriptedBackend(served_model())
    backend.known_executors = (EXECUTOR,)
    async with serve_edge(backend) as server:
        yield server


@pytest.fixture
def backend(server):
    """Its backend."""
    return server.backend


@pytest.fixture
async def stub(server):
    """An operator."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield AdminServiceStub(channel)


async def refusal(awaitable):
    """The code of a failed call and its details, by kind."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    packed = Status.FromString(dict(caught.value.trailing_metadata())["grpc-status-details-bin"])
    details = {}
    for detail in packed.details:
        for kind in (ErrorInfo, BadRequest):
            if detail.Is(kind.DESCRIPTOR):
                details[kind] = kind.FromString(detail.value)
    return caught.value.code(), details


async def test_executors_are_listed_with_all_their_counts(stub):
    """And with the sums of their steps; and the queue."""
    response = await stub.ListExecutors(pb.ListExecutorsRequest())
    expected = pb.ExecutorView(
        address="10.0.0.1:50061",
        state=pb.EXECUTOR_STATE_READY,
        incarnation=7,
        epoch=2,
        model="tiny",
        num_running_requests=5,
        blocks=pb.BlockCounts(total=100, free=60, cached=10, used=25, quarantined=5),
        num_filled_slots=380,
        num_owned_slots=400,
        num_plans_in_flight=2,
        steps=pb.StepTotals(
            num_steps=9,
            num_rows=70,
            num_output_tokens=60,
            timings=StepTimings(waited_ns=1, prepare_ns=2, forward_ns=3, sample_ns=4, idle_ns=7, draft_ns=8),
            starved_ns=5,
            planning_ns=6,
            num_draft_tokens=30,
            num_accepted_draft_tokens=20,
            num_drafted_at=[20, 10],
            num_accepted_at=[15, 5],
        ),
    )
    assert list(response.executors) == [expected]
    assert (response.scheduler_id, response.num_waiting_requests, response.num_waiting_tokens) == ("scheduler-1", 3, 70)


async def test_an_executor_is_drained_by_its_address(stub, backend):
    """An unknown one is NOT_FOUND, with the known ones in the message."""
    response = await stub.DrainExecutor(pb.DrainExecutorRequest(address=EXECUTOR.address))
    assert (response.num_running_requests, backend.asked.drained) == (5, [EXECUTOR.address])
    code, details = await refusal(stub.DrainExecutor(pb.DrainExecutorRequest(address="nowhere")))
    assert (code, details[ErrorInfo].reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_EXECUTOR")


async def test_an_executor_that_is_not_attached_now_is_not_called_unknown(stub, backend):
    """There is nothing to drain yet, and it may attach at any time."""
    backend.known_executors = (replace(EXECUTOR, state=pb.EXECUTOR_STATE_CONNECTING, incarnation=0),)
    call = stub.DrainExecutor(pb.DrainExecutorRequest(address=EXECUTOR.address))
    code, details = await refusal(call)
    assert (code, details[ErrorInfo].reason) == (grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR")
    assert await call.details() == f"executor '{EXECUTOR.address}' is known but not attached now; try again"


async def test_a_drain_is_taken_back(stub, backend):
    """By the executor's address."""
    await stub.UndrainExecutor(pb.UndrainExecutorRequest(address=EXECUTOR.address))
    assert backend.asked.undrained == [EXECUTOR.address]


@pytest.mark.parametrize("method", ["DrainExecutor", "UndrainExecutor", "WatchSteps"])
@pytest.mark.parametrize("address", ["nowhere", "x" * 1_000_000, "\n" * 1_000_000])
async def test_an_address_that_nobody_knows_is_answered_with_those_there_are(stub, backend, method, address):
    """However long it is: a status has to fit into headers."""
    call = getattr(stub, method)(getattr(pb, f"{method}Request")(address=address))
    code, details = await refusal(call.read() if method == "WatchSteps" else call)
    assert (code, details[ErrorInfo].reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_EXECUTOR")
    assert (await call.details()).endswith(f"known are {EXECUTOR.address}")
    assert not backend.watch.sinks


async def test_limits_change_where_they_are_set_and_stay_elsewhere(stub, backend):
    """The answer holds all of them."""
    response = await stub.SetLimits(pb.SetLimitsRequest(limits=pb.Limits(max_num_queued_reqs=7)))
    assert backend.limit_values == LimitValues(7, 4_194_304, 2048)
    expected = pb.Limits(max_num_queued_reqs=7, max_num_queued_tokens=4_194_304, max_num_batched_tokens=2048)
    assert response.limits == (await stub.GetLimits(pb.GetLimitsRequest())).limits == expected
    await stub.SetLimits(pb.SetLimitsRequest())
    assert backend.limit_values == LimitValues(7, 4_194_304, 2048)


@pytest.mark.parametrize("name", ["max_num_queued_reqs", "max_num_queued_tokens", "max_num_batched_tokens"])
@pytest.mark.parametrize("value", [0, 2**32 - 1])
async def test_a_limit_out_of_range_changes_nothing(stub, backend, name, value):
    """It is named; the others sent with it are not taken either."""
    if name == "max_num_queued_tokens":
        value *= 2**32
    wrong = pb.Limits(max_num_queued_reqs=9, max_num_queued_tokens=9, max_num_batched_tokens=9)
    setattr(wrong, name, value)
    code, details = await refusal(stub.SetLimits(pb.SetLimitsRequest(limits=wrong)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details[BadRequest].field_violations[0].field == f"limits.{name}"
    assert backend.limit_values == LimitValues(1024, 4_194_304, 2048)


@pytest.mark.parametrize("name", pb.Limits.DESCRIPTOR.fields_by_name)
async def test_every_limit_is_changed_or_refused_by_name(stub, backend, name):
    """Those of tenants come with a later version; one sent with them is not taken either."""
    before = backend.limit_values
    wanted = pb.Limits(max_num_queued_reqs=7)
    if name in ("tenants", "any_tenant"):
        wanted.MergeFrom(pb.Limits(tenants=[{"tenant": "a"}]) if name == "tenants" else pb.Limits(any_tenant={}))
        code, details = await refusal(stub.SetLimits(pb.SetLimitsRequest(limits=wanted)))
        assert (code, details[ErrorInfo].metadata["feature"]) == (grpc.StatusCode.UNIMPLEMENTED, f"limits.{name}")
        assert backend.limit_values == before
    else:
        setattr(wanted, name, 7)
        await stub.SetLimits(pb.SetLimitsRequest(limits=wanted))
        assert getattr(backend.limit_values, name) == 7


async def test_steps_are_watched_until_the_operator_has_seen_enough(stub, backend):
    """Every field; the watcher is gone when the call is."""
    call = stub.WatchSteps(pb.WatchStepsRequest())
    await wait_until(lambda: backend.watch.sinks)
    backend.watch.sinks[0].step_finished(step(41))
    response = await call.read()
    assert (response.address, response.step_id, response.epoch) == ("10.0.0.1:50061", 41, 2)
    assert (response.num_rows, response.num_tokens, response.num_output_tokens) == (8, 20, 8)
    timings = response.timings
    assert (timings.waited_ns, timings.prepare_ns, timings.forward_ns, timings.sample_ns, timings.idle_ns) == (
        1,
        2,
        3,
        4,
        5,
    )
    assert (response.predicted_ns, response.planning.ToNanoseconds(), response.num_waiting_requests) == (1000, 6, 3)
    assert (response.blocks.total, response.num_dropped) == (100, 0)
    call.cancel()
    await wait_until(lambda: not backend.watch.sinks)


async def test_one_executor_can_be_watched_alone(stub, backend):
    """By its address, attached or not."""
    backend.known_executors = (EXECUTOR, replace(EXECUTOR, address="b", state=pb.EXECUTOR_STATE_CONNECTING))
    call = stub.WatchSteps(pb.WatchStepsRequest(address="b"))
    await wait_until(lambda: backend.watch.sinks)
    backend.watch.sinks[0].step_finished(step(1, address="a"))
    backend.watch.sinks[0].step_finished(step(2, address="b"))
    assert (await call.read()).step_id == 2
    call.cancel()


async def test_a_slow_watcher_is_told_how_many_steps_it_missed(stub, backend):
    """The latest are kept."""
    call = stub.WatchSteps(pb.WatchStepsRequest())
    await wait_until(lambda: backend.watch.sinks)
    for step_id in range(1, 301):
        backend.watch.sinks[0].step_finished(step(step_id))
    first, second = await call.read(), await call.read()
    assert (first.step_id, first.num_dropped, second.step_id, second.num_dropped) == (45, 44, 46, 0)
    call.cancel()


async def test_without_a_folder_no_plans_are_recorded(stub):
    """Which option it takes is said."""
    code, details = await refusal(stub.SetPlanRecording(pb.SetPlanRecordingRequest(name="x")))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details[ErrorInfo].reason == "NO_RECORD_DIR"

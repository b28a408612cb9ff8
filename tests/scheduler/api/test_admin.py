"""AdminService over real gRPC: what operators see and may change."""

from dataclasses import replace

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo

from edge_rig.edge_server import serve_edge, wait_until
from edge_rig.refusals import refusal_of
from edge_rig.scripted_backend import ScriptedBackend
from edge_rig.tokenizers import served_model
from paceline.process.metrics import Meter
from paceline.v1 import admin_pb2 as pb
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from paceline.v1.plan_pb2 import StepTimings
from paceline_scheduler.access.tenant_limits import TenantBounds, TenantLimits
from paceline_scheduler.backend import ExecutorStatus
from paceline_scheduler.core.answers import RequestState
from paceline_scheduler.core.limits import LimitValues
from paceline_scheduler.core.live import LiveRequest, queue_key_of
from paceline_scheduler.core.phases import PhaseClock
from paceline_scheduler.observers.definitions import COUNTED
from paceline_scheduler.observers.steps import MAX_WATCHERS, DraftTotals, StepRecord, StepTotals
from scheduler_rig.requests import make_request

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
    predicted_ns=31,
    drafts=DraftTotals(30, 20, (20, 10), (15, 5)),
)
BLOCKS, SLOTS = (100, 60, 10, 25, 5), (380, 400)
EXECUTOR = ExecutorStatus(
    "10.0.0.1:50061", pb.EXECUTOR_STATE_READY, 7, 2, "tiny", 5, *BLOCKS, *SLOTS, 2, "", STEPS, None, 16, 1.5, -7
)


LIMIT_NAMES = ("max_num_queued_reqs", "max_num_queued_tokens", "max_num_batched_tokens")
BEYOND = (2**32 - 1, 2**64 - 2**32, 2**32 - 1)


def step(step_id, address="10.0.0.1:50061"):
    return StepRecord(
        address, 2, step_id, 8, 20, 8, 1000, 1, 2, 3, 4, 5, 7, 6, 12, 9, 3, 100, 60, 10, 25, 5, (8, 9), ((7, 2),)
    )


@pytest.fixture
async def server():
    """A server that knows one executor, and has refused and survived."""
    backend = ScriptedBackend(served_model())
    backend.known_executors = (EXECUTOR,)
    meter = Meter(COUNTED)
    meter.add("admission_rejections_total", 2, "QUEUE_FULL")
    meter.add("recoveries_total", 1, "executor")
    async with serve_edge(backend, meter=meter) as server:
        yield server


@pytest.fixture
def stub(channel):
    return AdminServiceStub(channel)


async def test_executors_are_listed_with_all_their_counts(stub):
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
            predicted_ns=31,
        ),
        max_num_rows=16,
        draft_speedup=1.5,
        draft_saved_ns=-7,
    )
    assert list(response.executors) == [expected]
    assert (response.scheduler_id, response.num_waiting_requests, response.num_waiting_tokens) == ("scheduler-1", 3, 70)
    assert (dict(response.num_refusals), dict(response.num_recoveries)) == ({"QUEUE_FULL": 2}, {"executor": 1})


def waiting(backend, *requests):
    """Let requests wait, as the core would."""
    state = backend.views._state
    for number, request in enumerate(requests, 1):
        state.enqueue(LiveRequest(request, queue_key_of(request, number, 90.0), PhaseClock.begin(90.0)))


async def test_requests_are_listed_with_all_but_what_they_say(stub, backend):
    backend.clock.advance(100.0)
    waiting(backend, make_request(5, 9, request_id="r1", tenant="blue", model="tiny", deadline_s=130.0, priority=-3))
    response = await stub.ListRequests(pb.ListRequestsRequest())
    (listed,) = response.requests
    explanation = listed.explanation
    assert listed == pb.RequestView(
        request_id="r1",
        tenant="blue",
        model="tiny",
        priority=-3,
        num_prompt_tokens=5,
        max_tokens=9,
        has_listener=True,
        age=Duration(seconds=10),
        time_left=Duration(seconds=30),
        explanation=explanation,
    )
    assert explanation.waiting_for == "an executor of the model 'tiny' has to attach"
    assert (explanation.state, explanation.times.queued) == (RequestState.WAITING, Duration(seconds=10))
    assert response.next_page_token == ""


async def test_requests_come_in_pages(stub, backend):
    """Of the size that is asked for, and never more than 200; the tenant and the state choose among them."""
    waiting(backend, *(make_request(3, tenant="ab"[number % 2]) for number in range(450)))
    found, token, sizes = [], "", []
    while not sizes or token:
        page = await stub.ListRequests(pb.ListRequestsRequest(page_size=1000, page_token=token))
        token = page.next_page_token
        sizes.append(len(page.requests))
        found += [request.request_id for request in page.requests]
    assert (sizes, len(set(found))) == ([200, 200, 50], 450)
    assert len((await stub.ListRequests(pb.ListRequestsRequest())).requests) == 50
    of_b = await stub.ListRequests(pb.ListRequestsRequest(tenant="b", page_size=3))
    assert {request.tenant for request in of_b.requests} == {"b"}
    assert not (await stub.ListRequests(pb.ListRequestsRequest(tenant=""))).requests
    assert not (await stub.ListRequests(pb.ListRequestsRequest(states=[RequestState.RUNNING]))).requests


@pytest.mark.parametrize(
    "wrong",
    [
        {"page_token": "x"},
        {"page_token": "-1"},
        {"page_token": "1" * 20},
        {"page_token": "٣"},
        {"states": [0]},
        {"states": [99]},
    ],
)
async def test_a_page_that_cannot_be_is_refused_by_its_field(stub, wrong):
    code, _, details = await refusal_of(stub.ListRequests(pb.ListRequestsRequest(**wrong)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in details[BadRequest].field_violations] == list(wrong)


async def test_an_executor_is_drained_by_its_address(stub, backend):
    response = await stub.DrainExecutor(pb.DrainExecutorRequest(address=EXECUTOR.address))
    assert (response.num_running_requests, backend.asked.drained) == (5, [EXECUTOR.address])
    code, _, details = await refusal_of(stub.DrainExecutor(pb.DrainExecutorRequest(address="nowhere")))
    assert (code, details[ErrorInfo].reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_EXECUTOR")


async def test_an_executor_that_is_not_attached_now_is_not_called_unknown(stub, backend):
    backend.known_executors = (replace(EXECUTOR, state=pb.EXECUTOR_STATE_CONNECTING, incarnation=0),)
    call = stub.DrainExecutor(pb.DrainExecutorRequest(address=EXECUTOR.address))
    code, _, details = await refusal_of(call)
    assert (code, details[ErrorInfo].reason) == (grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR")
    assert await call.details() == f"executor '{EXECUTOR.address}' is known but not attached now; try again"


async def test_a_drain_is_taken_back(stub, backend):
    await stub.UndrainExecutor(pb.UndrainExecutorRequest(address=EXECUTOR.address))
    assert backend.asked.undrained == [EXECUTOR.address]


@pytest.mark.parametrize("method", ["DrainExecutor", "UndrainExecutor", "WatchSteps"])
@pytest.mark.parametrize("address", ["nowhere", "x" * 1_000_000, "\n" * 1_000_000])
async def test_an_address_that_nobody_knows_is_answered_with_those_there_are(stub, backend, method, address):
    """However long it is: a status has to fit into headers."""
    call = getattr(stub, method)(getattr(pb, f"{method}Request")(address=address))
    code, _, details = await refusal_of(call.read() if method == "WatchSteps" else call)
    assert (code, details[ErrorInfo].reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_EXECUTOR")
    assert (await call.details()).endswith(f"known are {EXECUTOR.address}")
    assert not backend.watch.sinks


async def test_limits_change_where_they_are_set_and_stay_elsewhere(stub, backend):
    response = await stub.SetLimits(pb.SetLimitsRequest(limits=pb.Limits(max_num_queued_reqs=7)))
    assert backend.limit_values == LimitValues(7, 4_194_304, 2048)
    expected = pb.Limits(max_num_queued_reqs=7, max_num_queued_tokens=4_194_304, max_num_batched_tokens=2048)
    expected.any_tenant.SetInParent()
    assert response.limits == (await stub.GetLimits(pb.GetLimitsRequest())).limits == expected
    await stub.SetLimits(pb.SetLimitsRequest())
    assert backend.limit_values == LimitValues(7, 4_194_304, 2048)


async def test_bounds_of_tenants_change_as_a_whole_and_others_keep_theirs(stub, backend):
    for limits in (
        pb.Limits(tenants=[{"tenant": "a", "max_num_streams": 3}, {"tenant": "b", "max_kv_share": 0.25}]),
        pb.Limits(tenants=[{"tenant": "a", "max_requests_per_minute": 9}], any_tenant={"max_num_queued_reqs": 5}),
        pb.Limits(tenants=[{"tenant": "b"}], max_num_queued_reqs=7),
    ):
        response = await stub.SetLimits(pb.SetLimitsRequest(limits=limits))
    bounds = TenantBounds({"a": TenantLimits(max_requests_per_minute=9)}, TenantLimits(max_num_queued_reqs=5))
    assert backend.limit_values == LimitValues(7, 4_194_304, 2048, bounds)
    assert response.limits == (await stub.GetLimits(pb.GetLimitsRequest())).limits
    assert [of.tenant for of in response.limits.tenants] == ["a"]
    assert response.limits.any_tenant == pb.TenantLimits(max_num_queued_reqs=5)


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        *(({name: 0}, f"limits.{name}") for name in LIMIT_NAMES),
        *(({name: value}, f"limits.{name}") for name, value in zip(LIMIT_NAMES, BEYOND, strict=True)),
        ({"tenants": [{"max_num_streams": 1}]}, "limits.tenants[0].tenant"),
        ({"tenants": [{"tenant": "x" * 129}]}, "limits.tenants[0].tenant"),
        ({"tenants": [{"tenant": "a"}, {"tenant": "a"}]}, "limits.tenants[1].tenant"),
        ({"tenants": [{"tenant": str(number), "max_num_streams": 1} for number in range(10_001)]}, "limits.tenants"),
        ({"tenants": [{"tenant": "a", "max_kv_share": 0}]}, "limits.tenants[0].max_kv_share"),
        ({"any_tenant": {"max_kv_share": 1.5}}, "limits.any_tenant.max_kv_share"),
        ({"any_tenant": {"max_kv_share": float("nan")}}, "limits.any_tenant.max_kv_share"),
        ({"any_tenant": {"max_tokens_per_minute": 2**64 - 1}}, "limits.any_tenant.max_tokens_per_minute"),
        ({"any_tenant": {"max_num_streams": 0}}, "limits.any_tenant.max_num_streams"),
    ],
)
async def test_a_limit_or_a_bound_of_a_tenant_out_of_range_changes_nothing(stub, backend, sent, field):
    before = backend.limit_values
    limits = dict.fromkeys(LIMIT_NAMES, 9) | sent
    code, _, details = await refusal_of(stub.SetLimits(pb.SetLimitsRequest(limits=limits)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details[BadRequest].field_violations[0].field == field
    assert backend.limit_values == before


async def test_a_weight_is_refused_by_name(stub, backend):
    before = backend.limit_values
    limits = {"any_tenant": {"weight": 2}, "max_num_queued_reqs": 9}
    code, _, details = await refusal_of(stub.SetLimits(pb.SetLimitsRequest(limits=limits)))
    assert (code, details[ErrorInfo].metadata["feature"]) == (grpc.StatusCode.UNIMPLEMENTED, "limits.any_tenant.weight")
    assert backend.limit_values == before


async def test_steps_are_watched_until_the_operator_has_seen_enough(stub, backend):
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
    assert (response.first_token_ns, response.between_tokens_ns, response.num_between_tokens) == ([8, 9], [7], [2])
    call.cancel()
    await wait_until(lambda: not backend.watch.sinks)


async def test_one_executor_can_be_watched_alone(stub, backend):
    backend.known_executors = (EXECUTOR, replace(EXECUTOR, address="b", state=pb.EXECUTOR_STATE_CONNECTING))
    call = stub.WatchSteps(pb.WatchStepsRequest(address="b"))
    await wait_until(lambda: backend.watch.sinks)
    backend.watch.sinks[0].step_finished(step(1, address="a"))
    backend.watch.sinks[0].step_finished(step(2, address="b"))
    assert (await call.read()).step_id == 2
    call.cancel()


async def test_a_slow_watcher_is_told_how_many_steps_it_missed(stub, backend):
    call = stub.WatchSteps(pb.WatchStepsRequest())
    await wait_until(lambda: backend.watch.sinks)
    for step_id in range(1, 301):
        backend.watch.sinks[0].step_finished(step(step_id))
    first, second = await call.read(), await call.read()
    assert (first.step_id, first.num_dropped, second.step_id, second.num_dropped) == (45, 44, 46, 0)
    call.cancel()


async def test_one_watcher_too_many_is_refused_and_no_other_is_disturbed(stub, backend):
    calls = [stub.WatchSteps(pb.WatchStepsRequest()) for _ in range(MAX_WATCHERS)]
    await wait_until(lambda: len(backend.watch.sinks) == MAX_WATCHERS)
    code, _, details = await refusal_of(stub.WatchSteps(pb.WatchStepsRequest()).read())
    assert (code, details[ErrorInfo].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHERS")
    for sink in tuple(backend.watch.sinks):
        sink.step_finished(step(7))
    assert {response.step_id for response in [await call.read() for call in calls]} == {7}
    calls.pop().cancel()
    await wait_until(lambda: len(backend.watch.sinks) < MAX_WATCHERS)
    calls.append(stub.WatchSteps(pb.WatchStepsRequest()))
    await wait_until(lambda: len(backend.watch.sinks) == MAX_WATCHERS)
    for call in calls:
        call.cancel()


async def test_without_a_folder_no_plans_are_recorded(stub):
    code, _, details = await refusal_of(stub.SetPlanRecording(pb.SetPlanRecordingRequest(name="x")))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details[ErrorInfo].reason == "NO_RECORD_DIR"

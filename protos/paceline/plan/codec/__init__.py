"""The plan protocol's values to and from bytes: the one codec, for schedulers and executors.

Columns go straight between numpy and little-endian bytes. What comes in and does not have the form it must have is a
MalformedError that names the field, and so is what is beyond its bound (`bounds`). What a value may mean where it
arrives (which rows are in use, which blocks are free, whether the columns of a plan belong together) is for whoever
takes it.
"""

from paceline.plan.codec.bounds import MAX_PART_BYTES, MAX_RESPONSE_BYTES, check, check_size
from paceline.plan.codec.columns import MalformedError, parse
from paceline.plan.codec.requests import read_heartbeat, read_hello, read_plan, write_heartbeat, write_hello, write_plan
from paceline.plan.codec.results import read_result, write_result
from paceline.plan.codec.snapshots import read_snapshot, write_snapshot
from paceline.plan.codec.welcomes import read_welcome, write_welcome
from paceline.plan.durations import read_duration, write_duration
from paceline.plan.texts import readable
from paceline.plan.values import (
    BatchPlan,
    Claim,
    Drain,
    FromExecutor,
    Heartbeat,
    Hello,
    SnapshotPart,
    StepResult,
    ToExecutor,
    WaitingInLine,
    Welcome,
)
from paceline.v1 import inference_pb2, plan_pb2

_SNAPSHOT_TAG = bytes(
    [plan_pb2.AttachResponse.SNAPSHOT_FIELD_NUMBER << 3 | 2]
)  # what a message of this kind begins with


def encode_request(message: ToExecutor, *more: BatchPlan) -> bytes:
    """Return an AttachRequest: one message, or several plans."""
    match message:
        case BatchPlan() if more:
            plans = [write_plan(plan) for plan in (message, *more)]
            request = plan_pb2.AttachRequest(plans=plan_pb2.BatchPlans(plans=plans))
        case BatchPlan():
            request = plan_pb2.AttachRequest(plan=write_plan(message))
        case Heartbeat():
            request = plan_pb2.AttachRequest(heartbeat=write_heartbeat(message))
        case Hello():
            request = plan_pb2.AttachRequest(hello=write_hello(message))
    return request.SerializeToString()


def decode_request(data: bytes) -> list[ToExecutor]:
    """Return what an AttachRequest says: several plans, or one message. Raises MalformedError."""
    request = parse(plan_pb2.AttachRequest, data)
    match request.WhichOneof("message"):
        case "plan":
            check(request.plan)
            return [read_plan(request.plan)]
        case "plans" if request.plans.plans:
            check(request.plans)
            return [read_plan(plan) for plan in request.plans.plans]
        case "heartbeat":
            check(request.heartbeat, "heartbeat.")
            return [read_heartbeat(request.heartbeat)]
        case "hello":
            check(request.hello, "hello.")
            return [read_hello(request.hello)]
        case _:
            raise MalformedError("message", "a scheduler's message must be hello, plan, plans or heartbeat")


def encode_response(message: FromExecutor, *more: StepResult) -> bytes:
    """Return an AttachResponse: one message, or several results."""
    match message:
        case StepResult() if more:
            results = [write_result(result) for result in (message, *more)]
            response = plan_pb2.AttachResponse(results=plan_pb2.StepResults(results=results))
        case StepResult():
            response = plan_pb2.AttachResponse(result=write_result(message))
        case Heartbeat():
            response = plan_pb2.AttachResponse(heartbeat=write_heartbeat(message))
        case SnapshotPart():
            response = plan_pb2.AttachResponse(snapshot=write_snapshot(message))
        case Welcome():
            response = plan_pb2.AttachResponse(welcome=write_welcome(message))
        case WaitingInLine(holder):
            waiting = plan_pb2.WaitingInLine(
                holder_scheduler_id=holder.scheduler_id, holder_term=holder.term, holder_address=holder.address
            )
            response = plan_pb2.AttachResponse(waiting=waiting)
        case Drain(reason, grace_s):
            response = plan_pb2.AttachResponse(
                drain=inference_pb2.Drain(reason=readable(reason), grace=write_duration(grace_s))
            )
    return response.SerializeToString()


def decode_response(data: bytes) -> list[FromExecutor]:
    """Return what an AttachResponse says: several results, or one message. Raises MalformedError."""
    check_size(data, MAX_PART_BYTES if data[:1] == _SNAPSHOT_TAG else MAX_RESPONSE_BYTES)
    response = parse(plan_pb2.AttachResponse, data)
    match response.WhichOneof("message"):
        case "result":
            check(response.result)
            return [read_result(response.result)]
        case "results" if response.results.results:
            check(response.results)
            return [read_result(result) for result in response.results.results]
        case "heartbeat":
            check(response.heartbeat, "heartbeat.")
            return [read_heartbeat(response.heartbeat)]
        case "waiting":
            waiting = response.waiting
            check(waiting, "waiting.")
            return [WaitingInLine(Claim(waiting.holder_term, waiting.holder_scheduler_id, waiting.holder_address))]
        case "welcome":
            check(response.welcome)
            return [read_welcome(response.welcome)]
        case "snapshot":
            check(response.snapshot)
            return [read_snapshot(response.snapshot)]
        case "drain":
            check(response.drain, "drain.")
            return [Drain(readable(response.drain.reason), read_duration(response.drain.grace))]
        case _:
            raise MalformedError("message", "the executor sent a message of an unknown kind")

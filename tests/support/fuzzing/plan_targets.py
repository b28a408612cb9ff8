"""What schedulers and executors send each other: decoded, and taken in by the side that it is for."""

from collections.abc import Iterator
from contextlib import suppress

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness
from executor_rig.hash_executor import HASH_LIMITS
from executor_rig.hash_runner import HashRunner
from executor_rig.plans import placement, plan
from executor_rig.stepping import SteppingEngine
from fuzzing.target import Target, framed, unframed
from paceline.plan.codec import decode_request, decode_response, encode_request, encode_response
from paceline.plan.codec.columns import MalformedError
from paceline.plan.codec.tokenizers import TokenizerParts
from paceline.plan.codec.welcomes import decode_info
from paceline.plan.values import (
    BatchPlan,
    Claim,
    Drain,
    FromExecutor,
    Heartbeat,
    Hello,
    SnapshotPart,
    StepResult,
    WaitingInLine,
    Welcome,
)
from paceline.v1 import executor_pb2
from paceline_executor.errors import RequestError, ServiceError, StepFailedError
from paceline_executor.link.servicer_views import check_state_request
from paceline_executor.rows.table import RowTable
from paceline_scheduler.core.events import ExecutorAttached, StepFinished, Submit
from paceline_scheduler.core.executors import ExecutorDescription, Snapshot
from paceline_scheduler.errors import DivergenceError, LinkError, RequestRefusedError
from paceline_scheduler.link import wire
from paceline_scheduler.link.snapshots import SnapshotJoiner
from scheduler_rig.requests import make_request

_ADDRESS = "executor-0"
_MAX_MESSAGES = 4
_WELCOME = make_executor().welcome()


def take_requests(data: bytes) -> None:
    """Be an executor of a few rows that a scheduler sends anything."""
    engine: SteppingEngine | None = None  # it takes longer to make than most inputs to refuse
    for message in unframed(data, _MAX_MESSAGES):
        try:
            for request in decode_request(message):
                if isinstance(request, BatchPlan):
                    engine = engine or _running_engine()
                    engine.execute(request)
        except StepFailedError as error:
            raise AssertionError("a plan that cannot be done was not refused") from error
        except (MalformedError, ServiceError):
            return  # either ends the stream


def _running_engine() -> SteppingEngine:
    limits = HASH_LIMITS
    engine = SteppingEngine(RowTable(limits), HashRunner(limits.num_blocks, limits.block_size, limits.vocab_size))
    engine.execute(plan([(0, 5)], place=[placement(0, [1, 2, 3, 4, 5])], grants=[(0, 0, 3), (0, 1, 7)]))
    return engine


def _sound_requests() -> Iterator[bytes]:
    hello = Hello(Claim(3, "scheduler-1", "localhost:1"), takeover=True)
    second = plan([(0, 1), (1, 3)], place=[placement(1, [9, 8, 7])], grants=[(1, 0, 5)], tags=[(3, b"k" * 16)])
    third = plan([(1, 1)], finish=[(0, 1)], forget=["request-0"], shared=[(1, 1, 3)], copies=[(3, 5)])
    yield framed([encode_request(hello), encode_request(Heartbeat(1, 2))])
    yield framed([encode_request(second), encode_request(third)])
    yield framed([encode_request(second, third)])


def take_responses(data: bytes) -> None:
    """Be a scheduler with two requests on an executor, which then sends anything."""
    harness: CoreHarness | None = None  # it takes longer to make than most inputs to refuse
    welcome = _WELCOME
    joiner = SnapshotJoiner(welcome)
    for message in unframed(data, _MAX_MESSAGES):
        try:
            for response in decode_response(message):
                harness = harness or _running_harness()
                match response:
                    case StepResult():
                        harness.core.apply(StepFinished(_ADDRESS, response), harness.clock())
                    case Welcome():
                        welcome = response
                        joiner = SnapshotJoiner(welcome)
                    case SnapshotPart():
                        snapshot = joiner.add(response)
                        if snapshot is not None:
                            _attach(harness, welcome, snapshot)
                harness.views.check()
                harness.core.plan(_ADDRESS, harness.clock())
        except (MalformedError, DivergenceError):
            return  # either ends the stream


def _running_harness() -> CoreHarness:
    harness = CoreHarness(make_executor())
    harness.submit(make_request(5, 4, handle=1), make_request([7] * 20, None, handle=2, num_logprobs=2))
    harness.plan()
    return harness


def _attach(harness: CoreHarness, welcome: Welcome, snapshot: Snapshot) -> None:
    description = ExecutorDescription.of(_ADDRESS, welcome)
    harness.core.apply(ExecutorAttached(description, snapshot), harness.clock())
    with suppress(RequestRefusedError):
        harness.core.apply(Submit((make_request(3, 3, handle=99, model=welcome.model.name),)), harness.clock())


def _sound_responses() -> Iterator[bytes]:
    harness = _running_harness()
    executor = harness.executors[_ADDRESS]
    first = executor.run_next()
    harness.core.apply(StepFinished(_ADDRESS, first), harness.clock())
    harness.plan()
    yield framed([encode_response(first), encode_response(executor.run_next())])
    yield framed([encode_response(executor.welcome()), *map(encode_response, executor.parts())])
    others: tuple[FromExecutor, ...] = (Heartbeat(1, 2), WaitingInLine(Claim(1, "s", "localhost:1")), Drain("why", 2.0))
    yield framed(map(encode_response, others))


def read_answers(data: bytes) -> None:
    """Be a scheduler that reads what an executor answers to short calls, and an executor that is asked."""
    with suppress(LinkError, DivergenceError):
        wire.decode_info(data)
    with suppress(LinkError, DivergenceError):
        wire.add_tokenizer_part(parts := TokenizerParts(), data)
        wire.decode_tokenizer(parts.content(), 1)
    with suppress(LinkError, DivergenceError):
        error = wire.decode_refusal("it ended", data)
        assert str(error)
    with suppress(MalformedError):
        decode_info(data)
    with suppress(DecodeError, RequestError):
        check_state_request(executor_pb2.GetStateRequest.FromString(data))


def _sound_answers() -> Iterator[bytes]:
    part = executor_pb2.GetTokenizerResponse(digest="d", tokenizer_json=b"{}", chat_template="x", end_token_ids=[1, 2])
    part.default_sampling.temperature = 0.5
    yield part.SerializeToString()
    info = executor_pb2.GetInfoResponse(incarnation=1, epoch=2, term=3, holder_scheduler_id="s", holder_address="h:1")
    yield info.SerializeToString()
    status = status_pb2.Status(code=10, message="gone")
    superseded = {"holder_term": "7", "holder_scheduler_id": "s", "holder_address": "h:1"}
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="TERM_SUPERSEDED", metadata=superseded))
    yield status.SerializeToString()
    yield executor_pb2.GetStateRequest(max_num_rows=3, include_records=True).SerializeToString()


TARGETS = (
    Target("plan-requests", take_requests, _sound_requests),
    Target("plan-responses", take_responses, _sound_responses),
    Target("executor-answers", read_answers, _sound_answers),
)

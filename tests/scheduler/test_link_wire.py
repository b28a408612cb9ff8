"""What the scheduler writes, the executor's side reads, and the other way round; nonsense is refused."""

import dataclasses

import numpy as np
import pytest

from paceline.v1 import inference_pb2, plan_pb2
from paceline_scheduler.core.executors import RequestContext, RowState, Snapshot
from paceline_scheduler.core.logprobs import LogprobColumns, TokenLogprobs
from paceline_scheduler.core.plan import (
    BatchPlan,
    BlockGrants,
    BlockTag,
    FinalRelease,
    NewRequest,
    Release,
    RowError,
    RowFinish,
    StepResult,
    StepTimings,
)
from paceline_scheduler.core.request import FinishReason, RecordId, SamplingParams
from paceline_scheduler.errors import DivergenceError, StreamEndedError
from paceline_scheduler.link import wire
from paceline_scheduler.link.messages import Heartbeat, Hello, RowPart, SnapshotPart
from paceline_scheduler.link.snapshots import SnapshotJoiner
from paceline_scheduler.link.wire_placements import read_carried, write_carried
from paceline_scheduler.simulator import wire as executor_wire
from paceline_scheduler.testing.requests import column, make_executor, make_request


def same(left, right) -> bool:
    """Compare dataclasses that hold arrays."""
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return type(left) is type(right) and all(same(getattr(left, name), getattr(right, name)) for name in names)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return left == right


def sent_plan(plan, now_s=0.0):
    """Return a plan as the executor's side reads it."""
    message = plan_pb2.AttachRequest.FromString(wire.encode_message(plan))
    return executor_wire.read_plan(message.plan)


def sent_back(response):
    """Return an executor's message as the scheduler reads it."""
    (message,) = wire.decode_messages(response.SerializeToString(), "executor:1")
    return message


def test_a_plan_arrives_as_it_was_written():
    """Every field, negative token ids and large identities included."""
    request = make_request([1, 2, -3], 7, tenant="acme", end_token_ids=(5, 6), num_logprobs=0)
    request = dataclasses.replace(request, model="", handle=0, max_tokens=None, body_digest=b"d" * 16)
    plan = BatchPlan(
        incarnation=2**63 + 1,
        epoch=3,
        step_id=9,
        rows=column(4, 1),
        num_scheduled_tokens=column(1, 3),
        predicted_ns=5_000_000,
        tags=(BlockTag(7, b"k" * 16), BlockTag(8, b"l" * 16)),
        releases=(Release(2, None), Release(3, FinalRelease(11, FinishReason.STOP))),
        placements=(NewRequest(1, request, 2, column(9), 7, 0, 16, 1, 2, 1.5),),
        grants=BlockGrants(column(1, 4), column(0, 5), column(30, 31)),
        shared=BlockGrants(column(1), column(0), column(29)),
        forget=(RecordId("acme", "old"),),
        num_draft_tokens=column(0, 2),
    )
    assert same(sent_plan(plan), plan)


def test_a_decode_only_plan_is_small():
    """256 rows cost two columns and a few numbers."""
    plan = BatchPlan(1, 1, 500, np.arange(256, dtype=np.int32), np.ones(256, dtype=np.int32), 4_000_000)
    assert len(wire.encode_message(plan)) < 2 * 256 * 4 + 64


def test_the_context_holds_the_request_and_what_is_left_of_its_time():
    """A successor of this scheduler finds there what it has to know."""
    origin = inference_pb2.GenerateRequest(request_id="r", stopping={"stop": ["END"]}).SerializeToString()
    request = dataclasses.replace(make_request(2), origin=origin, body_digest=b"x" * 16)
    placement = NewRequest(0, request, 1, column(), 4, 0, 0, 0, 0, 0.25, deadline_left_s=2.5)
    plan = BatchPlan(1, 1, 1, column(), column(), 0, placements=(placement,))
    message = plan_pb2.AttachRequest.FromString(wire.encode_message(plan))
    context = plan_pb2.RequestContext.FromString(message.plan.new_requests[0].context)
    assert context.request.stopping.stop == ["END"]
    assert context.deadline_left.ToMilliseconds() == 2500
    assert context.waited.ToMilliseconds() == 250
    assert context.body_digest == b"x" * 16


def test_unlimited_top_k_is_left_unset():
    """On the wire 0 is no value of top_k."""
    plan = BatchPlan(
        1, 1, 1, column(), column(), 0, placements=(NewRequest(0, make_request(2), 1, column(), 4, 0, 0, 0, 0, 0.0),)
    )
    message = plan_pb2.AttachRequest.FromString(wire.encode_message(plan))
    sampling = message.plan.new_requests[0].sampling
    assert not sampling.HasField("top_k")
    assert sampling.HasField("temperature")


def test_hello_and_heartbeat_say_who_and_that_we_are_there():
    """The two messages beside plans."""
    hello = plan_pb2.AttachRequest.FromString(wire.encode_message(Hello("s", 4))).hello
    assert (hello.scheduler_id, hello.term, hello.min_protocol, hello.max_protocol, hello.takeover) == (
        "s",
        4,
        1,
        2,
        False,
    )
    beat = plan_pb2.AttachRequest.FromString(wire.encode_message(Heartbeat()))
    assert beat.WhichOneof("message") == "heartbeat"


def a_result(**changes):
    """Return a result of three rows."""
    result = StepResult(
        incarnation=2**64 - 1,
        epoch=2,
        step_id=3,
        rows=column(0, 5, 9),
        num_accepted=column(1, 0, 2),
        token_ids=column(100, -1, 102),
        finishes=np.array([RowFinish.END_TOKEN, RowFinish.ERROR, 0], dtype=np.uint8),
        grant_hash=2**64 - 5,
        timings=StepTimings(forward_ns=7, idle_ns=9),
        logprobs={9: (TokenLogprobs(-1, -2.5, ()), TokenLogprobs(102, -0.5, ((102, -0.5), (7, -1.5))))},
        errors={5: RowError("NUMERIC_FAULT", "no usable number")},
        num_draft_tokens=column(0, 0, 3),
    )
    return dataclasses.replace(result, **changes)


def test_a_result_arrives_as_it_was_written():
    """Tokens, finishes, log-probabilities and the failure of one row with its reason."""
    assert same(sent_back(executor_wire.write_result(a_result())), a_result())


@pytest.mark.parametrize(
    "changes",
    [
        {"num_accepted": column(1, 0)},
        {"num_accepted": column(1, 0, 1)},
        {"num_accepted": column(4, 0, -1)},
        {"finishes": np.zeros(2, dtype=np.uint8)},
        {"num_draft_tokens": column(0, 3)},
        {"logprobs": {9: (TokenLogprobs(102, -0.5, ()),)}},
        {"logprobs": {5: (TokenLogprobs(100, -0.5, ()),)}},
        {"logprobs": {77: (TokenLogprobs(100, -0.5, ()),)}},
    ],
)
def test_a_result_that_does_not_add_up_is_a_divergence(changes):
    """It never reaches the core."""
    with pytest.raises(DivergenceError):
        sent_back(executor_wire.write_result(a_result(**changes)))


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x22\x05\x22\x03abc", b""])
def test_bytes_that_are_no_message_are_a_divergence(data):
    """Truncated columns, broken protobuf, a message of no kind."""
    with pytest.raises(DivergenceError):
        wire.decode_messages(data, "executor:1")


def some_logprobs(offset, num_tokens, num_top=2):
    """Return recognisable log-probabilities."""
    tops = np.arange(num_tokens * num_top).reshape(num_tokens, num_top)
    return LogprobColumns(
        offset, np.arange(num_tokens, dtype=np.float32), tops.astype(np.int32), -tops.astype(np.float32)
    )


@pytest.mark.parametrize(
    "changes",
    [{"logprobs": b"12345"}, {"logprobs": bytes(8)}, {"num_top": 3}, {"top_logprobs": bytes(4)}],
    ids=["no floats", "too many tokens", "more alternatives", "too few alternatives"],
)
def test_logprobs_that_do_not_fill_their_columns_are_a_divergence(changes):
    """They would be told of other tokens."""
    columns = {"logprobs": bytes(4), "num_top": 2, "top_token_ids": bytes(8), "top_logprobs": bytes(8)} | changes
    state = plan_pb2.RowState(logprobs=plan_pb2.LogprobColumns(**columns))
    with pytest.raises(DivergenceError):
        sent_back(plan_pb2.AttachResponse(snapshot=plan_pb2.SnapshotPart(rows=[state])))


@pytest.mark.parametrize("after", [some_logprobs(3, 1), some_logprobs(2, 1, num_top=1)], ids=["gap", "other width"])
def test_logprobs_that_do_not_follow_one_another_are_a_divergence(after):
    """A piece of a request is missing, or of another one."""
    row = RowState(RecordId("", "r"), 0, 1, column(1), column(2, 3), 0, column(), RowFinish.NONE, None)
    joiner = SnapshotJoiner()
    joiner.add(SnapshotPart((RowPart(dataclasses.replace(row, logprobs=some_logprobs(0, 2)), True),), (), False))
    with pytest.raises(DivergenceError, match="log-probabilities"):
        joiner.add(SnapshotPart((RowPart(dataclasses.replace(row, logprobs=after), False),), (), True))


def test_a_snapshot_is_joined_from_its_parts(monkeypatch):
    """A request longer than a part is continued in the next one."""
    monkeypatch.setattr(executor_wire, "MAX_PIECE", 2)
    long = RowState(
        RecordId("t", "long"),
        3,
        2,
        column(1, 2, 3, 4, 5),
        column(6, 7, 8, 9, 10),
        9,
        column(9, 10),
        RowFinish.NONE,
        None,
        some_logprobs(1, 4),
    )
    short = RowState(
        RecordId("t", "short"),
        None,
        1,
        column(1),
        column(),
        0,
        column(),
        RowFinish.LENGTH,
        FinalRelease(0, FinishReason.LENGTH),
    )
    snapshot = Snapshot((long, short), (BlockTag(9, b"k" * 16),))
    joiner = SnapshotJoiner()
    joined = [joiner.add(sent_back(part)) for part in executor_wire.write_snapshot(snapshot)]
    assert joined[:-1] == [None] * (len(joined) - 1)
    assert same(joined[-1], snapshot)


def test_a_snapshot_that_ends_inside_a_request_is_a_divergence(monkeypatch):
    """Half a request would be taken for a whole one."""
    monkeypatch.setattr(executor_wire, "MAX_PIECE", 2)
    row = RowState(RecordId("", "r"), 0, 1, column(1, 2, 3), column(), 0, column(), RowFinish.NONE, None)
    first, *_ = executor_wire.write_snapshot(Snapshot((row,)))
    joiner = SnapshotJoiner()
    joiner.add(sent_back(first))
    with pytest.raises(DivergenceError, match="inside a request"):
        joiner.add(SnapshotPart((), (), is_last=True))


def test_a_welcome_without_geometry_is_refused():
    """Nothing can be planned for an executor of no blocks."""
    welcome = plan_pb2.AttachResponse(welcome=plan_pb2.Welcome(incarnation=1, epoch=1, protocol=1))
    with pytest.raises(DivergenceError, match="num_blocks = 0"):
        sent_back(welcome)


def test_a_refusal_without_details_is_the_end_of_the_stream():
    """Only TERM_SUPERSEDED means that another scheduler is in charge."""
    error = wire.decode_refusal("ABORTED: gone", None)
    assert type(error) is StreamEndedError
    assert str(error) == "ABORTED: gone"


def test_the_simulated_executor_runs_what_arrived_over_the_wire():
    """The hash of the grants agrees on both sides of the wire."""
    executor = make_executor()
    description, _ = executor.attach("x")
    plan = BatchPlan(
        description.incarnation,
        description.epoch,
        1,
        column(0),
        column(3),
        0,
        placements=(NewRequest(0, make_request(3, 2), 1, column(), 2, 0, 0, 0, 0, 0.0),),
        grants=BlockGrants(column(0), column(0), column(5)),
    )
    result = sent_back(executor_wire.write_result(executor.execute(sent_plan(plan))))
    assert result.num_accepted.tolist() == [1]


def test_what_is_left_with_an_executor_comes_back_whole():
    """Everything that another scheduler needs to place the request again, or to tell its client."""
    sent = inference_pb2.GenerateRequest(request_id="r", priority=3, cache_salt="s", resumable=True)
    sent.bypass_prefix_cache, sent.sampling.n = True, 2
    sent.stopping.max_tokens, sent.output.prompt_logprobs = 9, 1
    request = dataclasses.replace(
        make_request(2, 9, request_id="r", min_tokens=2, num_logprobs=4, end_token_ids=(5, 6)),
        handle=0,
        model="",
        prompt_token_ids=column(),
        sampling=SamplingParams(0.5, 7, 0.25, 0.125, 1 << 63, 1.0, -1.0, 2.0, ((3, 0.5),), (1, 2)),
        ignored_end_token_ids=(8,),
        bad_words=((1, 2), (3,)),
        num_prompt_logprobs=1,
        priority=3,
        cache_salt="s",
        bypass_prefix_cache=True,
        num_completions=2,
        is_resumable=True,
        origin=sent.SerializeToString(),
        body_digest=b"x" * 16,
    )
    carried = RequestContext(request, 1.5, 2.5, 1, 2, 3, 4)
    read = read_carried(request.key, write_carried(carried))
    assert dataclasses.replace(read, request=request) == carried
    for field in dataclasses.fields(request):
        if field.name != "prompt_token_ids":
            assert getattr(read.request, field.name) == getattr(request, field.name), field.name


@pytest.mark.parametrize("data", [b"", b"\xff\xff", b"\x0a\x00"], ids=["nothing", "no message", "of an older version"])
def test_what_cannot_be_read_is_not_carried_on(data):
    """Its request is let go; the client sends what it has."""
    assert read_carried(RecordId("", "r"), data) is None

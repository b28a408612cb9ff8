"""What the scheduler adds to the plan protocol's codec: contexts, joined snapshots, and errors of its own."""

import dataclasses
from itertools import count, islice

import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2

from paceline.plan.codec import decode_response, encode_request, encode_response
from paceline.plan.sampling import SamplingParams
from paceline.plan.values import (
    BatchPlan,
    BlockTags,
    ExecutorLimits,
    FinalRelease,
    FinishReason,
    KvGeometry,
    LogprobColumns,
    Model,
    RecordId,
    RowFinish,
    RowState,
    SnapshotPart,
    Welcome,
)
from paceline.v1 import inference_pb2, plan_pb2
from paceline_scheduler.core.executors import NO_HISTORY, History, SeenRow
from paceline_scheduler.core.phases import PhaseTimes
from paceline_scheduler.errors import DivergenceError, StillLoadingError, StreamEndedError
from paceline_scheduler.link import wire
from paceline_scheduler.link.snapshots import MAX_SNAPSHOT_BYTES, SnapshotJoiner
from paceline_scheduler.link.transport_grpc import GrpcPlanCall
from paceline_scheduler.link.wire_contexts import read_context, with_contexts, write_context
from scheduler_rig.requests import column, make_placement, make_request


def test_the_context_holds_the_request_and_what_is_left_of_its_time():
    origin = inference_pb2.GenerateRequest(request_id="r", stopping={"stop": ["END"]}).SerializeToString()
    request = dataclasses.replace(make_request(2), origin=origin, body_digest=b"x" * 16)
    placement = make_placement(0, request, waited_s=0.25, deadline_left_s=2.5)
    plan = BatchPlan(1, 1, 1, new_requests=(placement,))
    message = plan_pb2.AttachRequest.FromString(encode_request(with_contexts(plan)))
    context = plan_pb2.RequestContext.FromString(message.plan.new_requests[0].context)
    assert context.request.stopping.stop == ["END"]
    assert context.deadline_left.ToMilliseconds() == 2500
    assert context.waited.ToMilliseconds() == 250
    assert context.body_digest == b"x" * 16


class Call:
    """A call on which one message comes."""

    def __init__(self, data):
        self._data = data

    async def read(self):
        return self._data


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x22\x05\x22\x03abc", b""])
async def test_bytes_that_are_no_message_are_a_divergence(data):
    """Truncated columns, broken protobuf, a message of no kind: the stream ends, and is opened again."""
    with pytest.raises(DivergenceError):
        await GrpcPlanCall(Call(data)).read()


async def test_a_welcome_without_geometry_is_refused():
    welcome = plan_pb2.AttachResponse.FromString(encode_response(WELCOME))
    welcome.welcome.ClearField("geometry")
    with pytest.raises(DivergenceError, match="num_blocks is 0"):
        await GrpcPlanCall(Call(welcome.SerializeToString())).read()


def test_a_refusal_with_broken_details_is_a_divergence():
    status = status_pb2.Status()
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="TERM_SUPERSEDED"))
    status.details[0].value += b"\xff"
    for details in (b"\xff", status.SerializeToString()):
        with pytest.raises(DivergenceError):
            wire.decode_refusal("ABORTED: gone", details)


def test_a_refusal_without_details_is_the_end_of_the_stream():
    """Only TERM_SUPERSEDED means that another scheduler is in charge."""
    error = wire.decode_refusal("ABORTED: gone", None)
    assert type(error) is StreamEndedError
    assert str(error) == "ABORTED: gone"


def test_an_executor_that_loads_its_model_is_told_from_one_that_is_not_there():
    details = status_pb2.Status(code=14)
    details.details.add().Pack(error_details_pb2.ErrorInfo(reason="LOADING", domain="paceline"))
    error = wire.decode_refusal("UNAVAILABLE: wait", details.SerializeToString())
    assert type(error) is StillLoadingError


LONG = RowState(
    RecordId("t", "long"),
    3,
    2,
    column(1, 2, 3, 4, 5),
    column(6, 7, 8, 9, 10),
    9,
    column(9, 10),
    RowFinish.GOES_ON,
    logprobs=LogprobColumns(
        1, -np.arange(4, dtype=np.float32), column(*range(8)).reshape(4, 2), -np.ones((4, 2), dtype=np.float32)
    ),
)
SHORT = RowState(
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


WELCOME = Welcome(
    incarnation=1,
    epoch=1,
    protocol=2,
    model=Model("simulated", "simulated", 64, 1000),
    geometry=KvGeometry(num_blocks=16, block_size=8),
    limits=ExecutorLimits(8, 64, 64, 4),
    tag_key=bytes(32),
)


def pieces_of(state):
    """The state cut in two: each piece holds some of every column."""
    head, tail = state.logprobs.split(3)
    first = dataclasses.replace(
        state,
        prompt_token_ids=state.prompt_token_ids[:2],
        output_token_ids=state.output_token_ids[:4],
        block_ids=state.block_ids[:1],
        logprobs=head,
        continues=True,
    )
    second = RowState(
        state.record_id, None, 0, state.prompt_token_ids[2:], state.output_token_ids[4:], 0, state.block_ids[1:]
    )
    return first, dataclasses.replace(second, logprobs=tail)


def joined(*parts):
    """What a scheduler makes of the parts of a snapshot, each as it comes over the wire."""
    joiner = SnapshotJoiner(WELCOME)
    found = None
    for part in parts:
        assert found is None, "nothing follows the last part"
        (arrived,) = decode_response(encode_response(part))
        found = joiner.add(arrived)
    return found


def test_a_snapshot_is_joined_from_its_parts():
    """A request longer than a part is continued in the next one; tags may come in several parts."""
    first, second = pieces_of(LONG)
    snapshot = joined(
        SnapshotPart(rows=(first,)),
        SnapshotPart(rows=(second, SHORT), tags=BlockTags.of([(9, b"k" * 16)])),
        SnapshotPart(tags=BlockTags.of([(15, b"l" * 16)]), num_parts=3),
    )
    assert [repr(row) for row in snapshot.rows] == [
        repr(SeenRow.of(state, None, NO_HISTORY)) for state in (LONG, SHORT)
    ]
    assert list(snapshot.tags) == [(9, b"k" * 16), (15, b"l" * 16)]


OTHER = RecordId("t", "other")
HEAD, TAIL = pieces_of(LONG)
WIDER = {"top_token_ids": column(1)[:, None], "top_logprobs": np.ones((1, 1))}


@pytest.mark.parametrize(
    ("sentence", "parts"),
    [
        # A row of which the scheduler never heard would stay on the device, or come twice.
        *((f"2 parts and says {n}", ({"rows": (SHORT,)}, {"num_parts": n})) for n in (1, 3)),
        # Half a request would be taken for a whole one, or two be mixed.
        ("inside a request", ({"rows": (HEAD,), "num_parts": 1},)),
        ("another request", ({"rows": (HEAD, dataclasses.replace(TAIL, record_id=OTHER)), "num_parts": 1},)),
        *(
            ("log-probabilities", ({"rows": (HEAD, dataclasses.replace(TAIL, logprobs=spoilt)), "num_parts": 1},))
            for spoilt in (dataclasses.replace(TAIL.logprobs, **change) for change in ({"offset": 5}, WIDER))
        ),
        ("a tag of block 16 of 16", ({"tags": BlockTags.of([(16, b"k" * 16)]), "num_parts": 1},)),
    ],
)
def test_parts_that_do_not_make_a_snapshot_are_a_divergence(sentence, parts):
    with pytest.raises(DivergenceError, match=sentence):
        joined(*(SnapshotPart(**part) for part in parts))


def changed(**values):
    """A row of a snapshot, with something else in it."""
    row = RowState(RecordId("t", "r"), 0, 1, column(1, 2, 3), column(4, 5), 4, column(3))
    return dataclasses.replace(row, **values)


LOGPROBS = LogprobColumns(1, -np.ones(1, np.float32), column(1000)[:, None], -np.ones((1, 1), np.float32))
LIES = {
    "row 8 of 8": (changed(row=8),),
    "row 0 twice": (changed(), changed(record_id=OTHER)),
    "a request twice": (changed(), changed(row=1)),
    "65 tokens of a row in 64": (changed(output_token_ids=np.ones(62, np.int32)),),
    "6 of 5 tokens computed": (changed(num_computed_tokens=6),),
    "5 tokens in 0 blocks": (changed(num_computed_tokens=5, block_ids=column()),),
    "a table of block 16 of 16": (changed(block_ids=column(16)),),
    "a table of 9 blocks": (changed(block_ids=column(*range(9))),),
    "a block twice in a table": (changed(block_ids=column(3, 3)),),
    "token 1000 of 1000": (changed(output_token_ids=column(4, 1000)),),
    "a release beyond the output": (changed(released=FinalRelease(3, FinishReason.STOP)),),
    "log-probabilities of other tokens": (changed(logprobs=LOGPROBS.up_to(1)),),
    "snapshot has token 1000": (changed(logprobs=LOGPROBS),),
}


@pytest.mark.parametrize("sentence", LIES)
def test_a_snapshot_that_the_executor_cannot_have_is_a_divergence(sentence):
    assert joined(SnapshotPart(rows=(changed(),), num_parts=1)) is not None
    with pytest.raises(DivergenceError, match=sentence):
        joined(SnapshotPart(rows=LIES[sentence], num_parts=1))


def test_a_snapshot_is_refused_before_it_takes_too_much_memory():
    joiner, context = SnapshotJoiner(WELCOME), bytes(1_000_000)
    rows = (changed(row=None, record_id=RecordId("t", f"{number}"), context=context) for number in count())
    with pytest.raises(DivergenceError, match=f"more than {MAX_SNAPSHOT_BYTES} bytes"):
        list(map(joiner.add, (SnapshotPart(rows=(row,)) for row in islice(rows, MAX_SNAPSHOT_BYTES // 1_000_000 + 1))))


def test_what_is_left_with_an_executor_comes_back_whole():
    sent = inference_pb2.GenerateRequest(request_id="r", priority=3, cache_salt="s", resumable=True)
    sent.bypass_prefix_cache, sent.sampling.n = True, 2
    sent.trace_parent, sent.trace_state = "00-a-b-01", "vendor=1"
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
        trace_parent="00-a-b-01",
    )
    history = History(1.5, 2.5, 1, 2, 3, 4, PhaseTimes(1.0, 2.0, 0.25, 0.5))
    read, read_history = read_context(request.key, write_context(request, history))
    assert read_history == history
    for field in dataclasses.fields(request):
        if field.name != "prompt_token_ids":
            assert getattr(read, field.name) == getattr(request, field.name), field.name


def test_a_form_stays_with_its_request_where_a_successor_knows_forms_and_no_other_reads_it():
    """Releases that knew none looked for `request`, and would place it without its form."""
    sent = inference_pb2.GenerateRequest(request_id="r", structured={"regex": "a+"}, resumable=True)
    request = dataclasses.replace(
        make_request(request_id="r"), origin=sent.SerializeToString(), structured=sent.structured.SerializeToString()
    )
    data = write_context(request, NO_HISTORY)
    assert read_context(request.key, data)[0].structured == request.structured
    assert not plan_pb2.RequestContext.FromString(data).HasField("request")
    placement = make_placement(0, request)
    message = plan_pb2.AttachRequest.FromString(encode_request(BatchPlan(1, 1, 1, new_requests=(placement,))))
    assert message.plan.new_requests[0].structured.regex == "a+"


def with_settings(**fields):
    """A context that an executor has made up."""
    made_up = {"request": inference_pb2.GenerateRequest(), "settings": plan_pb2.NewRequest()} | fields
    return plan_pb2.RequestContext(**made_up).SerializeToString()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xff",
        b"\x0a\x00",  # of an older version
        with_settings(num_preemptions=2**32 - 1),
        with_settings(waited={"seconds": -1}),
        with_settings(settings={"sampling": {"temperature": float("nan")}}),
        with_settings(settings={"num_logprobs": 2**32 - 1}),
        with_settings(request={"stopping": {"max_tokens": -1}}),
        with_settings(request={"cache_salt": "x" * 129}),
    ],
)
def test_a_context_that_no_scheduler_wrote_is_not_carried_on(data):
    """Executors return it unread, unless they lie."""
    assert read_context(RecordId("", "r"), with_settings())[0] is not None
    assert read_context(RecordId("", "r"), data)[0] is None

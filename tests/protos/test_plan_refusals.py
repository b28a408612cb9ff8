"""What the codec refuses, by the name of the field, and what presence means: a field set to zero is not unset."""

import numpy as np
import pytest

from paceline.plan import codec
from paceline.plan.codec import decode_request, decode_response, requests, welcomes
from paceline.plan.codec.columns import ColumnError, MalformedError
from paceline.plan.sampling import GenerationDefaults, SamplingParams
from paceline.plan.values import BatchPlan, NewRequest, RecordId, RowFinish
from paceline.v1 import executor_pb2, inference_pb2, plan_pb2, sampling_pb2
from repository_checks.messages import leaves, with_leaf, with_parents


def column(*values):
    """A column as it travels."""
    return np.array(values, dtype="<i4").tobytes()


def read_plan(**fields):
    """The plan that a message with these fields is read as."""
    (plan,) = decode_request(plan_pb2.AttachRequest(plan=plan_pb2.BatchPlan(**fields)).SerializeToString())
    return plan


def read_new_request(**fields):
    """The placement that a message with these fields is read as."""
    (new_request,) = read_plan(new_requests=[plan_pb2.NewRequest(**fields)]).new_requests
    return new_request


def read_result(**changes):
    """The result that a message is read as: three rows, of which the first and the last produced tokens."""
    fields = {
        "rows": column(0, 5, 9),
        "num_accepted": column(1, 0, 2),
        "token_ids": column(100, 101, 102),
        "finishes": bytes([RowFinish.END_TOKEN, RowFinish.ERROR, RowFinish.GOES_ON]),
    }
    result = plan_pb2.StepResult(**(fields | changes))
    (read,) = decode_response(plan_pb2.AttachResponse(result=result).SerializeToString())
    return read


def read_row(**fields):
    """The state of a row that a message is read as."""
    part = plan_pb2.SnapshotPart(rows=[plan_pb2.RowState(**fields)])
    (read,) = decode_response(plan_pb2.AttachResponse(snapshot=part).SerializeToString())
    return read.rows[0]


def told(row, *widths):
    """Log-probabilities of as many tokens of a row, each with so many alternatives."""
    return plan_pb2.RowLogprobs(
        row=row,
        tokens=[sampling_pb2.TokenLogprobs(top=[sampling_pb2.TokenLogprob()] * width) for width in widths],
    )


@pytest.mark.parametrize("decode", [decode_request, decode_response])
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x12", b"\x12\x05\x52\x04\x00", b"\x0a\x03\x0a\x01\xff"])
def test_bytes_that_are_no_message_are_refused(decode, data):
    """Broken protobuf, what was cut off, text that is no UTF-8."""
    with pytest.raises(MalformedError, match=r"bytes are not a message of type Attach"):
        decode(data)


@pytest.mark.parametrize("kind", ["a plan", "plans"])
def test_a_truncated_plan_is_not_a_shorter_plan(kind):
    plan = BatchPlan(1, 2, 3, np.array([4], np.int32), np.array([1], np.int32))
    whole = codec.encode_request(plan) if kind == "a plan" else codec.encode_request(plan, plan)
    for length in range(len(whole)):
        with pytest.raises(MalformedError):
            decode_request(whole[:length])


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (decode_request, plan_pb2.AttachRequest()),
        (decode_request, plan_pb2.AttachRequest(plans=plan_pb2.BatchPlans())),
        (decode_response, plan_pb2.AttachResponse()),
        (decode_response, plan_pb2.AttachResponse(results=plan_pb2.StepResults())),
    ],
    ids=["nothing", "no plans", "nothing of an executor", "no results"],
)
def test_a_message_that_says_nothing_is_refused(decode, message):
    with pytest.raises(MalformedError) as refusal:
        decode(message.SerializeToString())
    assert refusal.value.field == "message"


DIFFERENT = {
    "too few counts": ("num_accepted", {"num_accepted": column(1, 2)}),
    "too few finishes": ("num_accepted", {"finishes": bytes(2)}),
    "too many tokens": ("num_accepted", {"num_accepted": column(1, 0, 1)}),
    "a finish that is none": ("finishes", {"finishes": bytes([0, max(RowFinish) + 1, 0])}),
    "drafts of some rows": ("num_draft_tokens", {"num_draft_tokens": column(1, 1)}),
    "log-probabilities of one token of two": ("logprobs", {"logprobs": [told(9, 0)]}),
    "log-probabilities of a row without tokens": ("logprobs", {"logprobs": [told(5, 0)]}),
    "log-probabilities of another row": ("logprobs", {"logprobs": [told(77, 0)]}),
    "alternatives of different number": ("logprobs.top", {"logprobs": [told(9, 1, 2)]}),
}


@pytest.mark.parametrize(("field", "changes"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_result_that_does_not_add_up_is_refused(field, changes):
    """It never reaches who would count with it."""
    with pytest.raises(ColumnError) as refusal:
        read_result(**changes)
    assert refusal.value.field == field


def test_a_result_that_adds_up_is_read():
    assert read_result().token_ids.tolist() == [100, 101, 102]
    assert read_result(num_draft_tokens=column(1, 0, 2)).num_draft_tokens.tolist() == [1, 0, 2]
    assert [each.row for each in read_result(logprobs=[told(9, 2, 2)]).logprobs] == [9]


@pytest.mark.parametrize(
    "changes",
    [{"logprobs": bytes(8)}, {"num_top": 3}, {"num_top": 1024}, {"top_logprobs": bytes(4)}],
    ids=["too many tokens", "more", "very many", "too few"],
)
def test_a_rows_logprobs_that_do_not_fill_their_columns_are_refused(changes):
    """They would be told of other tokens."""
    columns = {"logprobs": bytes(4), "num_top": 2, "top_token_ids": bytes(8), "top_logprobs": bytes(8)}
    assert read_row(logprobs=plan_pb2.LogprobColumns(**columns)).logprobs.num_top == 2
    with pytest.raises(ColumnError) as refusal:
        read_row(logprobs=plan_pb2.LogprobColumns(**(columns | changes)))
    assert refusal.value.field == "logprobs.num_top"


def test_a_snapshot_with_less_keys_than_blocks_is_refused():
    """A block would get another one's key."""
    part = plan_pb2.SnapshotPart(tags=plan_pb2.BlockTags(block_ids=column(1, 2), keys=bytes(16)))
    with pytest.raises(ColumnError) as refusal:
        decode_response(plan_pb2.AttachResponse(snapshot=part).SerializeToString())
    assert refusal.value.field == "tags.keys"


@pytest.mark.parametrize("fields", [{"last": True}, {"num_parts": 2}], ids=str)
def test_only_the_last_part_of_a_snapshot_says_how_many_there_are(fields):
    """Another one would be taken for the end, or the end for a part."""
    with pytest.raises(MalformedError) as refusal:
        decode_response(plan_pb2.AttachResponse(snapshot=plan_pb2.SnapshotPart(**fields)).SerializeToString())
    assert refusal.value.field == "num_parts"


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_generation_defaults_that_nothing_can_be_sampled_with_are_refused(field):
    for value in (-1.0, 1000.0, float("nan")):
        with pytest.raises(MalformedError, match=field) as refusal:
            welcomes.read_defaults(sampling_pb2.SamplingParams(**{field: value}))
        assert refusal.value.field == "default_sampling"


def test_a_keep_all_default_is_sent_as_unset():
    """On the wire 0 is no value of top_k."""
    sent = welcomes.write_defaults(GenerationDefaults(temperature=0.0, top_k=0))
    assert [field.name for field, _ in sent.ListFields()] == ["temperature"]


def test_get_info_is_read_like_a_message_of_the_stream():
    sent = executor_pb2.GetInfoResponse(incarnation=2**63, term=7, holder_scheduler_id="s", num_waiting_schedulers=2)
    info = welcomes.decode_info(sent.SerializeToString())
    assert (info.incarnation, info.term, info.holder_scheduler_id, info.num_waiting_schedulers) == (2**63, 7, "s", 2)
    with pytest.raises(MalformedError):
        welcomes.decode_info(b"\x08")


# Presence


def placement(**sampling):
    """A placement as it is sent, with these parameters beside those that change nothing."""
    params = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0} | sampling
    empty = np.zeros(0, np.int32)
    return requests.write_new_request(
        NewRequest(0, RecordId("", "r"), 1, empty, empty, 0, SamplingParams(**params), (), 1, None, b"")
    )


def test_what_changes_nothing_is_not_sent():
    """But for the parameters that a plan always resolves: an executor has no defaults of its own for these."""
    sent = placement()
    assert [field.name for field, _ in sent.sampling.ListFields()] == ["temperature", "top_p", "min_p", "seed"]
    assert [name for name in ("num_logprobs", "min_tokens", "num_prompt_logprobs") if sent.HasField(name)] == []


def test_a_parameter_set_to_zero_is_sent():
    assert placement(temperature=0.0).sampling.HasField("temperature")


def test_an_unset_parameter_is_read_as_its_default():
    """The seed as one made of the request's name; `printf 'acme\\0r\\0003' | b2sum -l 64` says which."""
    read = read_new_request(id=plan_pb2.RecordId(tenant="acme", request_id="r", index=3))
    seed = int.from_bytes(bytes.fromhex("51ceddcfc0e84078"), "little")
    assert read.sampling == SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
    assert (read.num_logprobs, read.min_tokens, read.num_prompt_logprobs) == (None, 0, None)


def test_a_parameter_set_to_zero_is_read_as_zero():
    """And 0 alternatives are asked for where none is unset. A top_k of 0 is out of range, which -1 says."""
    zeros = sampling_pb2.SamplingParams(temperature=0, top_k=0, top_p=0, min_p=0, seed=0, repetition_penalty=0)
    read = read_new_request(sampling=zeros, num_logprobs=0, num_prompt_logprobs=0)
    assert read.sampling == SamplingParams(temperature=0, top_k=-1, top_p=0, min_p=0, seed=0, repetition_penalty=0)
    assert (read.num_logprobs, read.num_prompt_logprobs) == (0, 0)


def test_row_zero_is_a_row_and_no_row_is_none():
    """A record without a place on the device has no row, not row 0."""
    assert read_row(row=0).row == 0
    assert read_row().row is None


LOGPROBS = {"logprobs": bytes(4), "num_top": 1, "top_token_ids": bytes(4), "top_logprobs": bytes(4)}
TOKEN = sampling_pb2.TokenLogprobs(top=[sampling_pb2.TokenLogprob()])
SOUND = {
    "plan": plan_pb2.BatchPlan(new_requests=[plan_pb2.NewRequest()]),
    "result": plan_pb2.StepResult(
        rows=column(0),
        num_accepted=column(1),
        token_ids=column(100),
        finishes=bytes(1),
        logprobs=[told(0, 1)],
        prompt_logprobs=[plan_pb2.RowPromptLogprobs(tokens=[TOKEN])],
    ),
    "snapshot": plan_pb2.SnapshotPart(rows=[plan_pb2.RowState(logprobs=LOGPROBS)]),
}
# What this version does not act on yet. A request fails by the name of the field: bad words come as tokens, completions
# one by one. A plan or an answer ends its stream: nobody asks for these.
LATER = {
    "plan": (
        "new_requests.adapter_slot",
        *("new_requests.sampling.bad_words", "new_requests.sampling.n"),
        *("adapter_loads", "imports", "exports"),
    ),
    "result": ("confirmations",),
    "snapshot": ("adapters", "imports", "exports", "rows.adapter_slot"),
}
# What nobody reads: facts of a later version, and what the other side never sets.
UNREAD = {
    "plan": (),
    "result": (
        "errors.error.details.",
        *(f"{kind}.tokens.{place}token_bytes" for kind in ("logprobs", "prompt_logprobs") for place in ("", "top.")),
    ),
    "snapshot": ("rows.prompt_logprobs.", "rows.sampling.n", "rows.sampling.bad_words"),
}


def read(kind, message):
    """What a message is read as, None where it is refused, and the names of fields that are not supported."""
    wrapper = plan_pb2.AttachRequest if kind == "plan" else plan_pb2.AttachResponse
    try:
        (value,) = (decode_request if kind == "plan" else decode_response)(
            wrapper(**{kind: message}).SerializeToString()
        )
    except MalformedError as refusal:
        return None, {refusal.field} if "is not supported by this version" in str(refusal) else set()
    placements = getattr(value, "new_requests", ())
    named = {f"new_requests.{field}" for placement in placements for field in placement.unsupported_fields}
    return repr(value), named.union(getattr(value, "unsupported_fields", ()))


@pytest.mark.parametrize(
    ("kind", "path"), [(kind, path) for kind, message in SOUND.items() for path in leaves(message.DESCRIPTOR)]
)
def test_every_field_of_plans_results_and_snapshots_is_read_or_refused_by_name(kind, path):
    value, unsupported = read(kind, with_leaf(SOUND[kind], path))
    assert unsupported == {field for field in LATER[kind] if path == field or path.startswith(f"{field}.")}
    if not unsupported:
        is_read = value != read(kind, with_parents(SOUND[kind], path))[0]
        assert is_read != path.startswith(UNREAD[kind])


def test_a_field_set_to_what_changes_nothing_is_honoured():
    words = [inference_pb2.TokenIds(ids=[5]), inference_pb2.TokenIds(ids=[6, 7])]
    read = read_new_request(sampling=sampling_pb2.SamplingParams(n=1), bad_word_token_ids=words)
    assert (read.unsupported_fields, read.bad_word_token_ids) == ((), ((5,), (6, 7)))


@pytest.mark.parametrize("sizes", [{"num_rows": [1, 1]}, {"num_tokens": [64, 32, 128]}])
def test_sizes_of_captured_steps_ascend(sizes):
    field = f"graphs.{next(iter(sizes))}"
    message = plan_pb2.Welcome(graphs=plan_pb2.GraphSizes(**sizes))
    with pytest.raises(MalformedError, match=f"{field} must ascend") as refusal:
        welcomes.read_welcome(message)
    assert refusal.value.field == field

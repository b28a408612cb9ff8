"""What travels arrives: any value of the plan protocol is the same after encode and decode, damaged bytes are refused.

`test_plan_golden` pins the bytes themselves, since a codec that is wrong twice would pass here.
"""

import contextlib
import dataclasses
import math
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paceline.plan import values as plan
from paceline.plan.codec import decode_request, decode_response, encode_request, encode_response
from paceline.plan.codec.bound_kinds import Column, Data, Floats, Real, TextLength, Whole
from paceline.plan.codec.bounds import TABLE
from paceline.plan.codec.columns import MalformedError
from paceline.plan.sampling import SAMPLING_RANGES, GenerationDefaults, SamplingParams
from paceline.plan.versions import ProtocolRange
from paceline.v1 import executor_pb2, inference_pb2, plan_pb2, sampling_pb2

MESSAGES = (executor_pb2, inference_pb2, plan_pb2, sampling_pb2)
plain = st.characters(codec="utf-8", exclude_categories=["C", "Zl", "Zp"])


def within(kind, field):
    """Whatever a field of a message may hold: its bounds are those of the table."""
    message = next(getattr(module, kind) for module in MESSAGES if hasattr(module, kind))
    match TABLE[message][field]:
        case Whole(low, high):
            return st.integers(low, high)
        case Real(low, high):
            return st.floats(low, high, width=32)
        case TextLength(low, _, is_name):
            return st.text(plain if is_name else st.characters(codec="utf-8"), min_size=low, max_size=8)
        case Data(low, high):
            return st.binary(min_size=low, max_size=min(high, 8))
        case Column(high, _):
            return arrays(np.int32, st.integers(0, 4), elements=st.integers(0, high))
        case Floats(low, high, _):
            return st.floats(low, high, width=32)


tokens = st.integers(0, 2**31 - 1)
token_ids = st.lists(tokens, max_size=3).map(tuple)
sentences = st.text(plain, max_size=8)
logprobs = within("TokenLogprob", "logprob")
output_offsets = within("LogprobColumns", "offset")


def every_field(kind, of=None, **fields):
    """A strategy for a value; what is not named here is drawn as the message `of` the same name bounds it."""
    rest = {field.name for field in dataclasses.fields(kind)} - fields.keys()
    return st.builds(kind, **fields, **{name: within(of or kind.__name__, name) for name in rest})


def some(strategy):
    """Up to three values, as a tuple."""
    return st.lists(strategy, max_size=3).map(tuple)


def ascending(most):
    """Up to three sizes, each larger than the one before."""
    return st.sets(st.integers(1, most), max_size=3).map(lambda sizes: tuple(sorted(sizes)))


def optional(kind, field):
    """None where the field is not set."""
    return st.none() | within(kind, field)


@st.composite
def together(draw, kind):
    """Columns that have the same length, each within its bound."""
    length, bounds = draw(st.integers(0, 4)), TABLE[getattr(plan_pb2, kind.__name__)]
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(*(draw(arrays(np.int32, length, elements=st.integers(0, bounds[name].high))) for name in names))


record_ids = every_field(plan.RecordId)
finals = every_field(plan.FinalRelease, reason=st.sampled_from(plan.FinishReason))
blocks = st.integers(0, TABLE[plan_pb2.BlockTags]["block_ids"].high)
tags = some(st.tuples(blocks, st.binary(min_size=plan.KEY_BYTES, max_size=plan.KEY_BYTES))).map(plan.BlockTags.of)
biases = st.dictionaries(tokens, st.floats(-1e9, 1e9, width=32), max_size=3)
sampling = every_field(
    SamplingParams,
    logit_bias=biases.map(lambda biases: tuple(sorted(biases.items()))),
    allowed_token_ids=token_ids,
)
new_requests = every_field(
    plan.NewRequest,
    record_id=record_ids,
    sampling=sampling,
    end_token_ids=token_ids,
    num_logprobs=optional("NewRequest", "num_logprobs"),
    num_prompt_logprobs=optional("NewRequest", "num_prompt_logprobs"),
    bad_word_token_ids=some(token_ids),
    ignored_end_token_ids=token_ids,
    unsupported_fields=st.just(()),  # made when a message is read
    structured=st.builds(sampling_pb2.StructuredOutput, regex=st.text(max_size=8)).map(
        lambda form: form.SerializeToString(deterministic=True)
    ),
)
plans = every_field(
    plan.BatchPlan,
    tags=tags,
    releases=some(every_field(plan.Release, final=st.none() | finals)),
    forget=some(record_ids),
    copies=together(plan.BlockCopies),
    new_requests=some(new_requests),
    grants=together(plan.BlockGrants),
    shared=together(plan.BlockGrants),
    unsupported_fields=st.just(()),
)
hellos = every_field(
    plan.Hello,
    claim=every_field(plan.Claim, of="Hello"),
    protocols=every_field(
        ProtocolRange, lowest=within("Hello", "min_protocol"), highest=within("Hello", "max_protocol")
    ),
    takeover=st.booleans(),
)
holders = every_field(
    plan.Claim,
    term=within("WaitingInLine", "holder_term"),
    scheduler_id=within("WaitingInLine", "holder_scheduler_id"),
    address=within("WaitingInLine", "holder_address"),
)
heartbeats = every_field(plan.Heartbeat)


@st.composite
def logprob_columns(draw, num_tokens, offsets=output_offsets):
    """Log-probabilities of so many tokens, with 0 to 3 alternatives each."""
    shape = (draw(num_tokens), draw(st.integers(0, 3)))
    return plan.LogprobColumns(
        offset=draw(offsets),
        logprobs=draw(arrays(np.float32, shape[0], elements=logprobs)),
        top_token_ids=draw(arrays(np.int32, shape, elements=tokens)),
        top_logprobs=draw(arrays(np.float32, shape, elements=logprobs)),
    )


@st.composite
def row_logprobs(draw, rows, num_tokens, offsets):
    """Those of some tokens of a row."""
    told = draw(logprob_columns(num_tokens, offsets))
    return plan.RowLogprobs(draw(rows), draw(arrays(np.int32, told.num_tokens, elements=tokens)), told)


row_errors = every_field(
    plan.RowError,
    code=within("RequestError", "code"),
    reason=sentences,
    message=sentences,
    field=st.none() | sentences,
)


@st.composite
def results(draw):
    """A result whose columns add up, as a step of 0 to 4 rows may make it."""
    all_rows = within("RowError", "row")
    rows = draw(st.lists(all_rows, unique=True, max_size=4))
    counts = [draw(st.integers(0, 3)) for _ in rows]
    with_logprobs = [(row, n) for row, n in zip(rows, counts, strict=True) if n and draw(st.booleans())]
    num_drafts = st.integers(0, TABLE[plan_pb2.StepResult]["num_draft_tokens"].high)
    positions = within("RowPromptLogprobs", "position")
    fields = every_field(
        plan.StepResult,
        rows=st.just(np.array(rows, dtype=np.int32)),
        num_accepted=st.just(np.array(counts, dtype=np.int32)),
        token_ids=arrays(np.int32, sum(counts), elements=tokens),
        finishes=arrays(np.uint8, len(rows), elements=st.sampled_from([int(finish) for finish in plan.RowFinish])),
        timings=every_field(plan.StepTimings),
        logprobs=st.tuples(*(row_logprobs(st.just(row), st.just(n), st.just(0)) for row, n in with_logprobs)),
        errors=some(row_errors),
        prompt_logprobs=some(row_logprobs(all_rows, st.integers(1, 3), positions)),
        num_draft_tokens=arrays(np.int32, draw(st.sampled_from([0, len(rows)])), elements=num_drafts),
    )
    return draw(fields)


row_states = every_field(
    plan.RowState,
    record_id=record_ids,
    row=optional("RowState", "row"),
    finish=st.sampled_from(plan.RowFinish),
    released=st.none() | finals,
    sampling=st.none() | sampling,
    end_token_ids=token_ids,
    logprobs=st.none() | logprob_columns(st.integers(0, 3)),
    continues=st.booleans(),
)
defaults = every_field(
    GenerationDefaults,
    temperature=st.none() | st.floats(0, SAMPLING_RANGES["temperature"].high, width=32),
    top_p=st.none() | st.floats(0, 1, exclude_min=True, width=32),
    top_k=st.none() | st.integers(1, 2**31 - 1),  # 0 keeps all, and is sent as unset
    min_p=st.none() | st.floats(0, 1, width=32),
    repetition_penalty=st.none() | st.floats(0, SAMPLING_RANGES["repetition_penalty"].high, exclude_min=True, width=32),
)
models = every_field(
    plan.Model,
    end_token_ids=token_ids,
    has_chat_template=st.booleans(),
    default_sampling=defaults,
    has_dummy_weights=st.booleans(),
    num_ranks=st.integers(1, 64),  # 0 is 1
)
welcomes = every_field(
    plan.Welcome,
    model=models,
    geometry=every_field(plan.KvGeometry),
    limits=every_field(plan.ExecutorLimits),
    step_points=some(every_field(plan.StepPoint)),
    failed_step=st.none() | every_field(plan.FailedStep, message=sentences),
    graphs=st.none() | st.builds(plan.GraphSizes, ascending(2**13), ascending(2**20)),
)
TO_EXECUTOR = {plan.Hello: hellos, plan.Heartbeat: heartbeats, plan.BatchPlan: plans}
FROM_EXECUTOR = {
    plan.WaitingInLine: every_field(plan.WaitingInLine, holder=holders),
    plan.Welcome: welcomes,
    plan.SnapshotPart: every_field(plan.SnapshotPart, rows=some(row_states), tags=tags, num_parts=st.integers(0, 4096)),
    plan.StepResult: results(),
    plan.Heartbeat: heartbeats,
    # Whole nanoseconds: no finer time travels.
    plan.Drain: every_field(plan.Drain, reason=sentences, grace_s=st.integers(0, 2**20).map(lambda part: part / 512)),
}


def same(left, right):
    """Whether two values are alike in type and in everything they hold: arrays by dtype and elements, NaN like NaN."""
    if type(left) is not type(right):
        return False
    if dataclasses.is_dataclass(left):
        return all(same(getattr(left, field.name), getattr(right, field.name)) for field in dataclasses.fields(left))
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, np.ndarray):
        is_real = left.dtype.kind == "f"
        return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=is_real)
    return left == right or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


SAID = [
    *(pytest.param(encode_request, decode_request, TO_EXECUTOR[kind], id=kind.__name__) for kind in TO_EXECUTOR),
    *(
        pytest.param(encode_response, decode_response, FROM_EXECUTOR[kind], id=f"{kind.__name__} of an executor")
        for kind in FROM_EXECUTOR
    ),
]


def test_every_kind_of_message_is_said():
    assert set(TO_EXECUTOR) == set(typing.get_args(plan.ToExecutor))
    assert set(FROM_EXECUTOR) == set(typing.get_args(plan.FromExecutor))


@pytest.mark.parametrize(("encode", "decode", "messages"), SAID)
@given(data=st.data())
def test_what_is_said_arrives(encode, decode, messages, data):
    message = data.draw(messages)
    assert same(decode(encode(message)), [message])


@pytest.mark.parametrize(
    ("encode", "decode", "kind"),
    [(encode_request, decode_request, plans), (encode_response, decode_response, results())],
    ids=["plans", "results"],
)
@settings(max_examples=settings.default.max_examples // 4)
@given(data=st.data())
def test_plans_and_results_that_travel_together_arrive_in_order(encode, decode, kind, data):
    sent = data.draw(st.lists(kind, min_size=2, max_size=3))
    assert same(decode(encode(*sent)), sent)


def test_what_is_not_the_same_is_told_apart():
    assert not same(plan.Heartbeat(1, 2), plan.Heartbeat(1, 3))
    assert not same(plan.Heartbeat(1, 0), plan.WaitingInLine(plan.Claim(1, "s")))
    assert not same((1,), (1, 2))
    assert not same(np.zeros(1, np.int32), np.zeros(1, np.int64))
    assert not same(np.zeros(1, np.int32), np.zeros(2, np.int32))
    assert not same(plan.Claim(1, "s", "a:1"), plan.Claim(1, "s", "b:1"))
    assert same([float("nan"), 0.5], [float("nan"), 0.5])


def test_the_steady_state_stays_small():
    """256 decoding rows cost two columns and a few numbers, whatever these are; a sixteenth of them gets a block."""
    rows, ones = np.arange(256, dtype=np.int32), np.ones(256, dtype=np.int32)
    decodes = plan.BatchPlan(2**63, 2**40, 2**40, rows, ones, predicted_ns=10**7)
    few = plan.BlockGrants(rows[:16], rows[:16] + 2**14, rows[:16] + 2**30)

    assert len(encode_request(decodes)) <= 2 * 256 * 4 + 64
    assert len(encode_request(dataclasses.replace(decodes, grants=few))) <= 2 * 256 * 4 + 64 + 3 * 16 * 4 + 16


@st.composite
def damaged(draw, encoded):
    """Bytes of a message, of which a few were cut out, put in or changed in one to three places."""
    data = bytearray(draw(encoded))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        data[start : start + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(data)


def is_understood_or_refused(decode, data, kinds):
    """Whether bytes are messages of the protocol, or refused with the one error; any other error is raised."""
    with contextlib.suppress(MalformedError):
        messages = decode(data)
        return bool(messages) and all(isinstance(message, kinds) for message in messages)
    return True


@given(st.binary(max_size=64))
def test_no_bytes_do_harm(data):
    assert is_understood_or_refused(decode_request, data, plan.ToExecutor)
    assert is_understood_or_refused(decode_response, data, plan.FromExecutor)


@given(damaged(st.one_of(*TO_EXECUTOR.values()).map(encode_request)))
def test_a_damaged_request_is_understood_or_refused(data):
    assert is_understood_or_refused(decode_request, data, plan.ToExecutor)


@given(damaged(st.one_of(*FROM_EXECUTOR.values()).map(encode_response)))
def test_a_damaged_response_is_understood_or_refused(data):
    assert is_understood_or_refused(decode_response, data, plan.FromExecutor)

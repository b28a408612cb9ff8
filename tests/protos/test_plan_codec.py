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
from paceline.plan.codec.columns import MalformedError
from paceline.plan.codec.welcomes import HIGHEST

int32s = st.integers(-(2**31), 2**31 - 1)
uint32s = st.integers(0, 2**32 - 1)
uint64s = st.integers(0, 2**64 - 1)
floats = st.floats(width=32)
names = st.text(max_size=8)
columns = arrays(np.int32, st.integers(0, 4), elements=int32s)
token_ids = st.lists(int32s, max_size=3).map(tuple)


def every_field(kind, **fields):
    """A strategy for a value; one that leaves a field out would never show that the field gets lost."""
    assert fields.keys() == {field.name for field in dataclasses.fields(kind)}, kind
    return st.builds(kind, **fields)


def some(strategy):
    """Up to three values, as a tuple."""
    return st.lists(strategy, max_size=3).map(tuple)


def together(kind, num_columns):
    """Columns that have the same length."""
    cells = arrays(np.int32, st.tuples(st.just(num_columns), st.integers(0, 4)), elements=int32s)
    return cells.map(lambda cells: kind(*cells))


record_ids = every_field(plan.RecordId, tenant=names, request_id=names, index=uint32s)
finals = every_field(plan.FinalRelease, num_output_tokens=uint32s, reason=st.sampled_from(plan.FinishReason))
tags = some(st.tuples(int32s, st.binary(min_size=plan.KEY_BYTES, max_size=plan.KEY_BYTES))).map(plan.BlockTags.of)
sampling = every_field(
    plan.SamplingParams,
    temperature=floats,
    top_k=int32s,
    top_p=floats,
    min_p=floats,
    seed=uint64s,
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    logit_bias=st.dictionaries(int32s, floats, max_size=3).map(lambda biases: tuple(sorted(biases.items()))),
    allowed_token_ids=token_ids,
)
new_requests = every_field(
    plan.NewRequest,
    row=uint32s,
    record_id=record_ids,
    attempt=uint32s,
    prompt_token_ids=columns,
    output_token_ids=columns,
    num_cached_tokens=uint32s,
    sampling=sampling,
    end_token_ids=token_ids,
    max_tokens=uint32s,
    num_logprobs=st.none() | uint32s,
    context=st.binary(max_size=8),
    min_tokens=uint32s,
    num_prompt_logprobs=st.none() | uint32s,
    bad_word_token_ids=some(token_ids),
    ignored_end_token_ids=token_ids,
    unsupported_fields=st.just(()),  # made when a message is read
)
plans = every_field(
    plan.BatchPlan,
    incarnation=uint64s,
    epoch=uint64s,
    step_id=uint64s,
    rows=columns,
    num_scheduled_tokens=columns,
    predicted_ns=uint64s,
    tags=tags,
    releases=some(every_field(plan.Release, row=uint32s, final=st.none() | finals)),
    forget=some(record_ids),
    copies=together(plan.BlockCopies, 2),
    new_requests=some(new_requests),
    grants=together(plan.BlockGrants, 3),
    shared=together(plan.BlockGrants, 3),
    num_draft_tokens=columns,
    unsupported_fields=st.just(()),
)
claims = every_field(plan.Claim, term=uint64s, scheduler_id=names, address=names)
hellos = every_field(
    plan.Hello,
    claim=claims,
    protocols=every_field(plan.ProtocolRange, lowest=uint32s, highest=uint32s),
    takeover=st.booleans(),
    tag_key_digest=st.binary(max_size=16),
)
heartbeats = every_field(plan.Heartbeat, running_step_id=uint64s, running_ns=uint64s)


@st.composite
def logprob_columns(draw, num_tokens, offsets=uint32s):
    """Log-probabilities of so many tokens, with 0 to 3 alternatives each."""
    shape = (draw(num_tokens), draw(st.integers(0, 3)))
    return plan.LogprobColumns(
        offset=draw(offsets),
        logprobs=draw(arrays(np.float32, shape[0], elements=floats)),
        top_token_ids=draw(arrays(np.int32, shape, elements=int32s)),
        top_logprobs=draw(arrays(np.float32, shape, elements=floats)),
    )


@st.composite
def row_logprobs(draw, rows, num_tokens, offsets):
    """Those of some tokens of a row."""
    told = draw(logprob_columns(num_tokens, offsets))
    return plan.RowLogprobs(draw(rows), draw(arrays(np.int32, told.num_tokens, elements=int32s)), told)


timings = every_field(
    plan.StepTimings,
    waited_ns=uint64s,
    prepare_ns=uint64s,
    forward_ns=uint64s,
    sample_ns=uint64s,
    idle_ns=uint64s,
)
row_errors = every_field(plan.RowError, row=uint32s, code=int32s, reason=names, message=names, field=st.none() | names)


@st.composite
def results(draw):
    """A result whose columns add up, as a step of 0 to 4 rows may make it."""
    rows = draw(st.lists(st.integers(0, 2**31 - 1), unique=True, max_size=4))
    counts = [draw(st.integers(0, 3)) for _ in rows]
    with_logprobs = [(row, n) for row, n in zip(rows, counts, strict=True) if n and draw(st.booleans())]
    fields = every_field(
        plan.StepResult,
        incarnation=uint64s,
        epoch=uint64s,
        step_id=uint64s,
        rows=st.just(np.array(rows, dtype=np.int32)),
        num_accepted=st.just(np.array(counts, dtype=np.int32)),
        token_ids=arrays(np.int32, sum(counts), elements=int32s),
        finishes=arrays(np.uint8, len(rows), elements=st.sampled_from([int(finish) for finish in plan.RowFinish])),
        grant_hash=uint64s,
        timings=timings,
        logprobs=st.tuples(*(row_logprobs(st.just(row), st.just(n), st.just(0)) for row, n in with_logprobs)),
        errors=some(row_errors),
        prompt_logprobs=some(row_logprobs(uint32s, st.integers(1, 3), uint32s)),
        num_draft_tokens=arrays(np.int32, draw(st.sampled_from([0, len(rows)])), elements=int32s),
    )
    return draw(fields)


row_states = every_field(
    plan.RowState,
    record_id=record_ids,
    row=st.none() | uint32s,
    attempt=uint32s,
    prompt_token_ids=columns,
    output_token_ids=columns,
    num_computed_tokens=uint32s,
    block_ids=columns,
    finish=st.sampled_from(plan.RowFinish),
    released=st.none() | finals,
    max_tokens=uint32s,
    sampling=st.none() | sampling,
    end_token_ids=token_ids,
    context=st.binary(max_size=8),
    logprobs=st.none() | logprob_columns(st.integers(0, 3)),
    continues=st.booleans(),
)
defaults = every_field(
    plan.GenerationDefaults,
    temperature=st.none() | st.floats(0, plan.MAX_TEMPERATURE, width=32),
    top_p=st.none() | st.floats(0, 1, exclude_min=True, width=32),
    top_k=st.none() | st.integers(1, 2**31 - 1),  # 0 keeps all, and is sent as unset
    min_p=st.none() | st.floats(0, 1, width=32),
    repetition_penalty=st.none() | st.floats(0, plan.MAX_REPETITION_PENALTY, exclude_min=True, width=32),
)
models = every_field(
    plan.Model,
    name=names,
    architecture=names,
    max_model_len=uint32s,
    vocab_size=uint32s,
    num_parameters=uint64s,
    quantization=names,
    end_token_ids=token_ids,
    has_chat_template=st.booleans(),
    default_sampling=defaults,
)


def size(name):
    """A bound or size of an executor as its welcome may name it."""
    return st.integers(1, HIGHEST[name])


welcomes = every_field(
    plan.Welcome,
    incarnation=uint64s,
    epoch=uint64s,
    protocol=uint32s,
    model=models,
    geometry=every_field(
        plan.KvGeometry,
        num_blocks=size("num_blocks"),
        block_size=size("block_size"),
        bytes_per_block=uint64s,
        dtype=names,
    ),
    limits=every_field(
        plan.ExecutorLimits,
        max_num_rows=size("max_num_rows"),
        max_num_batched_tokens=size("max_num_batched_tokens"),
        max_model_len=size("max_model_len"),
        max_plans_in_flight=size("max_plans_in_flight"),
    ),
    tag_key=st.binary(min_size=1, max_size=64),
    tokenizer_digest=names,
    step_points=some(every_field(plan.StepPoint, num_tokens=uint32s, duration_ns=uint64s)),
    failed_step=st.none() | every_field(plan.FailedStep, epoch=uint64s, step_id=uint64s, message=names),
)
TO_EXECUTOR = {plan.Hello: hellos, plan.Heartbeat: heartbeats, plan.BatchPlan: plans}
FROM_EXECUTOR = {
    plan.WaitingInLine: every_field(plan.WaitingInLine, holder=claims),
    plan.Welcome: welcomes,
    plan.SnapshotPart: every_field(plan.SnapshotPart, rows=some(row_states), tags=tags, last=st.booleans()),
    plan.StepResult: results(),
    plan.Heartbeat: heartbeats,
    # Whole nanoseconds: no finer time travels.
    plan.Drain: every_field(plan.Drain, reason=names, grace_s=st.integers(0, 2**20).map(lambda part: part / 512)),
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


def kind_name(kind):
    """How a kind of value is called in the name of a test."""
    return kind.__name__


@pytest.mark.parametrize("kind", typing.get_args(plan.ToExecutor), ids=kind_name)
@given(data=st.data())
def test_what_a_scheduler_says_arrives(kind, data):
    """Every field of every message, whatever it holds."""
    message = data.draw(TO_EXECUTOR[kind])
    assert same(decode_request(encode_request(message)), [message])


@pytest.mark.parametrize("kind", typing.get_args(plan.FromExecutor), ids=kind_name)
@given(data=st.data())
def test_what_an_executor_says_arrives(kind, data):
    """Every field of every message, whatever it holds."""
    message = data.draw(FROM_EXECUTOR[kind])
    assert same(decode_response(encode_response(message)), [message])


@settings(max_examples=settings.default.max_examples // 4)
@given(st.lists(plans, min_size=2, max_size=3))
def test_plans_that_travel_together_arrive_in_order(sent):
    """As if each had come alone."""
    assert same(decode_request(encode_request(*sent)), sent)


@settings(max_examples=settings.default.max_examples // 4)
@given(st.lists(results(), min_size=2, max_size=3))
def test_results_that_travel_together_arrive_in_order(sent):
    """As if each had come alone."""
    assert same(decode_response(encode_response(*sent)), sent)


def test_what_is_not_the_same_is_told_apart():
    """The comparison of these tests looks at dtypes, lengths and types."""
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
    """What is no message is refused, and there is one error for that."""
    assert is_understood_or_refused(decode_request, data, plan.ToExecutor)
    assert is_understood_or_refused(decode_response, data, plan.FromExecutor)


@given(damaged(st.one_of(*TO_EXECUTOR.values()).map(encode_request)))
def test_a_damaged_request_is_understood_or_refused(data):
    """Whatever happened to it on the way."""
    assert is_understood_or_refused(decode_request, data, plan.ToExecutor)


@given(damaged(st.one_of(*FROM_EXECUTOR.values()).map(encode_response)))
def test_a_damaged_response_is_understood_or_refused(data):
    """Whatever happened to it on the way."""
    assert is_understood_or_refused(decode_response, data, plan.FromExecutor)

"""Every field of the plan protocol has its bound, and what is beyond it is refused by the name of the field.

Walks the descriptors, so that a field which is added without a bound fails here.
"""

import math
import re

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message_factory import GetMessageClass

from paceline.plan.codec import decode_request, decode_response
from paceline.plan.codec.bound_kinds import (
    Column,
    Data,
    Floats,
    Inside,
    Many,
    Pairs,
    Real,
    Span,
    Text,
    Unread,
    Whole,
)
from paceline.plan.codec.bounds import (
    MAX_INFO_BYTES,
    MAX_PART_BYTES,
    MAX_RESPONSE_BYTES,
    TABLE,
    BoundError,
    check,
)
from paceline.plan.codec.columns import ColumnError, MalformedError
from paceline.plan.codec.welcomes import decode_info
from paceline.plan.texts import MAX_SENTENCE_BYTES, readable
from paceline.v1 import executor_pb2, inference_pb2, plan_pb2, sampling_pb2

ROOTS = (
    plan_pb2.AttachRequest,
    plan_pb2.AttachResponse,
    executor_pb2.GetInfoResponse,
    executor_pb2.GetTokenizerResponse,
)
LEFT = (plan_pb2.RequestContext, inference_pb2.PhaseTimes)  # by one scheduler for the next
LONG = 1 << 20  # longer ones do not fit into a part of a snapshot
WIDEST = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_BOOL: (0, 1),
}


def reachable(descriptor, path=()):
    """All fields that a message holds, with the way to each."""
    for field in descriptor.fields:
        yield (*path, field)
        inner = field.message_type
        if inner is not None and inner.full_name != Duration.DESCRIPTOR.full_name and not inner.GetOptions().map_entry:
            yield from reachable(inner, (*path, field))


PATHS = [path for root in ROOTS for path in reachable(root.DESCRIPTOR)]


def name_of(path):
    """How a field is called from its message on."""
    return ".".join([path[0].containing_type.name, *(field.name for field in path)])


def bound_of(field):
    """The line of a field in the table."""
    return TABLE[GetMessageClass(field.containing_type)][field.name]


def test_every_field_has_a_bound():
    """A new one fails here until it has one; and no line is of a field that is gone."""
    kinds = {kind.DESCRIPTOR.full_name for kind in LEFT} | {path[-1].containing_type.full_name for path in PATHS}
    assert {kind.DESCRIPTOR.full_name for kind in TABLE} == kinds
    for kind, bounds in TABLE.items():
        assert list(bounds) == [field.name for field in kind.DESCRIPTOR.fields], kind.DESCRIPTOR.name


def test_only_what_is_random_may_be_anything():
    """A number that means something has a bound below its type's."""
    unbounded = {
        path[-1].name
        for path in PATHS
        if isinstance(bound := bound_of(path[-1]), Whole) and (bound.low, bound.high) == (0, 2**64 - 1)
    }
    assert unbounded == {"incarnation", "seed", "grant_hash", "id"}


def column(*values):
    """A column as it travels."""
    return np.array(values, dtype="<i4").tobytes()


def floats(*values):
    """A column of floats."""
    return np.array(values, dtype="<f4").tobytes()


def just_above(value):
    """The next float that a message can hold."""
    return float(np.nextafter(np.float32(value), np.float32(math.inf)))


def just_below(value):
    """The float before."""
    return float(np.nextafter(np.float32(value), np.float32(-math.inf)))


def real_values(low, high):
    """Those within a range, and those beyond it."""
    beyond = [math.nan, math.inf, just_above(high), 3e38]
    below = [] if math.isinf(low) else [-math.inf, just_below(low), -3e38]
    return [low, high], beyond + below


def examples(field):
    """What a field may just hold, and what it may not: just beyond, far beyond, negative, no number."""
    bound = bound_of(field)
    match bound:
        case Whole(low, high):
            lowest, highest = WIDEST[field.cpp_type]
            candidates = [high + 1, highest, low - 1, lowest, 0]
            wrong = [v for v in candidates if lowest <= v <= highest and not low <= v <= high]
            return [low, high], [value for value in wrong if value or not field.has_presence]
        case Real(low, high):
            return real_values(low, high)
        case Text(low, high, is_name):
            controls = ["\x1b[31m", "a\nb", "\x9b"] if is_name else []
            return ["x" * low, "x" * high, "ö" * (high // 2)], ["x" * (high + 1), "ö" * high, *controls, *[""] * low]
        case Data(low, high):
            return [bytes(low), bytes(min(high, LONG))], [bytes(high + 1), *[b""] * low]
        case Column(high, _) if field.cpp_type == FieldDescriptor.CPPTYPE_INT32:  # many of them become a column
            return [0, high], [-1, -(2**31)]
        case Floats(low, high, _) if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
            return real_values(low, high)
        case Column(high, at_most):
            wrong = [column(-1), column(0, -(2**31))] + ([column(high + 1)] if high < 2**31 - 1 else [])
            return [column(0, high)], wrong + ([bytes(4 * (at_most + 1))] if at_most < 2**24 else [])
        case Floats(low, high, _):
            within, beyond = real_values(low, high)
            return [floats(*within)], [floats(value) for value in beyond]
        case Many(at_most, None):
            return [1], [at_most + 1]
        case Many(at_most, each):
            inner = examples_of_each(each)
            return [inner[0]], [*([value] for value in inner[1]), [inner[0][0]] * (at_most + 1)]
        case Pairs(at_most, key, value):
            good = dict.fromkeys(range(at_most), value.high)
            return [good], [dict.fromkeys(range(at_most + 1), 0.0), {-1: 0.0}, {1: math.nan}, {key.high: math.inf}]
        case Span(seconds):
            wrong = [(seconds + 1, 0), (-1, 0), (2**63 - 1, 0), (0, -1), (0, 2**31 - 1)]
            return [Duration(seconds=seconds)], [Duration(seconds=s, nanos=n) for s, n in wrong]
        case Inside() | Unread():
            return [], []


def examples_of_each(bound):
    """Values of a list."""
    match bound:
        case Whole(low, high):
            return [low, high], [high + 1 if high < 2**31 - 1 else -1]
        case Text(_, high):
            return ["x", "x" * high], ["x" * (high + 1)]


def field_kind(field):
    """The message that a field holds."""
    return GetMessageClass(field.message_type)


def put(message, field, value):
    """Set a field of whatever kind; a number for a list of messages is how many."""
    if isinstance(bound_of(field), Many):
        if bound_of(field).each is None:
            getattr(message, field.name).extend([sound(field_kind(field))] * value)
        else:
            getattr(message, field.name).extend(value)
    elif isinstance(bound_of(field), Pairs):
        getattr(message, field.name).update(value)
    elif isinstance(bound_of(field), Span):
        getattr(message, field.name).CopyFrom(value)
    else:
        setattr(message, field.name, value)


def sound(kind):
    """A message that lacks nothing that is needed."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        match TABLE[kind][field.name]:
            case Whole(low, _) if low > 0:
                setattr(message, field.name, low)
            case Text(low, _) if low > 0:
                setattr(message, field.name, "x")
            case Data(low, _) if low > 0:
                setattr(message, field.name, bytes(low))
            case Inside(is_needed=True):
                getattr(message, field.name).CopyFrom(sound(field_kind(field)))
    return message


def with_value(path, value):
    """A sound message of the protocol, but for one field that holds this."""
    message = whole = sound(GetMessageClass(path[0].containing_type))
    for field in path[:-1]:
        inner = sound(field_kind(field))
        if field.is_repeated:
            getattr(message, field.name).append(inner)
            message = getattr(message, field.name)[0]
        else:
            getattr(message, field.name).CopyFrom(inner)
            message = getattr(message, field.name)
    put(message, path[-1], value)
    return whole


def read(message):
    """Read a message as whoever gets it does; what is no column of a sound whole is no matter here."""
    data = message.SerializeToString()
    match message:
        case plan_pb2.AttachRequest():
            decode_request(data)
        case plan_pb2.AttachResponse():
            decode_response(data)
        case executor_pb2.GetInfoResponse():
            decode_info(data)
        case _:
            check(message)


def refusal_of(message):
    """The bound that a message breaks."""
    try:
        read(message)
    except BoundError as error:
        return error
    except MalformedError:
        return None  # in another way: columns of different length
    return None


@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_what_is_beyond_its_bound_is_refused_by_name(path):
    """And what is just within is not."""
    within, beyond = examples(path[-1])
    for value in within:
        assert refusal_of(with_value(path, value)) is None, value
    for value in beyond:
        refusal = refusal_of(with_value(path, value))
        assert refusal is not None, value
        assert refusal.field.split(".")[-1] == path[-1].name or refusal.field == "message"
        assert str(refusal).startswith(refusal.field)
        assert len(str(refusal)) < 300


def test_a_refusal_names_the_way_to_the_field_and_the_bound():
    """A sentence for whoever has to find out."""
    welcome = sound(plan_pb2.Welcome)
    welcome.geometry.num_blocks = 2**26
    with pytest.raises(BoundError, match=r"^geometry\.num_blocks is 67108864, not 1 to 4194304$") as refusal:
        decode_response(plan_pb2.AttachResponse(welcome=welcome).SerializeToString())
    assert refusal.value.field == "geometry.num_blocks"
    hello = plan_pb2.Hello(scheduler_id="x", term=2**63 - 1)
    with pytest.raises(BoundError, match=re.escape(f"hello.term is {2**63 - 1}, not 1 to {2**48}")):
        decode_request(plan_pb2.AttachRequest(hello=hello).SerializeToString())


@pytest.mark.parametrize("left_out", ["model", "geometry", "limits"])
def test_what_is_needed_cannot_be_left_out(left_out):
    """Zeros are no executor."""
    welcome = sound(plan_pb2.Welcome)
    welcome.ClearField(left_out)
    with pytest.raises(BoundError, match=rf"^{left_out}\."):
        decode_response(plan_pb2.AttachResponse(welcome=welcome).SerializeToString())


def test_a_column_that_is_none_is_refused_as_that():
    """Five bytes hold no value that could be beyond a bound."""
    with pytest.raises(ColumnError):
        decode_request(plan_pb2.AttachRequest(plan=plan_pb2.BatchPlan(rows=b"\xff" * 5)).SerializeToString())


@pytest.mark.parametrize(
    ("decode", "message", "size"),
    [
        (
            decode_response,
            plan_pb2.AttachResponse(snapshot=plan_pb2.SnapshotPart(rows=[plan_pb2.RowState(context=bytes(1024))])),
            MAX_PART_BYTES,
        ),
        (decode_response, plan_pb2.AttachResponse(result=plan_pb2.StepResult(finishes=b"x")), MAX_RESPONSE_BYTES),
        (decode_info, executor_pb2.GetInfoResponse(version="v"), MAX_INFO_BYTES),
    ],
    ids=["a part of a snapshot", "a result", "who it is"],
)
def test_a_message_that_is_too_long_is_not_even_parsed(decode, message, size):
    """Parsed it may take a hundred times its length."""
    once = message.SerializeToString()
    with pytest.raises(BoundError, match="message has"):
        decode(once * (size // len(once) + 1))


def test_a_sentence_is_one_line_that_can_be_shown():
    """Whatever a terminal would make of it; nobody reads a megabyte."""
    assert readable("\x1b[31mred\x1b[0m\nand\tmore \u202eback") == " [31mred [0m and more  back"
    assert readable("naïve ☃") == "naïve ☃"
    long = readable("ö" * 10**6)
    assert len(long.encode()) <= MAX_SENTENCE_BYTES
    assert long.endswith("ö…")


def test_sentences_of_a_peer_are_made_readable():
    """Of a drain, a failed step, a failed row; the writer keeps to their length."""
    drain = inference_pb2.Drain(reason="\x1b]0;title\x07 bye")
    (read_drain,) = decode_response(plan_pb2.AttachResponse(drain=drain).SerializeToString())
    welcome = sound(plan_pb2.Welcome)
    welcome.failed_step.message = "bell \x07"
    (read_welcome,) = decode_response(plan_pb2.AttachResponse(welcome=welcome).SerializeToString())
    error = sampling_pb2.RequestError(message="esc \x1b")
    failed = plan_pb2.StepResult(errors=[plan_pb2.RowError(error=error)])
    (result,) = decode_response(plan_pb2.AttachResponse(result=failed).SerializeToString())
    assert read_drain.reason == " ]0;title  bye"
    assert read_welcome.failed_step.message == "bell  "
    assert result.errors[0].message == "esc  "

"""Every field of the plan protocol has its bound, and what is beyond it is refused by the name of the field.

Walks the descriptors, so that a field which is added without a bound fails here.
"""

import re

import pytest

from paceline.plan.codec import decode_request, decode_response
from paceline.plan.codec.bound_kinds import Column, Floats, Whole
from paceline.plan.codec.bounds import MAX_INFO_BYTES, MAX_PART_BYTES, MAX_RESPONSE_BYTES, TABLE, BoundError, check
from paceline.plan.codec.columns import ColumnError, MalformedError
from paceline.plan.codec.welcomes import decode_info
from paceline.plan.texts import MAX_SENTENCE_BYTES, readable
from paceline.v1 import executor_pb2, inference_pb2, plan_pb2, sampling_pb2
from rogues.lies import bound_of, name_of, paths, sound, values_beyond, values_within, with_value

ROOTS = (
    plan_pb2.AttachRequest,
    plan_pb2.AttachResponse,
    executor_pb2.GetInfoResponse,
    executor_pb2.GetTokenizerResponse,
)
LEFT = (plan_pb2.RequestContext, inference_pb2.PhaseTimes)  # by one scheduler for the next
BOUNDED = {kind.DESCRIPTOR.full_name for kind in TABLE}
PATHS = [path for root in ROOTS for path in paths(root.DESCRIPTOR)]
# But for the request, which is checked as a client's.
LEFT_PATHS = [
    path
    for path in paths(plan_pb2.RequestContext.DESCRIPTOR)
    if all(field.containing_type.full_name in BOUNDED for field in path)
]


def each(paths):
    """A case of each path; what lies deep in plans and results that travel together lies in one that travels alone."""
    is_again = [path[0].name in ("plans", "results") and len(path) > 3 for path in paths]
    return [
        pytest.param(path, marks=[pytest.mark.slow] if again else [], id=name_of(path))
        for path, again in zip(paths, is_again, strict=True)
    ]


# But for those in what this version refuses or leaves unread.
LATER = {"imports", "exports", "prompt_logprobs"}
COLUMNS = [
    path
    for path in PATHS
    if path[-1].type == path[-1].TYPE_BYTES
    and (isinstance(bound_of(path[-1]), Column | Floats) or path[-1].name == "keys")
    and not LATER & {field.name for field in path}
]


def test_every_field_has_a_bound():
    kinds = {kind.DESCRIPTOR.full_name for kind in LEFT} | {path[-1].containing_type.full_name for path in PATHS}
    assert {kind.DESCRIPTOR.full_name for kind in TABLE} == kinds
    assert {path[-1].containing_type.full_name for path in LEFT_PATHS} >= {kind.DESCRIPTOR.full_name for kind in LEFT}
    for kind, bounds in TABLE.items():
        assert set(bounds) == set(kind.DESCRIPTOR.fields_by_name), kind.DESCRIPTOR.name


def test_only_what_is_random_may_be_anything():
    unbounded = {
        path[-1].name
        for path in PATHS
        if isinstance(bound := bound_of(path[-1]), Whole) and (bound.low, bound.high) == (0, 2**64 - 1)
    }
    assert unbounded == {"incarnation", "seed", "grant_hash", "id"}


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


@pytest.mark.parametrize("path", each([*PATHS, *LEFT_PATHS]))
def test_what_is_beyond_its_bound_is_refused_by_name(path):
    for value in values_within(path[-1]):
        assert refusal_of(with_value(path, value)) is None, value
    for value in values_beyond(path[-1]):
        refusal = refusal_of(with_value(path, value))
        assert refusal is not None, value
        assert name_of(path).endswith(f".{refusal.field}") or refusal.field == "message"
        assert str(refusal).startswith(refusal.field)
        assert len(str(refusal)) < 300


def test_a_refusal_names_the_way_to_the_field_and_the_bound():
    welcome = sound(plan_pb2.Welcome)
    welcome.geometry.num_blocks = 2**26
    with pytest.raises(BoundError, match=r"^geometry\.num_blocks is 67108864, must be 1 to 4194304$") as refusal:
        decode_response(plan_pb2.AttachResponse(welcome=welcome).SerializeToString())
    assert refusal.value.field == "geometry.num_blocks"
    hello = plan_pb2.Hello(scheduler_id="x", term=2**63 - 1)
    with pytest.raises(BoundError, match=re.escape(f"hello.term is {2**63 - 1}, must be 1 to {2**48}")):
        decode_request(plan_pb2.AttachRequest(hello=hello).SerializeToString())


@pytest.mark.parametrize("left_out", ["model", "geometry", "limits"])
def test_what_is_needed_cannot_be_left_out(left_out):
    welcome = sound(plan_pb2.Welcome)
    welcome.ClearField(left_out)
    with pytest.raises(BoundError, match=rf"^{left_out}\."):
        decode_response(plan_pb2.AttachResponse(welcome=welcome).SerializeToString())


@pytest.mark.parametrize("path", each(COLUMNS))
def test_a_column_that_ends_inside_a_value_is_refused_by_name(path):
    """Five bytes hold no value that could be beyond a bound."""
    with pytest.raises(ColumnError) as refusal:
        read(with_value(path, b"\xff" * 5))
    assert name_of(path).endswith(f".{refusal.value.field}")


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

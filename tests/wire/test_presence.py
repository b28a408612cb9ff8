"""Presence on the wire: a field set to zero is not an unset field, and what a peer does not know is kept."""

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from paceline.v1.inference_pb2 import GenerateRequest, RequestState
from paceline.v1.plan_pb2 import BatchPlan, NewRequest, RequestContext, RowState
from paceline.v1.sampling_pb2 import OutputOptions, SamplingParams, StoppingParams


def scalar_fields(message):
    """The singular fields of a message type that are neither messages nor maps."""
    return [
        field
        for field in message.DESCRIPTOR.fields
        if not field.is_repeated and field.type != FieldDescriptor.TYPE_MESSAGE
    ]


def round_trip(message):
    """The message as the other side reads it."""
    return type(message).FromString(message.SerializeToString())


def test_a_temperature_of_zero_is_not_an_unset_temperature():
    greedy = round_trip(SamplingParams(temperature=0.0))
    unset = round_trip(SamplingParams())
    assert greedy.HasField("temperature")
    assert not unset.HasField("temperature")
    assert greedy.temperature == unset.temperature == 0.0


@pytest.mark.parametrize("message", [SamplingParams, StoppingParams, OutputOptions], ids=lambda m: m.__name__)
def test_every_scalar_parameter_of_a_request_has_presence(message):
    assert [field.name for field in scalar_fields(message) if not field.has_presence] == []


@pytest.mark.parametrize("field", scalar_fields(SamplingParams), ids=lambda field: field.name)
def test_a_parameter_set_to_zero_arrives_as_set(field):
    sent = SamplingParams()
    setattr(sent, field.name, 0)
    assert round_trip(sent).HasField(field.name)


def test_row_zero_is_a_row_and_no_row_is_none():
    """A record without a place on the device has no row, not row 0."""
    assert round_trip(RowState(row=0)).HasField("row")
    assert not round_trip(RowState()).HasField("row")


def test_an_offset_of_zero_asks_for_everything():
    """resume_from = 0 is a resume; unset is not."""
    assert round_trip(GenerateRequest(resume_from=0)).HasField("resume_from")
    assert not round_trip(GenerateRequest()).HasField("resume_from")


def test_zero_logprobs_asks_for_the_drawn_token_only():
    """num_logprobs = 0 returns the drawn token's log-probability; unset returns none."""
    assert round_trip(NewRequest(num_logprobs=0)).HasField("num_logprobs")
    assert not round_trip(NewRequest()).HasField("num_logprobs")


def test_exactly_one_prompt_is_kept():
    """The last prompt set wins, as oneof promises."""
    request = GenerateRequest(text="a")
    request.token_ids.ids.append(7)
    assert round_trip(request).WhichOneof("prompt") == "token_ids"


def test_fields_of_a_newer_peer_survive_a_round_through_an_older_one():
    unknown = b"\xfa\x7f\x03new"  # field 2047, three bytes
    newer = GenerateRequest(request_id="r", tenant="t").SerializeToString() + unknown
    older = RequestContext()
    older.request.MergeFromString(newer)
    assert round_trip(older).request.SerializeToString().endswith(unknown)


def test_an_enum_value_of_a_newer_peer_arrives_as_its_number():
    """Unknown values are neither lost nor taken for another value."""
    unknown = 77
    assert unknown not in RequestState.values()
    assert round_trip(RowState(finish=unknown)).finish == unknown


def test_a_truncated_message_is_an_error_and_not_a_shorter_message():
    """What was cut off inside a field is never taken for a plan."""
    whole = BatchPlan(step_id=1, rows=b"\x01\x00\x00\x00").SerializeToString()
    with pytest.raises(DecodeError):
        BatchPlan.FromString(whole[:-1])

"""Messages on the wire: what is unset is told from zero, what a newer peer added is kept, errors are Google's."""

import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.descriptor import FieldDescriptor
from google.rpc.status_pb2 import Status

from paceline.v1.inference_pb2 import GenerateRequest
from paceline.v1.plan_pb2 import NewRequest, RequestContext
from paceline.v1.sampling_pb2 import ErrorDetail, OutputOptions, RequestError, SamplingParams, StoppingParams


def scalar_fields(message):
    """The singular fields of a message type that are neither messages nor maps."""
    return [
        field
        for field in message.DESCRIPTOR.fields
        if not field.is_repeated and field.type != FieldDescriptor.TYPE_MESSAGE
    ]


@pytest.mark.parametrize("message", [SamplingParams, StoppingParams, OutputOptions], ids=lambda m: m.__name__)
def test_every_scalar_parameter_of_a_request_has_presence(message):
    """So that a temperature of zero is not an unset temperature."""
    assert [field.name for field in scalar_fields(message) if not field.has_presence] == []


def test_an_offset_of_zero_is_a_resume_and_zero_logprobs_are_those_of_the_drawn_token():
    assert GenerateRequest.DESCRIPTOR.fields_by_name["resume_from"].has_presence
    assert NewRequest.DESCRIPTOR.fields_by_name["num_logprobs"].has_presence


def test_fields_of_a_newer_peer_survive_a_round_through_an_older_one():
    unknown = b"\xfa\x7f\x03new"  # field 2047, three bytes
    newer = GenerateRequest(request_id="r", tenant="t").SerializeToString() + unknown
    older = RequestContext()
    older.request.MergeFromString(newer)
    returned = RequestContext.FromString(older.SerializeToString())
    assert returned.request.SerializeToString().endswith(unknown)


@pytest.mark.parametrize(("ours", "theirs"), [(RequestError, Status), (ErrorDetail, Any)])
def test_our_error_types_have_the_fields_of_googles(ours, theirs):
    """They are our own only so that the protos compile without any others. Number, type and multiplicity of every
    field decide about compatibility on the wire.
    """
    mine, googles = (
        {field.number: (field.name, field.type, field.is_repeated) for field in message.DESCRIPTOR.fields}
        for message in (ours, theirs)
    )
    assert mine == googles

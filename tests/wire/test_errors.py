"""Errors on the wire: the failure of one request inside a message reads as a google.rpc.Status."""

import pytest
from google.protobuf.any_pb2 import Any
from google.rpc.code_pb2 import INVALID_ARGUMENT
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from google.rpc.status_pb2 import Status

from paceline.v1.sampling_pb2 import ErrorDetail, RequestError


def fields(message):
    """Number, type and multiplicity of every field, which is what decides about compatibility on the wire."""
    return {field.number: (field.name, field.type, field.is_repeated) for field in message.DESCRIPTOR.fields}


@pytest.mark.parametrize(("ours", "theirs"), [(RequestError, Status), (ErrorDetail, Any)])
def test_our_error_types_have_the_fields_of_googles(ours, theirs):
    """They are our own only so that the protos compile without any others."""
    assert fields(ours) == fields(theirs)


def test_a_status_with_details_arrives_as_a_request_error_and_back():
    status = Status(code=INVALID_ARGUMENT, message="top_p must be above 0")
    info = ErrorInfo(reason="FIELD_OUT_OF_RANGE", domain="paceline", metadata={"field": "sampling.top_p"})
    bad_request = BadRequest(
        field_violations=[BadRequest.FieldViolation(field="sampling.top_p", description="above 0")]
    )
    for detail in (info, bad_request):
        status.details.add().Pack(detail)

    error = RequestError.FromString(status.SerializeToString())
    returned = Status.FromString(error.SerializeToString())

    assert error.details[0].type_url == "type.googleapis.com/google.rpc.ErrorInfo"
    assert ErrorInfo.FromString(error.details[0].value) == info
    assert returned == status

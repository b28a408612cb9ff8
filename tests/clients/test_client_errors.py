"""Every status becomes the error that the tree names, with what its details say."""

import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2

import paceline_client
from paceline_client import errors
from paceline_client.errors import FieldViolation, PacelineError, error_from_status

EXPECTED = {
    "CANCELLED": errors.RequestCancelledError,
    "UNKNOWN": errors.ServerError,
    "INVALID_ARGUMENT": errors.InvalidRequestError,
    "DEADLINE_EXCEEDED": errors.RequestTimeoutError,
    "NOT_FOUND": errors.NotFoundError,
    "ALREADY_EXISTS": errors.ConflictError,
    "PERMISSION_DENIED": errors.AccessDeniedError,
    "UNAUTHENTICATED": errors.AccessDeniedError,
    "RESOURCE_EXHAUSTED": errors.OverloadedError,
    "FAILED_PRECONDITION": errors.InvalidRequestError,
    "ABORTED": errors.ConflictError,
    "OUT_OF_RANGE": errors.InvalidRequestError,
    "UNIMPLEMENTED": errors.UnsupportedError,
    "INTERNAL": errors.ServerError,
    "UNAVAILABLE": errors.UnavailableError,
    "DATA_LOSS": errors.ServerError,
}


def packed(message):
    """A detail as it travels."""
    detail = Any()
    detail.Pack(message)
    return detail


@pytest.mark.parametrize("name", [name for name in code_pb2.Code.keys() if name != "OK"])  # noqa: SIM118
def test_every_status_has_its_error(name):
    error = error_from_status(code_pb2.Code.Value(name), "why")
    assert type(error) is EXPECTED[name]
    assert str(error) == "why"


def test_details_become_attributes():
    violation = error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="above 1")
    error = error_from_status(
        code_pb2.RESOURCE_EXHAUSTED,
        "full",
        [
            packed(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000))),
            packed(error_details_pb2.BadRequest(field_violations=[violation])),
            packed(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", metadata={"num_queued": "8"})),
        ],
    )
    assert error.retry_after == 1.5
    assert error.reason == "QUEUE_FULL"
    assert error.metadata == {"num_queued": "8"}
    assert error.violations == (FieldViolation("sampling.top_p", "above 1"),)


def test_details_that_cannot_be_read_do_not_hide_the_status():
    """Garbage, and kinds nobody knows, are passed over."""
    garbage = Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff\xff")
    unknown = Any(type_url="type.googleapis.com/example.Other", value=b"")
    error = error_from_status(code_pb2.NOT_FOUND, "gone", [garbage, unknown])
    assert isinstance(error, errors.NotFoundError)
    assert error.reason is None


def test_a_slow_consumer_is_told_apart_from_a_full_queue():
    """Both are RESOURCE_EXHAUSTED; only one helps to wait for."""
    details = [packed(error_details_pb2.ErrorInfo(reason="SLOW_CONSUMER", domain="paceline"))]
    assert type(error_from_status(code_pb2.RESOURCE_EXHAUSTED, "read faster", details)) is errors.SlowConsumerError


def test_a_status_without_a_message_still_says_something():
    """An empty error line helps nobody."""
    assert "13" in str(error_from_status(13, ""))


def test_every_error_is_exported_and_drawn():
    kinds = {
        name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, PacelineError)
    }
    for name in kinds:
        assert hasattr(paceline_client, name)
        assert name in (errors.__doc__ or "")

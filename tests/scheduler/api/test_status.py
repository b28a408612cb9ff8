"""Errors as statuses: a code, a reason, the field, and when to come back; nothing of what is not ours."""

import inspect
from urllib.parse import quote

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo

from edge_rig.refusals import details_of
from paceline.plan.values import Claim
from paceline.process.statuses import rpc_status, trailing_metadata
from paceline_scheduler import errors
from paceline_scheduler.api import status

REFUSALS_AND_FAILURES = [
    (errors.InvalidRequestError("sampling.top_p", "is 2"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
    (errors.PromptTooLongError("prompt", "x"), grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG"),
    (errors.UnsupportedError("sampling.n"), grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED"),
    (errors.DuplicateRequestError("x"), grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST"),
    (
        errors.InvalidFormError("STRUCTURED_MALFORMED", "structured.regex", "x"),
        grpc.StatusCode.INVALID_ARGUMENT,
        "STRUCTURED_MALFORMED",
    ),
    (errors.StaleAttachmentError("x"), grpc.StatusCode.ABORTED, "STALE_ATTACHMENT"),
    (errors.SupersededError("x"), grpc.StatusCode.ABORTED, "STALE_ATTACHMENT"),
    (errors.ResumeMismatchError("x"), grpc.StatusCode.FAILED_PRECONDITION, "RESUME_MISMATCH"),
    (errors.QuarantinedError("x"), grpc.StatusCode.INTERNAL, "EXECUTORS_DIED"),
    (errors.UnknownRequestError("x"), grpc.StatusCode.NOT_FOUND, "UNKNOWN_REQUEST"),
    (errors.UnknownModelError("x"), grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
    (errors.UnknownExecutorError("x"), grpc.StatusCode.NOT_FOUND, "UNKNOWN_EXECUTOR"),
    (errors.ExecutorLeavingError("x"), grpc.StatusCode.FAILED_PRECONDITION, "EXECUTOR_LEAVING"),
    (errors.QueueFullError("x", 0.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    (errors.TenantLimitError("x", 0.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_LIMIT"),
    (errors.UnauthenticatedError("x"), grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    (errors.TokenRevokedError("x"), grpc.StatusCode.UNAUTHENTICATED, "TOKEN_REVOKED"),
    (errors.PermissionDeniedError("x"), grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"),
    (errors.NoRecordDirError("x"), grpc.StatusCode.FAILED_PRECONDITION, "NO_RECORD_DIR"),
    (errors.TooManyWatchersError("x"), grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHERS"),
    (errors.NoExecutorError("x", 0.5), grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR"),
    (errors.StandbyError(Claim(7, "a", "host:1"), 0.5), grpc.StatusCode.UNAVAILABLE, "STANDBY"),
    (errors.DrainingError("x", 0.5), grpc.StatusCode.UNAVAILABLE, "DRAINING"),
    (errors.DeadlineExceededError("x"), grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    (errors.ExecutorFailedError("x", "NAN"), grpc.StatusCode.INTERNAL, "EXECUTOR_FAILED"),
    (errors.StepFailedError("x"), grpc.StatusCode.INTERNAL, "STEP_FAILED"),
    (errors.FormTooCostlyError("x"), grpc.StatusCode.INVALID_ARGUMENT, "STRUCTURED_FAILED"),
    (errors.NoTokenLeftError("x"), grpc.StatusCode.FAILED_PRECONDITION, "NO_TOKEN_LEFT"),
    (errors.NoLongerServedError("x"), grpc.StatusCode.FAILED_PRECONDITION, "NO_LONGER_SERVED"),
    (errors.OutageError("m", 60.0), grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR"),
    (errors.DeadlineUnreachableError("x"), grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_UNREACHABLE"),
    (errors.SlowConsumerError("x"), grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER"),
    (errors.GivenUpError("x", 0.5), grpc.StatusCode.UNAVAILABLE, "GIVEN_UP"),
    (errors.DivergenceError("x"), grpc.StatusCode.INTERNAL, "DIVERGENCE"),
]


def details(error):
    """The google.rpc details of an error, by kind, as a client unpacks them."""
    return details_of(trailing_metadata(status.describe(error)))


@pytest.mark.parametrize(("error", "code", "reason"), REFUSALS_AND_FAILURES)
def test_every_error_has_a_code_and_a_reason(error, code, reason):
    described = status.describe(error)
    info = details(error)[ErrorInfo]
    assert (described.code, described.message) == (code, str(error))
    assert (info.reason, info.domain) == (reason, "paceline")


@pytest.mark.parametrize(
    ("address", "named"), [("host:1", {"active_address": "host:1", "active_term": "7"}), ("", {"active_term": "7"})]
)
def test_who_is_sent_to_another_scheduler_is_told_where_it_is_if_that_is_known(address, named):
    active = Claim(7, "a", address)
    for error in (errors.StandbyError(active, 0.5), errors.GivenUpError("x", 0.5, active)):
        assert dict(details(error)[ErrorInfo].metadata) == named


def test_no_error_that_a_client_may_meet_is_left_out():
    bases = {errors.RequestRefusedError, errors.RequestFailedError, errors.RetryableRefusalError}
    met = (errors.RequestRefusedError, errors.RequestFailedError)
    tree = {kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, met)}
    assert tree - bases <= {type(error) for error, _, _ in REFUSALS_AND_FAILURES}


def test_a_wrong_field_is_named_for_programs_and_people():
    error = errors.InvalidRequestError("sampling.top_p", "is 2, must be above 0 and at most 1")
    (violation,) = details(error)[BadRequest].field_violations
    assert (violation.field, violation.description) == ("sampling.top_p", "is 2, must be above 0 and at most 1")
    assert details(error)[ErrorInfo].metadata == {"field": "sampling.top_p"}
    assert "sampling.top_p" in status.describe(error).message


def test_an_unsupported_feature_names_itself():
    assert details(errors.UnsupportedError("sampling.n"))[ErrorInfo].metadata == {"feature": "sampling.n"}


@pytest.mark.parametrize(
    "kind", [errors.QueueFullError, errors.NoExecutorError, errors.DrainingError, errors.GivenUpError]
)
def test_a_refusal_that_may_not_last_says_when_to_come_back(kind):
    error = kind("x", 0.5)
    delays_ms = set()
    for described in (status.describe(error) for _ in range(50)):
        pushback_ms = int(dict(trailing_metadata(described))["grpc-retry-pushback-ms"])
        packed = rpc_status(described).details[1]
        assert RetryInfo.FromString(packed.value).retry_delay.ToMilliseconds() == pytest.approx(pushback_ms, abs=1)
        delays_ms.add(pushback_ms)
    assert 400 <= min(delays_ms) < 500 < max(delays_ms) <= 600


def test_when_to_come_back_is_drawn_from_the_chance_that_is_given():
    error = errors.QueueFullError("x", 0.5)
    delays_s = [status.describe(error, iter((drawn,)).__next__).retry_after_s for drawn in (0.0, 0.5, 1.0)]
    assert delays_s == pytest.approx([0.4, 0.5, 0.6])


def test_a_lasting_refusal_says_nothing_of_coming_back():
    error = errors.InvalidRequestError("text", "is empty")
    assert RetryInfo not in details(error)
    assert "grpc-retry-pushback-ms" not in dict(trailing_metadata(status.describe(error)))


def test_an_unexpected_exception_shows_nothing_of_itself():
    described = status.describe(KeyError("secret"))
    assert described.code is grpc.StatusCode.INTERNAL
    assert "secret" not in str(rpc_status(described))


@pytest.mark.parametrize("letter", ["x", "é", "\U0010ffff", "%", "\ud800"])
def test_a_text_of_any_length_makes_a_status_that_grpc_can_carry(letter):
    """Headers of more than 8 KiB are refused on the way, and the client would learn nothing at all."""
    long = letter * 1_000_000
    for error in (errors.UnknownExecutorError(long), errors.InvalidRequestError(long, long)):
        described = status.describe(error)
        carried = len(quote(described.message)) + sum(len(value) * 4 // 3 for _, value in trailing_metadata(described))
        assert carried < 8 * 1024
        assert described.message.endswith("…")


def test_a_text_is_cut_between_characters_and_only_if_it_is_long():
    assert status.cut("é" * 64, 128) == "é" * 64
    assert status.cut("é" * 65, 128) == "é" * 64 + "…"
    assert status.cut("x" + "é" * 64, 128) == "x" + "é" * 63 + "…"

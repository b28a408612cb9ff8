"""From the executor's errors to google.rpc statuses: the one place where codes are chosen.

An ErrorInfo always says the reason, for programs.
"""

from google.rpc import code_pb2, error_details_pb2, status_pb2

from paceline_executor import errors

_DOMAIN = "paceline"
_CODES: dict[type[errors.ExecutorError], "code_pb2.Code"] = {
    errors.NotReadyError: code_pb2.UNAVAILABLE,
    errors.DrainingError: code_pb2.UNAVAILABLE,
    errors.UnsupportedCallError: code_pb2.UNIMPLEMENTED,
    errors.MalformedMessageError: code_pb2.INVALID_ARGUMENT,
    errors.NotAllowedError: code_pb2.PERMISSION_DENIED,
    errors.AttachError: code_pb2.INVALID_ARGUMENT,
    errors.ProtocolError: code_pb2.FAILED_PRECONDITION,
    errors.TermSupersededError: code_pb2.FAILED_PRECONDITION,
    errors.TooManySchedulersError: code_pb2.RESOURCE_EXHAUSTED,
    errors.EpochEndedError: code_pb2.ABORTED,
    errors.StepWedgedError: code_pb2.UNAVAILABLE,
    errors.StaleEpochError: code_pb2.FAILED_PRECONDITION,
    errors.PlanOrderError: code_pb2.DATA_LOSS,
    errors.TooManyPlansError: code_pb2.RESOURCE_EXHAUSTED,
    errors.PlanError: code_pb2.INVALID_ARGUMENT,
    errors.UnsupportedPlanError: code_pb2.UNIMPLEMENTED,
    errors.StepFailedError: code_pb2.INTERNAL,
}


def status_of(error: errors.ServiceError | errors.RequestError) -> status_pb2.Status:
    """For a request it names the field at fault."""
    metadata = error.metadata if isinstance(error, errors.ServiceError) else {}
    code = error.code if isinstance(error, errors.RequestError) else _CODES.get(type(error), code_pb2.INTERNAL)
    status = status_pb2.Status(code=code, message=str(error))
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=_DOMAIN, metadata=metadata))
    if isinstance(error, errors.RequestError) and error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    return status


def internal_status() -> status_pb2.Status:
    """A bug in this program shows no details."""
    status = status_pb2.Status(code=code_pb2.INTERNAL, message="internal error; see the executor's log")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="INTERNAL", domain=_DOMAIN))
    return status

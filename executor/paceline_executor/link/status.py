"""From the executor's errors to google.rpc statuses: the one place where codes are chosen.

An ErrorInfo always says the reason, for programs.
"""

import grpc

from paceline.process.statuses import ErrorStatus
from paceline_executor import errors

_INTERNAL = "internal error; see the executor's log"
_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}
_CODES: dict[type[errors.ExecutorError], grpc.StatusCode] = {
    errors.NotReadyError: grpc.StatusCode.UNAVAILABLE,
    errors.DrainingError: grpc.StatusCode.UNAVAILABLE,
    errors.ProfileRunningError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.NoStepsError: grpc.StatusCode.UNAVAILABLE,
    errors.MalformedMessageError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotAllowedError: grpc.StatusCode.PERMISSION_DENIED,
    errors.AttachError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ProtocolError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TermSupersededError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.TooManySchedulersError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.EpochEndedError: grpc.StatusCode.ABORTED,
    errors.StepWedgedError: grpc.StatusCode.UNAVAILABLE,
    errors.StaleEpochError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PlanOrderError: grpc.StatusCode.DATA_LOSS,
    errors.TooManyPlansError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.PlanError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnsupportedPlanError: grpc.StatusCode.UNIMPLEMENTED,
    errors.StepFailedError: grpc.StatusCode.INTERNAL,
}


def describe(error: BaseException) -> ErrorStatus:
    """For a request it names the field at fault. A bug in this program shows no details."""
    sentence = str(error)
    match error:
        case errors.RequestError():
            field_errors = () if error.field is None else ((error.field, sentence),)
            return ErrorStatus(_BY_NUMBER[error.code], error.reason, sentence, field_errors=field_errors)
        case errors.ServiceError():
            code = _CODES.get(type(error), grpc.StatusCode.INTERNAL)
            return ErrorStatus(code, error.reason, sentence, error.metadata)
    return ErrorStatus(grpc.StatusCode.INTERNAL, "INTERNAL", _INTERNAL)

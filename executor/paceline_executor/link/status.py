"""From the executor's errors to statuses: what one tells beside its code and reason."""

import grpc

from paceline.process.statuses import ErrorStatus
from paceline_executor.errors import RequestError, ServiceError

_INTERNAL = "internal error; see the executor's log"


def describe(error: BaseException) -> ErrorStatus:
    """For a request it names the field at fault. A bug in this program shows no details."""
    if not isinstance(error, ServiceError | RequestError):
        return ErrorStatus(grpc.StatusCode.INTERNAL, "INTERNAL", _INTERNAL)
    code, sentence = grpc.StatusCode[error.code.name], str(error)
    if isinstance(error, ServiceError):
        return ErrorStatus(code, error.reason, sentence, error.metadata)
    field_errors = () if error.field is None else ((error.field, sentence),)
    return ErrorStatus(code, error.reason, sentence, field_errors=field_errors)

"""What an error is to whoever is told of it: a code of gRPC, and a reason for programs. Knows no gRPC."""

import enum
from typing import ClassVar


class Code(enum.IntEnum):
    """Those of google.rpc.Code that errors have, which are gRPC's."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class CodedError(Exception):
    """A class that names no code or reason has those of its base."""

    code: ClassVar[Code] = Code.INTERNAL
    reason: str = "INTERNAL"

    def __init_subclass__(cls, *, code: Code | None = None, reason: str | None = None) -> None:
        if code is not None:
            cls.code = code
        if reason is not None:
            cls.reason = reason

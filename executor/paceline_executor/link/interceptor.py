"""The executor's outermost interceptor: who may not call is refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from google.protobuf.message import DecodeError

from paceline.process.callers import Role, caller_of
from paceline.process.log_bounds import OPERATOR
from paceline.process.rpc import Call, CallGuard
from paceline.process.statuses import ErrorStatus
from paceline_executor.errors import MalformedMessageError, NotAllowedError, RequestError, ServiceError
from paceline_executor.link import status

Rules = Callable[[str], frozenset[Role] | None]
"""Who may call `/package.Service/Method`; None: anybody."""

_log = structlog.get_logger(__name__)


class CallInterceptor(CallGuard):
    """Without `rules` anybody may call."""

    expected = (ServiceError, RequestError)

    def __init__(self, bytes_methods: frozenset[str] = frozenset(), rules: Rules = lambda _: None) -> None:
        super().__init__(bytes_methods)
        self._rules = rules

    @contextmanager
    def admitted(self, call: Call) -> Iterator[None]:
        allowed, method = self._rules(call.method), call.method
        if allowed is not None:
            caller = caller_of(call.context)
            if not caller.roles & allowed:
                _log.warning("call_refused", method=method, caller=caller.name, peer=call.context.peer())
                needed = " or ".join(sorted(f"paceline://{role.value}" for role in allowed))
                raise NotAllowedError(f"this call needs a certificate with the URI {needed}", {"method": method})
            if Role.OPERATOR in caller.roles:
                _log.info("operator_call", method=method, caller=caller.name, by=OPERATOR)
        yield

    def malformed(self, error: DecodeError) -> MalformedMessageError:
        return MalformedMessageError(f"the request is no message of this call: {error}")

    def describe(self, error: BaseException) -> ErrorStatus:
        return status.describe(error)

"""Who may make which call: the caller's token or certificate, the roles that a method asks for, the caller's tenant.

What has no rule is denied. Refuses to know where tokens come from.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from paceline.process.callers import ANYBODY, NOBODY, Caller, Role, caller_of
from paceline.process.log_bounds import OPERATOR
from paceline.process.rpc import OPEN_TO_ALL, Context
from paceline.process.trace_ids import trace_fields
from paceline_scheduler.errors import (
    PermissionDeniedError,
    SchedulerError,
    TenantLimitError,
    TokenRevokedError,
    UnauthenticatedError,
)

_METADATA_KEY, _SCHEME = "authorization", "bearer "
# Their modules take long to import, and this is needed before the ports open.
_INFERENCE, _ADMIN = "/paceline.v1.InferenceService/", "/paceline.v1.AdminService/"
_STREAMS = frozenset({f"{_INFERENCE}Generate", f"{_INFERENCE}Session"})
_RETRY_S = 1.0
# These show nobody's prompts or outputs. Operators have no tenant.
_ALSO_OF_OPERATORS = frozenset(_INFERENCE + name for name in ("Cancel", "Explain", "GetModel", "ListModels"))

_CALLER: ContextVar[Caller] = ContextVar("caller", default=NOBODY)

_log = structlog.get_logger(__name__)


class FoundToken(Protocol):
    """`digest` names it when it is revoked."""

    @property
    def digest(self) -> bytes: ...

    @property
    def caller(self) -> Caller: ...


@dataclass(eq=False, slots=True)
class _Call:
    """Ends when its token is revoked."""

    task: "asyncio.Task[Any]"
    is_revoked: bool = False


class Access:
    """`find` knows tokens by their secrets, `max_num_streams` how many calls of Generate and Session a tenant may have
    open. Without tokens and certificates, anybody may call.
    """

    def __init__(
        self,
        find: Callable[[str], FoundToken | None] | None = None,
        *,
        has_certificates: bool = False,
        max_num_streams: Callable[[str], int | None] = lambda _: None,
        on_refusal: Callable[[SchedulerError], None] = lambda _: None,
    ) -> None:
        self._find = find
        self._has_certificates = has_certificates
        self._max_num_streams = max_num_streams
        self._on_refusal = on_refusal  # of unread requests and sessions
        self._calls: dict[bytes, set[_Call]] = {}
        self._num_streams: Counter[str] = Counter()

    @contextmanager
    def admitted(self, method: str, context: Context) -> Iterator[None]:
        """Raises UnauthenticatedError, PermissionDeniedError; and TokenRevokedError out of a call whose token is
        removed meanwhile.
        """
        if self._is_open(method):
            _CALLER.set(ANYBODY)
            yield
            return
        caller = NOBODY
        try:
            found = self._token(context)
            certified = caller_of(context) if self._has_certificates else NOBODY
            caller = _joined(found.caller if found else NOBODY, certified)
            _check(method, caller)
        except (UnauthenticatedError, PermissionDeniedError) as error:
            self._refused(method, context, caller, error)
            raise
        _CALLER.set(caller)
        with self._counted(method, context, caller), self._until_revoked(found):
            yield

    def _refused(self, method: str, context: Context, caller: Caller, error: SchedulerError) -> None:
        trace = trace_fields(next(_metadata(context, "traceparent"), ""))
        _log.info("call_refused", method=method, caller=caller.name, peer=context.peer(), error=str(error), **trace)
        if method in _STREAMS:
            self._on_refusal(error)

    def revoke(self, digests: frozenset[bytes]) -> None:
        for call in [call for digest in digests for call in self._calls.get(digest, ())]:
            call.is_revoked = True
            call.task.cancel()

    def _is_open(self, method: str) -> bool:
        return (self._find is None and not self._has_certificates) or method.startswith(OPEN_TO_ALL)

    def _token(self, context: Context) -> FoundToken | None:
        if self._find is None:
            return None
        values = (value for value in _metadata(context, _METADATA_KEY) if value.lower().startswith(_SCHEME))
        shown = next(values, None)
        if shown is None:
            return None
        found = self._find(shown[len(_SCHEME) :].strip())
        if found is None:
            raise UnauthenticatedError("this token is not known here, or not any more; ask for a new one")
        return found

    @contextmanager
    def _counted(self, method: str, context: Context, caller: Caller) -> Iterator[None]:
        tenant = caller.tenant
        if tenant is None or method not in _STREAMS:
            yield
            return
        at_most = self._max_num_streams(tenant)
        if at_most is not None and self._num_streams[tenant] >= at_most:
            error = TenantLimitError(
                f"this tenant has {self._num_streams[tenant]} calls open, its limit is {at_most}", _RETRY_S
            )
            self._refused(method, context, caller, error)
            raise error
        self._num_streams[tenant] += 1
        try:
            yield
        finally:
            self._num_streams[tenant] -= 1
            if not self._num_streams[tenant]:
                del self._num_streams[tenant]

    @contextmanager
    def _until_revoked(self, found: FoundToken | None) -> Iterator[None]:
        if found is None:
            yield
            return
        task, digest = asyncio.current_task(), found.digest
        assert task is not None, "gRPC runs each call in a task"
        call = _Call(task)
        self._calls.setdefault(digest, set()).add(call)
        try:
            yield
        except asyncio.CancelledError:
            if call.is_revoked and task.uncancel() == 0:
                raise TokenRevokedError("the token of this call was revoked; resume with another one") from None
            raise
        finally:
            self._calls[digest].discard(call)
            if not self._calls[digest]:
                del self._calls[digest]


def caller() -> Caller:
    return _CALLER.get()


def audited(by: Caller) -> dict[str, str]:
    """For log lines that say who changed what others use."""
    return {"by": OPERATOR, "caller": by.name}


def tenant_of(named: str, by: Caller) -> str:
    """The caller's own if the message names none. Raises PermissionDeniedError."""
    if by is ANYBODY:
        return named
    if by.tenant is None or named not in ("", by.tenant):
        raise PermissionDeniedError("tenant: is not the tenant of this token or certificate; leave it unset")
    return by.tenant


def any_tenant_of(named: str, by: Caller) -> str:
    """Operators name any tenant."""
    is_free = Role.OPERATOR in by.roles and (named or by.tenant is None)
    return named if is_free else tenant_of(named, by)


def _joined(one: Caller, other: Caller) -> Caller:
    """Has the roles of both; of two tenants it has none."""
    tenants = {caller.tenant for caller in (one, other) if caller.tenant is not None}
    roles = one.roles | other.roles
    return Caller(
        name=" ".join(filter(None, (one.name, other.name))),
        roles=roles if len(tenants) < 2 else roles - {Role.CLIENT},
        tenant=tenants.pop() if len(tenants) == 1 else None,
    )


def _check(method: str, caller: Caller) -> None:
    if not caller.roles:
        raise UnauthenticatedError(
            "who calls is not known: send 'authorization: Bearer TOKEN' as metadata, or show a certificate with a role"
        )
    if method in _ALSO_OF_OPERATORS:
        allowed = {Role.CLIENT, Role.OPERATOR}
    elif method.startswith(_INFERENCE):
        allowed = {Role.CLIENT}
    elif method.startswith(_ADMIN):
        allowed = {Role.OPERATOR}
    else:
        allowed = set()
    if not caller.roles & allowed:
        raise PermissionDeniedError(f"{method} is not for this caller; it may be for an operator, or a tenant's client")


def _metadata(context: Context, name: str) -> Iterator[str]:
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str):
            yield value

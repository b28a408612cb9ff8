"""The tokens that callers prove themselves by: their hashes in a file, read again when it changes.

Refuses to know calls: who hears of a removed token is told so.
"""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import structlog

from paceline.process.callers import Caller, Role
from paceline.process.small_files import PATIENCE_S, read_small_file
from paceline_scheduler.access.tenant_limits import MAX_LIMIT, NO_LIMITS, TenantBounds, TenantLimits
from paceline_scheduler.errors import TokenFileError

RELOAD_S = 1.0
_PATIENCE_S = 2.0  # of the disk, later; a stop waits for it
_MAX_BYTES = 16 << 20
_MAX_NAME_BYTES = 128
_HASH_FORM = "sha256:"
_NUM_FINDING_BYTES = 4
_TEXTS = ("hash", "name", "tenant", "role")
_LIMITS = tuple(field.name for field in fields(TenantLimits))
_ANY_TENANT, _SHARE = "any_tenant", "max_kv_share"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Token:
    """`digest` is its SHA-256."""

    digest: bytes
    caller: Caller
    limits: TenantLimits | None = None  # of its tenant, if its line says any


class TokenFile:
    """Raises TokenFileError if it cannot be read now; later the tokens stay."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data: bytes | None = None
        self._tokens: dict[bytes, list[Token]] = {}  # by the first bytes of their digests
        self._listeners: list[Callable[[frozenset[bytes]], None]] = []
        self._bounds_listeners: list[Callable[[TenantBounds], None]] = []
        found = self._read_if_changed(PATIENCE_S)
        assert found is not None, "nothing was read yet"
        self._tokens, self.bounds = _by_first_bytes(found.tokens), found.bounds

    def find(self, secret: str) -> Token | None:
        digest = hashlib.sha256(secret.encode(errors="replace")).digest()
        # A secret is 256 random bits: its first bytes help nobody to guess the rest of the hash, which is compared in
        # constant time.
        candidates = self._tokens.get(digest[:_NUM_FINDING_BYTES], ())
        return next((token for token in candidates if hmac.compare_digest(token.digest, digest)), None)

    def on_change(self, listener: Callable[[frozenset[bytes]], None]) -> None:
        """With the digests of tokens that are gone, or mean somebody else now."""
        self._listeners.append(listener)

    def on_other_bounds(self, listener: Callable[[TenantBounds], None]) -> None:
        """When the file says others than before."""
        self._bounds_listeners.append(listener)

    async def watch(self) -> NoReturn:
        """Whenever it has changed."""
        last_error = ""
        while True:
            await asyncio.sleep(RELOAD_S)
            try:
                found = await asyncio.to_thread(self._read_if_changed, _PATIENCE_S)
            except TokenFileError as error:
                if str(error) != last_error:
                    _log.error("tokens_not_read", error=str(error), hint="the tokens read before stay valid")
                last_error = str(error)
                continue
            last_error = ""
            if found is not None:
                self._replace(found)

    def _replace(self, found: "TokenLines") -> None:
        before = {token.digest: token.caller for tokens in self._tokens.values() for token in tokens}
        now = {token.digest: token.caller for token in found.tokens}
        self._tokens = _by_first_bytes(found.tokens)
        removed = frozenset(digest for digest, caller in before.items() if now.get(digest) != caller)
        _log.info("tokens_read", num_tokens=len(now), num_removed=len(removed))
        for listener in self._listeners:
            listener(removed)
        if found.bounds != self.bounds:
            self.bounds = found.bounds
            for of_bounds in self._bounds_listeners:
                of_bounds(found.bounds)

    def _read_if_changed(self, patience_s: float) -> "TokenLines | None":
        try:
            data = read_small_file(self._path, _MAX_BYTES, patience_s)
            if data == self._data:
                return None
            tokens = parse_tokens(data.decode())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise TokenFileError(f"--tokens: cannot read {self._path}: {reason}") from error
        except TokenFileError as error:
            raise TokenFileError(f"--tokens: {self._path}: {error}") from None
        self._data = data
        return tokens


@dataclass(frozen=True, slots=True)
class TokenLines:
    tokens: tuple[Token, ...]
    bounds: TenantBounds


def parse_tokens(text: str) -> TokenLines:
    """Reads one JSON object for each line. Raises TokenFileError."""
    tokens: dict[bytes, Token] = {}
    limits: dict[str | None, TenantLimits] = {}
    any_tenant: TenantLimits | None = None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            if isinstance(found, dict) and found.keys() == {_ANY_TENANT}:
                if any_tenant is not None:
                    raise TokenFileError(f"{_ANY_TENANT} stands in a line above")
                any_tenant = _read_limits(found[_ANY_TENANT], _ANY_TENANT)
                continue
            token = _token(found)
            if token.digest in tokens:
                raise TokenFileError("the hash is that of a line above")
        except (TokenFileError, ValueError, RecursionError) as error:
            raise TokenFileError(f"line {number}: {error}") from None
        tokens[token.digest] = token
        known = limits.setdefault(token.caller.tenant, token.limits) if token.limits else None
        if known != token.limits:
            raise TokenFileError(f"line {number}: limits differ from those of this tenant above")
    own = {token.caller.tenant or "": token.limits for token in tokens.values() if token.limits}
    return TokenLines(tuple(tokens.values()), TenantBounds(own, any_tenant or NO_LIMITS))


def _token(line: object) -> Token:
    if not isinstance(line, dict):
        raise TokenFileError("has to be a JSON object")
    if unknown := sorted(line.keys() - {*_TEXTS, "limits"}):
        known = f"{', '.join(_TEXTS)} and limits, or {_ANY_TENANT} alone"
        raise TokenFileError(f"{unknown[0]!r} is not known; there are {known}")
    if wrong := [name for name in _TEXTS if not isinstance(line.get(name, ""), str)]:
        raise TokenFileError(f"{wrong[0]} has to be a text")
    digest = _digest(line.get("hash", ""))
    role, tenant = _role_and_tenant(line)
    name = line.get("name") or f"token {digest.hex()[:8]}"
    if len(name.encode()) > _MAX_NAME_BYTES:
        raise TokenFileError(f"name has more than {_MAX_NAME_BYTES} bytes")
    roles = {role} if tenant is None else {role, Role.CLIENT}
    return Token(digest, Caller(name, frozenset(roles), tenant), _limits(line.get("limits", {}), tenant))


def _limits(line: object, tenant: str | None) -> TenantLimits | None:
    limits = _read_limits(line, "limits")
    if limits != NO_LIMITS and tenant is None:
        raise TokenFileError("limits are of a tenant, and there is none")
    return None if limits == NO_LIMITS else limits


def _read_limits(line: object, what: str) -> TenantLimits:
    if not isinstance(line, dict):
        raise TokenFileError(f"{what} has to be a JSON object")
    for name, value in line.items():
        if name not in _LIMITS:
            raise TokenFileError(f"{what}: {name!r} is not known; there are {', '.join(_LIMITS)}")
        if name == _SHARE:
            if type(value) not in (int, float) or not 0 < value <= 1:
                raise TokenFileError(f"{what}: {name} has to be a number above 0 and at most 1")
        elif type(value) is not int or not 1 <= value <= MAX_LIMIT:
            raise TokenFileError(f"{what}: {name} has to be a number from 1 to {MAX_LIMIT}")
    return TenantLimits(**line)


def _digest(text: str) -> bytes:
    digits = text.removeprefix(_HASH_FORM)
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        digest = b""
    if digits == text or len(digest) != hashlib.sha256().digest_size:
        raise TokenFileError(f"hash has to be {_HASH_FORM} and the 64 hexadecimal digits of the token's SHA-256")
    return digest


def _role_and_tenant(fields: Mapping[str, Any]) -> tuple[Role, str | None]:
    role, tenant = fields.get("role", Role.CLIENT.value), fields.get("tenant")
    if role not in (Role.CLIENT.value, Role.OPERATOR.value):
        raise TokenFileError(f"role is {role!r}, has to be client or operator")
    if tenant is None and role == Role.CLIENT.value:
        raise TokenFileError("tenant is missing")
    if tenant is not None and not 1 <= len(tenant.encode()) <= _MAX_NAME_BYTES:
        raise TokenFileError(f"tenant has to have 1 to {_MAX_NAME_BYTES} bytes")
    return Role(role), tenant


def _by_first_bytes(tokens: Iterable[Token]) -> dict[bytes, list[Token]]:
    found: dict[bytes, list[Token]] = {}
    for token in tokens:
        found.setdefault(token.digest[:_NUM_FINDING_BYTES], []).append(token)
    return found

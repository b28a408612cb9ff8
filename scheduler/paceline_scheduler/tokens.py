"""The tokens that callers prove themselves by: their hashes in a file, read again when it changes.

Knows the file's form. Refuses to know calls: who hears of a removed token is told so.
"""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import structlog

from paceline.process.callers import Caller, Role
from paceline_scheduler.errors import TokenFileError

RELOAD_S = 1.0
_MAX_BYTES = 16 << 20
_MAX_NAME_BYTES = 128
_HASH_FORM = "sha256:"
_NUM_FINDING_BYTES = 4
_FIELDS = frozenset({"hash", "name", "tenant", "role"})

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Token:
    """Who has a token, by its SHA-256."""

    digest: bytes
    caller: Caller


class TokenFile:
    """The tokens of a file. Raises TokenFileError if it cannot be read now; if that happens later, the tokens stay."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._tokens: dict[bytes, list[Token]] = {}  # by the first bytes of their digests
        self._listeners: list[Callable[[frozenset[bytes]], None]] = []
        found = self._read_if_changed()
        assert found is not None, "nothing was read yet"
        self._tokens = _by_first_bytes(found)

    def find(self, secret: str) -> Token | None:
        """Return whose secret this is."""
        digest = hashlib.sha256(secret.encode(errors="replace")).digest()
        # A secret is 256 random bits, so its first bytes help nobody to guess the rest of the hash, nor a fast hash to
        # guess it; the rest is compared in constant time.
        candidates = self._tokens.get(digest[:_NUM_FINDING_BYTES], ())
        return next((token for token in candidates if hmac.compare_digest(token.digest, digest)), None)

    def on_removed(self, listener: Callable[[frozenset[bytes]], None]) -> None:
        """Have a function called with the digests of tokens that are gone, or mean somebody else now."""
        self._listeners.append(listener)

    async def watch(self) -> NoReturn:
        """Read the file again whenever it has changed."""
        last_error = ""
        while True:
            await asyncio.sleep(RELOAD_S)
            try:
                found = await asyncio.to_thread(self._read_if_changed)
            except TokenFileError as error:
                if str(error) != last_error:
                    _log.error("tokens_not_read", error=str(error), hint="the tokens read before stay valid")
                last_error = str(error)
                continue
            last_error = ""
            if found is not None:
                self._replace(found)

    def _replace(self, found: list[Token]) -> None:
        before = {token.digest: token.caller for tokens in self._tokens.values() for token in tokens}
        now = {token.digest: token.caller for token in found}
        self._tokens = _by_first_bytes(found)
        removed = frozenset(digest for digest, caller in before.items() if now.get(digest) != caller)
        _log.info("tokens_read", num_tokens=len(now), num_removed=len(removed))
        for listener in self._listeners:
            listener(removed)

    def _read_if_changed(self) -> list[Token] | None:
        try:
            found = self._path.stat()
            stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
            if stamp == self._stamp:
                return None
            if found.st_size > _MAX_BYTES:
                raise TokenFileError(f"has more than {_MAX_BYTES} bytes")
            tokens = parse_tokens(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TokenFileError(f"--tokens: cannot read {self._path}: {error}") from error
        except TokenFileError as error:
            raise TokenFileError(f"--tokens: {self._path}: {error}") from None
        self._stamp = stamp
        return tokens


def parse_tokens(text: str) -> list[Token]:
    """Read one JSON object for each line. Raises TokenFileError."""
    tokens: dict[bytes, Token] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            token = _token(json.loads(line))
            if token.digest in tokens:
                raise TokenFileError("the hash is that of a line above")
        except (TokenFileError, ValueError, RecursionError) as error:
            raise TokenFileError(f"line {number}: {error}") from None
        tokens[token.digest] = token
    return list(tokens.values())


def _token(fields: object) -> Token:
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
        raise TokenFileError("has to be a JSON object whose values are texts")
    if unknown := sorted(fields.keys() - _FIELDS):
        raise TokenFileError(f"{unknown[0]!r} is not known; there are {', '.join(sorted(_FIELDS))}")
    digest = _digest(str(fields.get("hash", "")))
    role, tenant = _role_and_tenant(fields)
    name = str(fields.get("name") or f"token {digest.hex()[:8]}")
    if len(name.encode()) > _MAX_NAME_BYTES:
        raise TokenFileError(f"name has more than {_MAX_NAME_BYTES} bytes")
    roles = {role} if tenant is None else {role, Role.CLIENT}
    return Token(digest, Caller(name, frozenset(roles), tenant))


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

"""What a client proves itself by: certificates and a token, out of files read again whenever they are shown.

Knows files. What cannot be read later stays what it was; refuses to know who asks for it.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline_client.config import Tls
from paceline_client.requests import invalid

_ROOTS, _CHAIN, _KEY = "ca.crt", "tls.crt", "tls.key"
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ChannelCertificates:
    """In PEM, as gRPC takes them; None: the system's roots, and no certificate of one's own."""

    roots: bytes | None
    key: bytes | None = field(repr=False)
    chain: bytes | None


class Credentials:
    """`InvalidRequestError` for files that cannot be read now, and for what is no token."""

    def __init__(self, tls: Tls | None = None, token: str | Path | None = None) -> None:
        self._tls = tls
        self._token_file = token if isinstance(token, Path) else None
        try:
            self._certificates = None if tls is None else _read(tls)
        except OSError as error:
            raise invalid("tls", f"cannot read {error.filename}: {error.strerror}") from None
        try:
            text = _content(self._token_file).decode("ascii") if self._token_file else token
        except (OSError, UnicodeDecodeError) as error:
            raise invalid("token", f"cannot read {self._token_file}: {error}") from None
        self._token = None if text is None else _checked(str(text))

    @property
    def server_name(self) -> str | None:
        """Whose certificate is expected, wherever the server is; None: that of whom is dialled."""
        return None if self._tls is None else self._tls.server_name

    def certificates(self) -> ChannelCertificates | None:
        """For one connection; None: it is not encrypted."""
        if self._tls is not None:
            with contextlib.suppress(OSError):
                self._certificates = _read(self._tls)
        return self._certificates

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For one call."""
        if self._token_file is not None:
            with contextlib.suppress(OSError, ValueError):
                self._token = _content(self._token_file).decode("ascii").strip() or self._token
        return () if self._token is None else (("authorization", f"Bearer {self._token}"),)

    def token_watch(self) -> Callable[[], bool]:
        """Says later whether the token that calls show now has been replaced since."""
        shown = self.metadata()
        return lambda: self.metadata() != shown


def _read(tls: Tls) -> ChannelCertificates:
    if tls.folder is None:
        return ChannelCertificates(tls.root_certificates, tls.private_key, tls.certificate_chain)
    folder = Path(tls.folder)
    if not (folder / _CHAIN).exists():
        return ChannelCertificates(_content(folder / _ROOTS), None, None)
    return ChannelCertificates(*(_content(folder / name) for name in (_ROOTS, _KEY, _CHAIN)))


def _content(path: Path) -> bytes:
    """Of a regular file. Raises OSError for a FIFO or a device, which would keep calls waiting."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_BYTES:
            raise OSError(errno.EINVAL, f"it is no regular file of at most {_MAX_BYTES} bytes", str(path))
        return os.read(file, _MAX_BYTES)
    finally:
        os.close(file)


def _checked(text: str) -> str:
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise invalid("token", "is no token: one line of ASCII without blanks")
    return token

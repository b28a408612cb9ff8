"""The folder that cert-manager mounts, `ca.crt`, `tls.crt` and `tls.key`, and who has to have one.

Refuses to know gRPC: a command line is checked before that may be imported.
"""

import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path

_ROOTS, _CHAIN, _KEY = "ca.crt", "tls.crt", "tls.key"
_MAX_TRIES = 3
_MAX_BYTES = 1 << 20

_Stamp = tuple[tuple[int, int, int], ...]


class TlsFolderError(Exception):
    """The folder cannot be used; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """Whom to trust, and who one is, in PEM."""

    roots: bytes
    chain: bytes
    key: bytes = field(repr=False)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches who listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class TlsFolder:
    """Raises TlsFolderError unless the folder can be used now. Damage later changes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._stamp = self._look()
            self._last = self._read()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise TlsFolderError(
                f"cannot use {path}: it has to hold {_ROOTS}, {_CHAIN} and {_KEY} in PEM, of one another ({reason})"
            ) from error

    def certificates(self) -> Certificates:
        """Return what the files held when they last fitted together. For any thread."""
        for _ in range(_MAX_TRIES):
            try:
                stamp = self._look()
                if stamp == self._stamp:
                    break
                found = self._read()
                if self._look() == stamp:  # else somebody writes right now
                    self._last, self._stamp = found, stamp
            except (OSError, ValueError):  # half written, or gone: the next look may find more
                break
        return self._last

    def _look(self) -> _Stamp:
        found = [(self._path / name).stat() for name in (_ROOTS, _CHAIN, _KEY)]
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in found)

    def _read(self) -> Certificates:
        files = [self._path / name for name in (_ROOTS, _CHAIN, _KEY)]
        if max(file.stat().st_size for file in files) > _MAX_BYTES:
            raise ValueError(f"a file has more than {_MAX_BYTES} bytes")
        roots, chain, key = files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(roots)  # ssl.SSLError is an OSError
        context.load_cert_chain(chain, key, password="")  # never asks a terminal
        return Certificates(roots.read_bytes(), chain.read_bytes(), key.read_bytes())

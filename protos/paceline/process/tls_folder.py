"""The folder that cert-manager mounts, `ca.crt`, `tls.crt` and `tls.key`, and who has to have one.

Refuses to know gRPC: a command line is checked before that may be imported.
"""

import contextlib
import ipaddress
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from paceline.process.small_files import in_time, read_regular

_ROOTS, _CHAIN, _KEY = "ca.crt", "tls.crt", "tls.key"
_MAX_BYTES = 1 << 20
_PATIENCE_S = 1.0  # of the disk, later: who connects waits, and heartbeats may be no later than 1.2 s


class TlsFolderError(Exception):
    """The folder cannot be used; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """Whom to trust, and who one is, in PEM."""

    roots: bytes
    chain: bytes
    key: bytes = field(repr=False)

    def context(self, protocol: int) -> ssl.SSLContext:
        """Both sides show a certificate of one authority. Whose it is, whoever uses it asks: no name is looked at."""
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.roots.decode())
        self._show(context)
        return context

    def https_context(self) -> ssl.SSLContext:
        """Of a server whose callers prove themselves otherwise than by a certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._show(context)
        return context

    def _show(self, context: ssl.SSLContext) -> None:
        with os.fdopen(os.memfd_create("paceline-tls"), "wb") as file:  # it is read by name alone
            file.write(self.chain + b"\n" + self.key)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password="")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches who listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def exposure(option: str, host: str, *, is_protected: bool) -> str:
    """What is wrong with listening there; empty: nothing. `is_protected`: by TLS, or by the network, somebody says."""
    if is_protected or is_loopback(host):
        return ""
    return (
        f"{option}: other machines reach {host}: give --tls-dir, or --insecure if the network itself keeps others out"
    )


class TlsFolder:
    """Raises TlsFolderError unless the folder can be used now. Damage later changes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._last = in_time(lambda: self._read(None), path)
        except (OSError, ValueError) as error:
            reason = (
                f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
            )
            raise TlsFolderError(
                f"cannot use {path}: it has to hold {_ROOTS}, {_CHAIN} and {_KEY} in PEM, of one another ({reason})"
            ) from error

    @property
    def path(self) -> Path:
        return self._path

    def certificates(self) -> Certificates:
        """Return what the files held when they last fitted together. For any thread."""
        with contextlib.suppress(OSError, ValueError):  # half written, or gone: the next look may find more
            self._last = in_time(lambda: self._read(self._last), self._path, _PATIENCE_S)
        return self._last

    def _read(self, last: Certificates | None) -> Certificates:
        roots, chain, key = files = [self._path / name for name in (_ROOTS, _CHAIN, _KEY)]
        found = Certificates(*(read_regular(file, _MAX_BYTES) for file in files))
        if found != last:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(roots)  # ssl.SSLError is an OSError
            context.load_cert_chain(chain, key, password="")  # never asks a terminal
            if found != Certificates(*(read_regular(file, _MAX_BYTES) for file in files)):
                raise ValueError("somebody writes right now")
        return found

"""Who calls, by a client certificate, and gRPC's credentials on both sides of a link.

Refuses to know which call is for whom.
"""

import contextlib
import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from urllib.parse import unquote

import grpc
import grpc.aio

from paceline.process.tls_folder import Certificates, TlsFolder

_SCHEME = "paceline://"
_CLIENT = re.compile(
    r"paceline://client/((?:[\w.~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})+)", re.ASCII
)  # a segment by RFC 3986
_URIS, _NAMES = "peer_uri", "x509_common_name"


class Role(enum.Enum):
    """In a certificate: the URI SAN `paceline://` and this value."""

    CLIENT = "client"
    """Uses what is its tenant's. In a certificate: `paceline://client/TENANT`."""
    OPERATOR = "operator"
    SCHEDULER = "scheduler"
    EXECUTOR = "executor"


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody, by the name that logs have. `tenant` None: any."""

    name: str
    roles: frozenset[Role]
    tenant: str | None = None


NOBODY = Caller("", frozenset())
ANYBODY = Caller("anybody", frozenset(Role))
"""Who calls where nothing is asked for."""


def caller_of(context: grpc.aio.ServicerContext) -> Caller:  # type: ignore[type-arg]  # of any messages
    """Return who calls by its client certificate; NOBODY without one."""
    shown = context.auth_context()
    uris, names = ([text.decode(errors="replace") for text in shown.get(key, ())] for key in (_URIS, _NAMES))
    caller = caller_of_uris(uris)
    return replace(caller, name=" ".join([*names, *filter(None, [caller.name])]))


def caller_of_uris(uris: Iterable[str]) -> Caller:
    """Return who has these URIs in a certificate. One that names two tenants speaks for none, and a URI that is not
    written exactly so for nobody.
    """
    own = [uri for uri in uris if uri.startswith(_SCHEME)]
    roles: set[Role] = {role for role in Role if role is not Role.CLIENT and _SCHEME + role.value in own}
    tenants = set[str]()
    for uri in own:
        with contextlib.suppress(UnicodeDecodeError):  # else two that are no text would be one
            if found := _CLIENT.fullmatch(uri):
                tenants.add(unquote(found[1], errors="strict"))
    tenant = tenants.pop() if len(tenants) == 1 else None
    if tenant is not None:
        roles.add(Role.CLIENT)
    return Caller(" ".join(own), frozenset(roles), tenant) if roles else NOBODY


def server_credentials(folder: TlsFolder, *, asks_callers: bool) -> grpc.ServerCredentials:
    """Return credentials that follow the folder, handshake by handshake. `asks_callers`: only who has a certificate of
    its authority comes in.
    """
    given: Certificates | None = None

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        found = folder.certificates()
        if found == given:
            return None
        given = found
        return grpc.ssl_server_certificate_configuration([(found.key, found.chain)], found.roots)

    first = fetch()
    assert first is not None, "nothing was given yet"
    return grpc.dynamic_ssl_server_credentials(first, fetch, asks_callers)  # type: ignore[arg-type]  # None: as before


def channel_credentials(folder: TlsFolder) -> grpc.ChannelCredentials:
    """Return credentials of the files as they are now: a channel keeps them."""
    found = folder.certificates()
    return grpc.ssl_channel_credentials(found.roots, found.key, found.chain)

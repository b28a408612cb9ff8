"""What a client proves itself by: a token in every call, certificates for every connection, both read again."""

import os
from contextlib import asynccontextmanager
from functools import partial

import grpc
import pytest

from both_sides.certificates import Authority
from paceline.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from paceline_client import AccessDeniedError, AsyncClient, ConnectFailedError, InvalidRequestError, Timeout, Tls
from paceline_client.credentials import Credentials
from paceline_client.testing import say
from paceline_client.testing.server import DEFAULT_MODEL
from paceline_client.testing.servicer import FakeServicer

SOON = Timeout(connect_seconds=2.0, refused_seconds=0.5, call_seconds=5.0)


class Doorkeeper(grpc.aio.ServerInterceptor):
    """Notes the token of every call, and lets those in that have the accepted one, or all if there is none."""

    def __init__(self):
        self.seen = []
        self.accepted = None
        self.on_refusal = lambda: None

    async def intercept_service(self, continuation, handler_call_details):
        shown = dict(handler_call_details.invocation_metadata).get("authorization")
        self.seen.append((handler_call_details.method.rpartition("/")[2], shown))
        handler = await continuation(handler_call_details)
        if self.accepted is None or shown == f"Bearer {self.accepted}":
            return handler

        async def refuse(_, context):
            self.on_refusal()
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse)
        return grpc.unary_unary_rpc_method_handler(refuse)


@asynccontextmanager
async def serving(script=(), credentials=None, address="127.0.0.1:0"):
    """A server; yields where it is and its doorkeeper."""
    doorkeeper = Doorkeeper()
    server = grpc.aio.server(interceptors=[doorkeeper])
    add_InferenceServiceServicer_to_server(FakeServicer(script, models=[DEFAULT_MODEL]), server)
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", doorkeeper
    finally:
        await server.stop(None)


def credentials_of(folder, *, asks_clients):
    """A server's, of the files as they are."""
    roots, chain, key = ((folder / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key"))
    return grpc.ssl_server_credentials([(key, chain)], roots, require_client_auth=asks_clients)


async def test_the_token_goes_with_every_call():
    async with serving(say("hi")) as (target, doorkeeper):
        async with AsyncClient(target, token="secret") as client:
            await client.list_models()
            await client.generate("?")
        assert ("ListModels", "Bearer secret") in doorkeeper.seen
        assert ("Session", "Bearer secret") in doorkeeper.seen
        doorkeeper.seen.clear()
        async with AsyncClient(target) as client:
            await client.get_model()
        assert {shown for _, shown in doorkeeper.seen} == {None}


async def test_a_token_in_a_file_is_read_again_for_every_call(tmp_path):
    file = tmp_path / "token"
    file.write_text("first\n")
    async with serving() as (target, doorkeeper), AsyncClient(target, token=file) as client:
        shown = []
        for content in ("first\n", "second", "", None):
            file.unlink() if content is None else file.write_text(content)
            await client.get_model()
            shown.append(doorkeeper.seen[-1][1])
    assert shown == ["Bearer first", "Bearer second", "Bearer second", "Bearer second"]


def test_a_fifo_in_the_place_of_a_file_keeps_no_call_waiting(tmp_path):
    file, roots = tmp_path / "token", tmp_path / "ca.crt"
    file.write_text("first")
    roots.write_text("roots")
    credentials = Credentials(Tls(folder=tmp_path), file)
    before = credentials.metadata(), credentials.certificates()
    for path in (file, roots):
        path.unlink()
        os.mkfifo(path)
    assert (credentials.metadata(), credentials.certificates()) == before
    for field, arguments in (("tls", (Tls(folder=tmp_path),)), ("token", (None, file))):
        with pytest.raises(InvalidRequestError, match=f"{field}: cannot read .*it is no regular file"):
            Credentials(*arguments)


async def test_who_is_not_known_is_told_so_at_once():
    """By a short call and by a request, neither of which is tried again.

    A request is where its write met the end of the stream: grpc.aio then hides why that was refused.
    """
    async with serving(say("hi")) as (target, doorkeeper), AsyncClient(target, token="wrong") as client:
        doorkeeper.accepted = "right"
        for call in (client.get_model, partial(client.generate, "?")):
            num_calls = []
            while 1 not in num_calls and len(num_calls) < 5:
                doorkeeper.seen.clear()
                with pytest.raises(AccessDeniedError, match="who are you"):
                    await call()
                num_calls.append(len(doorkeeper.seen))
            assert 1 in num_calls


async def test_a_token_that_is_replaced_while_it_is_shown_is_no_refusal(tmp_path):
    """Rotated and revoked between the moment a call read it and the moment the server looked it up."""
    file = tmp_path / "token"
    file.write_text("old")
    async with serving(say("hi")) as (target, doorkeeper), AsyncClient(target, token=file) as client:
        doorkeeper.accepted = "new"
        doorkeeper.on_refusal = lambda: file.write_text("new")
        assert (await client.generate("?")).text == "hi"
        doorkeeper.accepted = "newest"
        doorkeeper.on_refusal = lambda: file.write_text("newest")
        assert (await client.get_model()).name == "fake"


@pytest.mark.parametrize("asks_clients", [True, False])
async def test_each_connection_has_the_certificates_of_its_moment(tmp_path, asks_clients):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"

    def certify():
        authority = Authority()
        authority.mount(theirs)
        authority.mount(mine, "paceline://client/blue")
        if not asks_clients:
            for name in ("tls.crt", "tls.key"):
                (mine / name).unlink()

    certify()
    async with serving(credentials=credentials_of(theirs, asks_clients=asks_clients)) as (target, _):
        client = AsyncClient(target, tls=Tls(folder=mine), timeout=SOON)
        await client.get_model()
    certify()
    async with serving(credentials=credentials_of(theirs, asks_clients=asks_clients), address=target), client:
        assert (await client.get_model()).name == "fake"


async def test_a_server_of_another_authority_gets_nothing(tmp_path):
    """Nor one without a certificate: not even the token."""
    credentials = credentials_of(Authority().mount(tmp_path / "theirs"), asks_clients=False)
    mine = Tls(folder=Authority().mount(tmp_path / "mine"))
    for of_server, tls in ((credentials, mine), (None, mine), (None, Tls())):
        async with serving(credentials=of_server) as (target, doorkeeper):
            async with AsyncClient(target, tls=tls, token="secret", timeout=SOON) as client:
                with pytest.raises(ConnectFailedError):
                    await client.get_model()
            assert doorkeeper.seen == []


@pytest.mark.parametrize("token", ["", " ", "two words", "ü", "a\nb"])
def test_what_is_no_token_is_refused_by_name(token):
    with pytest.raises(InvalidRequestError, match="token"):
        Credentials(token=token)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(InvalidRequestError, match=r"token: cannot read .*nowhere"):
        Credentials(token=tmp_path / "nowhere")
    with pytest.raises(InvalidRequestError, match=r"tls: cannot read .*ca\.crt"):
        Credentials(Tls(folder=tmp_path))

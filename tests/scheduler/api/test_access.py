"""Who may call what: every call of every service, with and without a token, and what a tenant sees of others."""

import hashlib
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from structlog.testing import capture_logs

import paceline.v1
from both_sides.calls import DENIED, UNAUTHENTICATED, ended, message_about, methods_of, outcome, tenant_fields
from edge_rig.edge_server import serve_edge, wait_until
from edge_rig.scripted_backend import ScriptedBackend
from edge_rig.tiny import LONG_MODEL
from paceline.plan.hashes import HASH_START, fold
from paceline.plan.values import RecordId
from paceline.process.callers import ANYBODY, NOBODY, Role, caller_of_uris
from paceline.v1 import admin_pb2, inference_pb2
from paceline.v1 import inference_pb2 as pb
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline_scheduler.access.tokens import Token, parse_tokens
from paceline_scheduler.api.servicer_access import Access
from paceline_scheduler.errors import PermissionDeniedError, TenantLimitError, UnauthenticatedError

METHODS = methods_of(inference_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)
OPERATORS = ("Cancel", "Explain", "GetModel", "ListModels")
LINES = "\n".join(
    f'{{"hash": "sha256:{hashlib.sha256(secret.encode()).hexdigest()}", {rest}}}'
    for secret, rest in (
        ("of-blue", '"tenant": "blue"'),
        ("of-blue-2", '"tenant": "blue", "name": "the second"'),
        ("of-red", '"tenant": "red"'),
        ("of-ops", '"role": "operator", "name": "ops"'),
    )
)


NO_RECORDING = SimpleNamespace(start=lambda name, *, is_raw: None, stop=lambda: None)


class Tokens:
    """Tokens of a file, some of which are revoked in a test."""

    def __init__(self):
        self._tokens = {token.digest: token for token in parse_tokens(LINES).tokens}
        self.at_most = {}
        self.refused = []
        self.access = Access(
            self.find,
            max_num_streams=lambda tenant: self.at_most.get(tenant),
            on_refusal=lambda error: self.refused.append(type(error)),
        )

    def find(self, secret) -> Token | None:
        """Whose it is."""
        return self._tokens.get(hashlib.sha256(secret.encode()).digest())

    def revoke(self, secret):
        """Forget it, and end its calls."""
        digest = hashlib.sha256(secret.encode()).digest()
        del self._tokens[digest]
        self.access.revoke(frozenset({digest}))


@pytest.fixture
def tokens():
    """Two of blue, one of red, one of an operator."""
    return Tokens()


@pytest.fixture
def backend():
    """A backend with one model."""
    return ScriptedBackend(LONG_MODEL)


@pytest.fixture
async def channel(backend, tokens):
    """A connection to a server that wants tokens."""
    async with (
        serve_edge(backend, access=tokens.access, recording=NO_RECORDING) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        yield channel


@pytest.fixture
def stub(channel):
    return InferenceServiceStub(channel)


def bearer(secret):
    """What a call carries."""
    return (("authorization", f"Bearer {secret}"),)


OF_CLIENTS = [method for method in METHODS if method.containing_service.name == "InferenceService"]
TENANT_FIELDS = [(method, path) for method in OF_CLIENTS for path in tenant_fields(method)]


def named(method):
    """A method in the name of a test."""
    return method.name


def test_no_service_is_forgotten():
    protos = Path(next(iter(paceline.v1.__path__))).glob("*.proto")
    declared = [
        line.split()[1] for proto in protos for line in proto.read_text().splitlines() if "service " in line[:8]
    ]
    assert set(declared) == {"ExecutorService", *(method.containing_service.name for method in METHODS)}
    assert len(TENANT_FIELDS) == 6


@pytest.mark.parametrize("method", METHODS, ids=named)
async def test_no_call_is_answered_without_a_known_token(channel, method, tokens):
    assert await outcome(channel, method) == UNAUTHENTICATED
    assert await outcome(channel, method, token="of-nobody") == UNAUTHENTICATED
    assert tokens.refused == [UnauthenticatedError] * (2 if method.name in ("Generate", "Session") else 0)


@pytest.mark.parametrize("method", METHODS, ids=named)
async def test_bytes_that_are_no_message_are_an_invalid_argument(backend, method):
    async with (
        serve_edge(backend, access=Access(), recording=NO_RECORDING) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        assert (await outcome(channel, method, message=b"\xff"))[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("method", METHODS, ids=named)
async def test_each_call_is_for_one_kind_of_caller(channel, method):
    is_admin = method.containing_service.name == "AdminService"
    assert (await outcome(channel, method, token="of-blue") == DENIED) is is_admin
    assert (await outcome(channel, method, token="of-ops") == DENIED) is (not is_admin and method.name not in OPERATORS)


@pytest.mark.parametrize(
    ("method", "path"), TENANT_FIELDS, ids=lambda it: it.name if hasattr(it, "name") else ".".join(it)
)
async def test_no_call_may_name_a_foreign_tenant(channel, method, path):
    foreign, own = (message_about(method, path, tenant) for tenant in ("red", "blue"))
    assert await outcome(channel, method, token="of-blue", message=foreign) == DENIED
    assert (await outcome(channel, method, token="of-blue", message=own))[0] is not grpc.StatusCode.PERMISSION_DENIED


async def test_who_names_no_tenant_gets_the_one_of_its_token(stub, backend):
    call = stub.Generate(pb.GenerateRequest(request_id="r", text="hi"), metadata=bearer("of-blue"))
    assert (await backend.next_request()).key == RecordId("blue", "r")
    session = stub.Session(metadata=bearer("of-red"))
    await session.write(pb.SessionRequest(generate=pb.GenerateRequest(request_id="r", text="hi")))
    assert (await backend.next_request()).key == RecordId("red", "r")
    call.cancel()
    session.cancel()


async def test_a_request_is_unknown_to_other_tenants(stub, backend):
    owner = stub.Generate(pb.GenerateRequest(request_id="r", text="hi", resumable=True), metadata=bearer("of-blue"))
    request = await backend.next_request()
    backend.step({request.handle: (5, 6)})
    assert list((await owner.read()).delta.token_ids) == [5, 6]

    for call, message in ((stub.Explain, pb.ExplainRequest), (stub.Cancel, pb.CancelRequest)):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call(message(request_id="r"), metadata=bearer("of-red"))
        assert refusal.value.code() is grpc.StatusCode.NOT_FOUND
    thief = stub.Generate(
        pb.GenerateRequest(
            request_id="r",
            text="hi",
            resumable=True,
            attachment=2**32 - 1,
            resume_from=2,
            resume_hash=fold(HASH_START, [5, 6]),
        ),
        metadata=bearer("of-red"),
    )
    await wait_until(lambda: len(backend.asked.resumed) == 2)
    assert [request.key.tenant for request in backend.asked.resumed] == ["blue", "red"]

    backend.step({request.handle: (7,)})
    assert list((await owner.read()).delta.token_ids) == [7]
    thief.cancel()
    owner.cancel()


async def test_a_revoked_token_ends_its_session_and_another_one_goes_on_with_the_request(stub, backend, tokens):
    """Typed, and nothing is lost: the request is detached, and the tenant's other token attaches to it."""
    session = stub.Session(metadata=bearer("of-blue"))
    await session.write(pb.SessionRequest(generate=pb.GenerateRequest(request_id="r", text="hi", resumable=True)))
    request = await backend.next_request()
    backend.step({request.handle: (5, 6)})
    while not (response := await session.read()).deltas:
        pass
    assert list(response.deltas[0].delta.token_ids) == [5, 6]

    others = stub.Session(metadata=bearer("of-red"))
    await others.write(pb.SessionRequest(heartbeat=pb.Heartbeat()))
    tokens.revoke("of-blue")
    assert await ended(session) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_REVOKED")
    await wait_until(lambda: backend.asked.detached == [request.handle])
    assert not others.done()
    others.cancel()

    point = {"attachment": 2, "resume_from": 2, "resume_hash": fold(HASH_START, [5, 6])}
    again = pb.GenerateRequest(request_id="r", text="hi", resumable=True, **point)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub.Generate(again, metadata=bearer("of-blue")).read()
    assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
    call = stub.Generate(again, metadata=bearer("of-blue-2"))
    await wait_until(lambda: backend.asked.resumed)
    assert backend.asked.resumed[0].key == request.key
    call.cancel()


async def test_a_call_that_waits_is_cut_when_its_token_is_revoked(stub, backend, tokens):
    call = stub.Generate(pb.GenerateRequest(request_id="r", text="hi"), metadata=bearer("of-blue"))
    await backend.next_request()
    tokens.revoke("of-blue")
    assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_tenant_has_so_many_calls_open_as_it_may(stub, backend, tokens):
    tokens.at_most = {"blue": 1}
    first = stub.Session(metadata=bearer("of-blue"))
    await first.write(pb.SessionRequest(generate=pb.GenerateRequest(request_id="r", text="hi")))
    await backend.next_request()
    refused = (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_LIMIT")
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    with capture_logs() as events:
        metadata = (*bearer("of-blue-2"), ("traceparent", parent))
        call = stub.Generate(pb.GenerateRequest(text="hi"), metadata=metadata)
        assert await ended(call) == refused
    assert [(event["event"], event["trace_id"]) for event in events] == [("call_refused", "a" * 32)]
    assert "grpc-retry-pushback-ms" in dict(await call.trailing_metadata())
    assert tokens.refused == [TenantLimitError]
    of_red = stub.Generate(pb.GenerateRequest(request_id="r", text="hi"), metadata=bearer("of-red"))
    assert (await backend.next_request()).key.tenant == "red"
    of_red.cancel()
    await stub.ListModels(pb.ListModelsRequest(), metadata=bearer("of-blue"))
    first.cancel()
    again = stub.Generate(pb.GenerateRequest(request_id="s", text="hi"), metadata=bearer("of-blue"))
    assert (await backend.next_request()).key == RecordId("blue", "s")
    again.cancel()


async def test_what_operators_do_is_logged_with_their_name(channel, stub, backend):
    """One line each: who drained, recorded, changed limits, cancelled a tenant's request; and who was not let."""
    address = "10.0.0.1:50061"
    backend.known_executors = (SimpleNamespace(address=address, incarnation=1, num_running_requests=0),)
    traced = pb.GenerateRequest(request_id="r", text="hi", trace_parent=f"00-{'a' * 32}-{'b' * 16}-01")
    owner = stub.Generate(traced, metadata=bearer("of-blue"))
    await backend.next_request()
    with capture_logs() as events:
        admin = AdminServiceStub(channel)
        for call, message in (
            (admin.DrainExecutor, admin_pb2.DrainExecutorRequest(address=address)),
            (admin.UndrainExecutor, admin_pb2.UndrainExecutorRequest(address=address)),
            (admin.SetPlanRecording, admin_pb2.SetPlanRecordingRequest(name="all", raw=True)),
            (admin.SetLimits, admin_pb2.SetLimitsRequest(limits={"max_num_queued_reqs": 7})),
        ):
            await call(message, metadata=bearer("of-ops"))
        await stub.Cancel(pb.CancelRequest(tenant="blue", request_id="r"), metadata=bearer("of-ops"))
        with pytest.raises(grpc.aio.AioRpcError):
            await admin.DrainExecutor(admin_pb2.DrainExecutorRequest(address=address), metadata=bearer("of-blue"))
    by_ops = {"by": "operator", "caller": "ops", "log_level": "info"}
    asked = {"address": address, "reason": "an operator asked for it", **by_ops}
    assert [event for event in events if event.get("by")] == [
        {"event": "executor_draining", **asked},
        {"event": "executor_undrained", **asked},
        {"event": "recording_set", "name": "all", "is_raw": True, **by_ops},
        {"event": "limits_set", "max_num_queued_reqs": 7, **by_ops},
        {"event": "foreign_request_cancelled", "tenant": "blue", "request_id": "r", "trace_id": "a" * 32, **by_ops},
    ]
    (refused,) = [event for event in events if event["event"] == "call_refused"]
    assert refused["method"].endswith("/DrainExecutor")
    owner.cancel()


async def test_without_tokens_anybody_may_call_and_name_any_tenant(backend):
    async with serve_edge(backend) as server, grpc.aio.insecure_channel(server.address) as channel:
        for method in METHODS:
            code, _ = await outcome(channel, method)
            assert code not in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED), method.name


@pytest.mark.parametrize(
    ("uris", "roles", "tenant"),
    [
        (["paceline://client/team%20a"], {Role.CLIENT}, "team a"),
        (["paceline://operator", "paceline://client/x"], {Role.OPERATOR, Role.CLIENT}, "x"),
        (["paceline://scheduler", "spiffe://other/operator"], {Role.SCHEDULER}, None),
        (["paceline://client/a", "paceline://client/b"], set(), None),
        (["paceline://operator/x", "paceline://client", "paceline://client/", "https://operator"], set(), None),
        *(
            ([f"paceline://{name}"], set(), None)
            for role in ("operator", "scheduler", "executor", "client/blue")
            for name in (f"{role}/", role.title(), f"{role}?", f"{role}#a", f" {role}", f"{role}\n", f"@{role}")
        ),
        *(([f"paceline://client/{name}"], set(), None) for name in ("a/b", "%FF", "%zz", "a?b=c", "größe")),
        (["paceline://client/a%2Fb"], {Role.CLIENT}, "a/b"),
    ],
)
def test_a_certificate_says_by_its_uris_who_calls(uris, roles, tenant):
    found = caller_of_uris(uris)
    assert (found.roles, found.tenant) == (roles, tenant)
    assert (found == NOBODY) is (not roles)


async def test_an_unknown_method_is_denied_once_callers_are_asked(tokens):
    """Whatever service is added, nobody has it until a rule says who."""

    class Context:
        def invocation_metadata(self):
            return bearer("of-ops")

        def peer(self):
            return "ipv4:127.0.0.1:1"

    with pytest.raises(PermissionDeniedError), tokens.access.admitted("/paceline.v1.NewService/New", Context()):
        pass
    with Access().admitted("/paceline.v1.NewService/New", Context()):
        assert ANYBODY.roles == set(Role)

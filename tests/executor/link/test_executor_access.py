"""Who may call an executor with TLS: schedulers, operators for what they look at, and nobody without a certificate."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from both_sides.calls import methods_of, outcome
from both_sides.certificates import Authority
from executor_rig.hash_executor import hash_executor
from executor_rig.plan_client import hello
from paceline.process.tls_folder import TlsFolder
from paceline.v1 import executor_pb2, plan_pb2
from paceline_executor.config import parse_config
from paceline_executor.link.service import ServiceConfig

METHODS = methods_of(executor_pb2.DESCRIPTOR)
OF_OPERATORS = {"GetInfo", "GetState", "Profile"}
NOT_ALLOWED = (grpc.StatusCode.PERMISSION_DENIED, "NOT_ALLOWED")


@pytest.fixture
def authority():
    """Who certifies everybody."""
    return Authority()


@pytest.fixture
def tls(authority, tmp_path):
    """The executor's own certificates."""
    return TlsFolder(authority.mount(tmp_path / "executor", "paceline://executor"))


@pytest.fixture
async def executor(tls):
    """An executor that shows them, and asks for those of others."""
    async with hash_executor(config=ServiceConfig("127.0.0.1", 0, None, tls=tls)) as executor:
        yield executor


def channel_to(executor, folder):
    """A connection with the certificates of a folder."""
    roots, key, chain = ((folder / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
    return grpc.aio.secure_channel(executor.address, grpc.ssl_channel_credentials(roots, key, chain))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_each_call_is_for_schedulers_and_some_for_operators(executor, authority, tmp_path, method):
    uris = {"scheduler": True, "operator": method.name in OF_OPERATORS, "executor": False, "client/blue": False}
    for uri, is_allowed in uris.items():
        folder = authority.mount(tmp_path / uri, f"paceline://{uri}")
        async with channel_to(executor, folder) as channel:
            assert (await outcome(channel, method) != NOT_ALLOWED) is is_allowed, uri
    async with channel_to(executor, authority.mount(tmp_path / "nobody")) as channel:
        assert await outcome(channel, method) == NOT_ALLOWED


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_nobody_comes_in_without_a_certificate_of_the_authority(executor, authority, tmp_path, method):
    roots = (authority.mount(tmp_path / "mine") / "ca.crt").read_bytes()
    stranger = Authority().mount(tmp_path / "stranger", "paceline://scheduler")
    forged = grpc.ssl_channel_credentials(
        roots, (stranger / "tls.key").read_bytes(), (stranger / "tls.crt").read_bytes()
    )
    for credentials in (grpc.ssl_channel_credentials(roots), forged):
        async with grpc.aio.secure_channel(executor.address, credentials) as channel:
            assert (await outcome(channel, method))[0] is grpc.StatusCode.UNAVAILABLE
    async with grpc.aio.insecure_channel(executor.address) as channel:
        assert (await outcome(channel, method))[0] is grpc.StatusCode.UNAVAILABLE


async def test_health_is_for_everybody_the_authority_knows(executor, authority, tmp_path):
    async with channel_to(executor, authority.mount(tmp_path / "nobody")) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_takeovers_and_what_operators_look_at_are_logged_with_who_it_was(executor, authority, tmp_path):
    scheduler = authority.mount(tmp_path / "scheduler", "paceline://scheduler")
    operator = authority.mount(tmp_path / "operator", "paceline://operator", names=("alice",))
    by_name = {method.name: method for method in METHODS}
    with capture_logs() as events:
        async with channel_to(executor, scheduler) as channel:
            message = plan_pb2.AttachRequest(hello=hello(term=7, takeover=True))
            await outcome(channel, by_name["Attach"], message=message)
        async with channel_to(executor, operator) as channel:
            await outcome(channel, by_name["GetState"])
            await outcome(channel, by_name["Attach"])
    told = [(event["event"], event["caller"]) for event in events if "caller" in event]
    assert told == [
        ("takeover", "localhost paceline://scheduler"),
        ("operator_call", "alice paceline://operator"),
        ("call_refused", "alice paceline://operator"),
    ]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "executor.example"])  # noqa: S104  nothing listens
def test_other_machines_are_listened_to_only_with_tls_or_on_purpose(host, authority, tmp_path, capsys):
    """Whoever reaches the port could read every prompt."""
    given = ["--runner", "simulated", "--host", host]
    with pytest.raises(SystemExit):
        parse_config(given)
    assert f"--host: other machines reach {host}" in capsys.readouterr().err
    folder = authority.mount(tmp_path / "executor", "paceline://executor")
    for allowed in (["--insecure"], ["--tls-dir", str(folder)]):
        assert parse_config([*given, *allowed]).host == host


def test_a_folder_that_cannot_be_used_ends_the_start(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse_config(["--runner", "simulated", "--tls-dir", str(tmp_path)])
    assert "has to hold ca.crt, tls.crt and tls.key" in capsys.readouterr().err

"""Executors are found from a list or a name, come and go, and what was typed wrong is said in a sentence."""

import pytest

from both_sides.certificates import Authority
from executor_rig.hash_executor import hash_executor
from paceline.process.tls_folder import TlsFolder
from paceline_executor.link.service import ServiceConfig
from paceline_scheduler.errors import LinkError, UnreachableError
from paceline_scheduler.link.discovery import Discovery, Endpoint, parse_executors
from paceline_scheduler.link.transport_grpc import GrpcTransport


def test_addresses_names_and_ipv6_are_understood():
    found = parse_executors("a:1, [::1]:2,dns:///executors.default.svc:50061")
    assert found.fixed == (Endpoint("a", 1), Endpoint("::1", 2))
    assert found.names == (Endpoint("executors.default.svc", 50061),)
    assert str(Endpoint("::1", 2)) == "[::1]:2"


@pytest.mark.parametrize("text", ["", "a", "a:", ":1", "a:0", "a:65536", "a:x", "a:1,a:1", "dns:///a", "a:1,,b:2"])
def test_a_mistyped_address_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"host:port|twice"):
        parse_executors(text)


async def test_a_name_that_cannot_be_resolved_keeps_its_last_answer():
    answers = [("10.0.0.2", "10.0.0.1"), OSError("no DNS"), ("10.0.0.3",)]

    async def resolver(name, port):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    discovery = Discovery(parse_executors("dns:///x:7"), resolver)
    assert await discovery.look() == ("10.0.0.2:7", "10.0.0.1:7")
    assert await discovery.look() == ("10.0.0.2:7", "10.0.0.1:7")
    assert "no DNS" in discovery.last_error
    assert await discovery.look() == ("10.0.0.3:7",)
    assert discovery.last_error == ""


# Executors behind TLS: who is believed to be one, and certificates that change between two connections


NAME = "executor.internal"


class Deployment:
    """The folders of a scheduler and an executor."""

    def __init__(self, folder):
        self.scheduler, self.executor = folder / "scheduler", folder / "executor"
        self.certify(Authority())

    def certify(self, authority, role="scheduler", names=("127.0.0.1",)):
        """Give both new certificates of an authority."""
        authority.mount(self.scheduler, f"paceline://{role}")
        authority.mount(self.executor, "paceline://executor", names=names)

    def serve(self):
        return hash_executor(config=ServiceConfig("127.0.0.1", 0, None, tls=TlsFolder(self.executor)))


@pytest.fixture
def deployment(tmp_path):
    """Both certified by the same authority."""
    return Deployment(tmp_path)


async def info_of(transport, address):
    """What an executor says of itself over a connection of its own."""
    connection = transport.connect(address)
    try:
        return await connection.get_info(5)
    finally:
        await connection.close()


async def test_each_connection_has_the_certificates_of_its_moment(deployment):
    async with deployment.serve() as executor:
        transport = GrpcTransport(TlsFolder(deployment.scheduler))
        standing = transport.connect(executor.address)
        await standing.get_info(5)
        deployment.certify(Authority())
        await info_of(transport, executor.address)
        await standing.get_info(5)
        await standing.close()


async def test_an_executor_found_by_a_name_has_to_have_that_name(deployment):
    deployment.certify(Authority(), names=(NAME,))
    async with deployment.serve() as executor:
        host, _, port = executor.address.rpartition(":")

        async def resolve(name, port):
            return (host,)

        discovery = Discovery(parse_executors(f"dns:///{NAME}:{port}"), resolve)
        (address,) = await discovery.look()
        tls = TlsFolder(deployment.scheduler)
        await info_of(GrpcTransport(tls, discovery.name_of), address)
        with pytest.raises(UnreachableError):
            await info_of(GrpcTransport(tls), address)


async def test_a_name_that_stands_for_an_address_no_longer_says_nothing_of_it():
    answers = [("10.0.0.1", "10.0.0.2"), ("10.0.0.2",)]

    async def resolve(name, port):
        return answers.pop(0)

    discovery = Discovery(parse_executors("10.0.0.1:7,dns:///x:7"), resolve)
    assert await discovery.look() == ("10.0.0.1:7", "10.0.0.2:7")
    assert [discovery.name_of(f"10.0.0.{number}:7") for number in (1, 2)] == [None, "x"]
    await discovery.look()
    assert discovery.name_of("10.0.0.2:7") == "x"


async def test_a_scheduler_without_its_role_is_refused_in_words(deployment):
    deployment.certify(Authority(), role="client/blue")
    async with deployment.serve() as executor:
        with pytest.raises(
            LinkError, match="PERMISSION_DENIED: this call needs a certificate with the URI paceline://"
        ):
            await info_of(GrpcTransport(TlsFolder(deployment.scheduler)), executor.address)

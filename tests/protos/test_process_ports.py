"""Binding a port: the number that was bound, or a sentence that says why it could not be; and health checks."""

import asyncio
import contextlib
import socket
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.process.health import HealthServicer, HealthStatus
from paceline.process.ports import SERVER_OPTIONS, PortError, bind

LOOPBACK = "127.0.0.1"


@pytest.fixture
async def server():
    """A server that never starts."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    yield server
    await server.stop(None)


def resolve_to(*hosts):
    """A resolver for which any name has these addresses."""

    def resolve(_, port, **options):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

    return resolve


async def test_any_free_port_is_told_by_its_number(server):
    port = bind(server, LOOPBACK, 0)
    await server.start()
    with socket.create_connection((LOOPBACK, port), timeout=30):
        assert port > 0


async def test_a_port_in_use_is_refused_in_one_sentence(server):
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=f"^cannot listen on {LOOPBACK}:{port}: Address already in use$"):
            bind(server, LOOPBACK, port)


async def test_a_port_that_another_process_takes_at_the_last_moment_is_refused(server, monkeypatch):
    monkeypatch.setattr("paceline.process.ports._try_port", lambda *_: None)
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortError, match=f"^cannot listen on {LOOPBACK}:{port}: the port is in use$"):
            bind(server, LOOPBACK, port)


@pytest.mark.parametrize(
    ("host", "address"),
    [("198.51.100.1", "198.51.100.1:0"), ("2001:db8::1", "[2001:db8::1]:0"), ("x" * 64, f"{'x' * 64}:0")],
)
async def test_an_address_that_is_not_this_machines_is_refused(server, host, address):
    with pytest.raises(PortError) as refused:
        bind(server, host, 0)
    assert str(refused.value).startswith(f"cannot listen on {address}: ")


async def test_a_name_is_listened_on_if_one_of_its_addresses_is_this_machines(server, monkeypatch):
    """As localhost has one of IPv6, which a machine without IPv6 does not have."""
    monkeypatch.setattr("socket.getaddrinfo", resolve_to("198.51.100.1", LOOPBACK))
    assert bind(server, "localhost", 0) > 0
    monkeypatch.setattr("socket.getaddrinfo", resolve_to("198.51.100.1", "203.0.113.1"))
    with pytest.raises(PortError, match="cannot listen on localhost:0: "):
        bind(server, "localhost", 0)


async def is_taken(port, stack):
    """Connect, and whether the server answers or closes."""
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    stack.callback(writer.close)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
    async with asyncio.timeout(60):
        return bool(await reader.read(1))


async def test_so_many_connections_are_taken_and_those_that_end_make_room():
    """Here two; gRPC would ignore an option that it does not know."""
    assert "grpc.max_allowed_incoming_connections" in dict(SERVER_OPTIONS)
    options = dict(SERVER_OPTIONS) | {"grpc.max_allowed_incoming_connections": 2}
    server = grpc.aio.server(options=tuple(options.items()))
    port = bind(server, LOOPBACK, 0)
    await server.start()
    with contextlib.ExitStack() as connections:
        assert [await is_taken(port, connections) for _ in range(4)] == [True, True, False, False]
    for _ in range(10):
        with contextlib.ExitStack() as connections:
            async with asyncio.timeout(60):
                while not await is_taken(port, connections):
                    await asyncio.sleep(0.01)
    await server.stop(None)


# Health checks: the process lives, a service is ready or not, and whoever watches hears of each change


SERVICE = "paceline.v1.AnyService"


@asynccontextmanager
async def probed(health):
    """A stub that asks these statuses."""
    server = grpc.aio.server()
    health.add_to(server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield health_pb2_grpc.HealthStub(channel)
    finally:
        await server.stop(None)


async def check(stub, service):
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)).status


async def test_the_process_lives_before_its_service_is_ready_and_neither_does_when_it_stops():
    health = HealthServicer(SERVICE)
    async with probed(health) as stub:
        assert [await check(stub, name) for name in ("", SERVICE)] == [HealthStatus.SERVING, HealthStatus.NOT_SERVING]
        health.set(SERVICE, HealthStatus.SERVING)
        assert await check(stub, SERVICE) == HealthStatus.SERVING
        health.stop()
        assert [await check(stub, name) for name in ("", SERVICE)] == [HealthStatus.NOT_SERVING] * 2


async def test_a_service_that_is_not_here_is_not_found_when_asked_and_unknown_when_watched():
    async with probed(HealthServicer(SERVICE)) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await check(stub, "other")
        assert failure.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="other"), timeout=30)
        assert (await watch.read()).status == HealthStatus.SERVICE_UNKNOWN
        watch.cancel()


async def test_watchers_are_told_each_change_once_even_after_one_of_them_has_gone():
    health = HealthServicer(SERVICE)
    async with probed(health) as stub:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        leaving, staying = (stub.Watch(request, timeout=30) for _ in range(2))
        assert [(await one.read()).status for one in (leaving, staying)] == [HealthStatus.NOT_SERVING] * 2
        leaving.cancel()
        health.set(SERVICE, HealthStatus.NOT_SERVING)
        await asyncio.sleep(0)
        health.set(SERVICE, HealthStatus.SERVING)
        assert (await staying.read()).status == HealthStatus.SERVING
        health.stop()
        assert (await staying.read()).status == HealthStatus.NOT_SERVING

"""Health checks: the process lives, a service is ready or not, and whoever watches hears of each change."""

import asyncio
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.process.health import HealthServicer, HealthStatus
from paceline.process.ports import bind

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
    """The status of a service."""
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

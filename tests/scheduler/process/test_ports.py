"""Ports that are open before there is anything to answer on them."""

import asyncio
import socket

import grpc.aio
import pytest

from paceline.process.ports import PortError
from paceline_scheduler.config import parse_config
from paceline_scheduler.serving.servicer_ports import SchedulerServers

_ANY_PORT = ("--port", "0", "--admin-port", "0", "--health-port", "0", "--metrics-port", "0")


class Echo(grpc.GenericRpcHandler):
    """A service of one method, which answers with what it is asked."""

    def service(self, handler_call_details):
        """Answer /test/Echo."""
        if handler_call_details.method != "/test/Echo":
            return None
        return grpc.unary_unary_rpc_method_handler(self._echo, request_deserializer=bytes)

    async def _echo(self, request, context):
        del context
        return request


@pytest.fixture
async def ports():
    """Open ports without services."""
    ports = SchedulerServers(parse_config(("--executors", "a:1", *_ANY_PORT)))
    await ports.listen()
    yield ports
    await ports.stop()


async def test_a_service_that_is_named_after_the_port_was_opened_answers_whoever_is_connected(ports):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.numbers.port}") as channel:
        async with asyncio.timeout(30):
            await channel.channel_ready()
        call = channel.unary_unary("/test/Echo")(b"hello", timeout=30)
        await asyncio.sleep(0.05)  # the port hears of the call, as of one that comes while other ports are opened
        assert not call.done()
        ports.clients.add_generic_rpc_handlers((Echo(),))
        ports.services_are_named()
        assert await call == b"hello"


async def test_a_call_whose_time_ends_before_services_are_named_is_over(ports):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.numbers.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await channel.unary_unary("/test/Echo")(b"hello", timeout=0.05)
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        ports.clients.add_generic_rpc_handlers((Echo(),))
        ports.services_are_named()
        assert await channel.unary_unary("/test/Echo")(b"hello", timeout=30) == b"hello"


@pytest.mark.parametrize("option", ["--port", "--admin-port", "--health-port"])
async def test_a_port_in_use_is_refused_with_the_option_to_change(option):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        ports = SchedulerServers(parse_config(("--executors", "a:1", *_ANY_PORT, option, str(number))))
        with pytest.raises(PortError, match=rf"^cannot listen on 127\.0\.0\.1:{number}: .* {option}$"):
            await ports.listen()
        await ports.stop()


async def test_methods_that_no_service_has_are_unimplemented(ports):
    ports.clients.add_generic_rpc_handlers((Echo(),))
    ports.services_are_named()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.numbers.admin_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await channel.unary_unary("/test/Echo")(b"hello", timeout=30)
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED

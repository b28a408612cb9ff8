"""The fault proxy does to a connection what its names say, and otherwise nothing."""

import asyncio
import contextlib
import random

import pytest

from paceline_cli.chaos.proxy import WHOLE, Direction, FaultProxy, LinkState

PATIENCE_SECONDS = 30
SILENT_ENOUGH_SECONDS = 0.1


def chance(seed):
    return random.Random(seed)  # noqa: S311


@contextlib.asynccontextmanager
async def echo_behind_proxy():
    """A proxy before a server that sends everything back: (proxy, connect)."""

    async def echo(reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1000):
                writer.write(data)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with FaultProxy(*server.sockets[0].getsockname(), chance(1)) as proxy:
        writers = []

        async def connect():
            reader, writer = await asyncio.open_connection(*proxy.address.split(":"))
            writers.append(writer)
            return reader, writer

        async with asyncio.timeout(PATIENCE_SECONDS):
            yield proxy, connect
        for writer in writers:
            writer.close()
    server.close()


async def says_nothing(reader):
    try:
        async with asyncio.timeout(SILENT_ENOUGH_SECONDS):
            await reader.readexactly(1)
    except TimeoutError:
        return True
    return False


async def test_a_whole_link_passes_everything_and_its_end():
    data = chance(2).randbytes(3_000_000)
    async with echo_behind_proxy() as (_, connect):
        reader, writer = await connect()

        async def send():
            writer.write(data)
            await writer.drain()
            writer.write_eof()

        _, received = await asyncio.gather(send(), reader.read(-1))
    assert received == data


async def test_a_link_that_is_cut_is_reset_and_the_next_connection_works():
    async with echo_behind_proxy() as (proxy, connect):
        reader, writer = await connect()
        writer.write(b"a")
        await reader.readexactly(1)
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        reader, writer = await connect()
        writer.write(b"b")
        assert await reader.readexactly(1) == b"b"


@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
async def test_what_a_silent_link_holds_comes_when_it_is_whole_again(direction):
    async with echo_behind_proxy() as (proxy, connect):
        old_reader, old_writer = await connect()
        proxy.become(LinkState(silent=frozenset({direction})))
        new_reader, new_writer = await connect()
        for writer in (old_writer, new_writer):
            writer.write(b"late")
        assert await says_nothing(old_reader)
        assert await says_nothing(new_reader)
        proxy.become(WHOLE)
        assert await old_reader.readexactly(4) == b"late"
        assert await new_reader.readexactly(4) == b"late"


@pytest.mark.parametrize(
    "state",
    [LinkState(delay_seconds=0.01, jitter_seconds=0.05), LinkState(bytes_per_second=20_000)],
    ids=["slow", "narrow"],
)
async def test_a_slow_or_narrow_link_keeps_the_order(state):
    data = chance(3).randbytes(2000)
    async with echo_behind_proxy() as (proxy, connect):
        proxy.become(state)
        reader, writer = await connect()
        for start in range(0, len(data), 100):
            writer.write(data[start : start + 100])
            await writer.drain()
        assert await reader.readexactly(len(data)) == data


async def test_a_server_that_is_not_there_is_a_reset():
    held = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    address = held.sockets[0].getsockname()
    held.close()
    async with FaultProxy(*address, chance(1)) as proxy, asyncio.timeout(PATIENCE_SECONDS):
        reader, writer = await asyncio.open_connection(*proxy.address.split(":"))
        with pytest.raises(ConnectionResetError):
            await reader.readexactly(1)
        writer.close()

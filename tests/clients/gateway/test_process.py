"""The gateway as a process, on the event loop that it has there: how it begins, whom it serves, how it ends."""

import asyncio
import json
import subprocess
from contextlib import asynccontextmanager

import pytest

from gateway_rig import ASKING, CHAT
from paceline_client.testing import End, FakeServer, Hold, Tokens
from repository_checks.programs import BIN

SILENT = [Hold(), Tokens((1,), "a"), End()]


async def run_gateway(*options):
    return await asyncio.create_subprocess_exec(
        BIN / "paceline-gateway", *options, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@asynccontextmanager
async def running(target, *options):
    """A process; yields it and its port."""
    process = await run_gateway("--target", target, "--port", "0", "--metrics-port", "0", *options)
    try:
        yield process, json.loads(await process.stdout.readline())["port"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ask(port):
    content = json.dumps(ASKING).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
    return reader, writer


async def test_it_tells_clients_that_left_from_those_that_read_on_and_ends_in_good_order():
    async with FakeServer(SILENT) as server, running(server.target) as (process, port):
        _, leaving = await ask(port)
        await server.seen_that(lambda seen: len(seen.requests) == 1)
        leaving.close()
        await leaving.wait_closed()
        await server.seen_that(lambda seen: len(seen.cancelled) == 1)
        reader, half_closed = await ask(port)
        await server.seen_that(lambda seen: len(seen.requests) == 2)
        half_closed.write_eof()
        await asyncio.sleep(0.5)  # until after the probes
        process.terminate()
        server.release()
        assert b'"content":"a"' in await reader.readuntil(b"}}")
        half_closed.close()
        assert await process.wait() == 0
        assert len(server.seen.cancelled) == 1


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--port", "0", "--target", "localhost:x"], 2, "--target"),
        (["--host", "0.0.0.0"], 2, "--insecure"),  # noqa: S104  it is refused
        (["--cors-origins", "chat"], 2, "no origin"),
        (["--port", "taken"], 4, "choose another with --port"),
    ],
    ids=["target", "host", "origins", "port"],
)
async def test_what_it_cannot_do_it_says_in_one_line(options, code, sentence):
    async with FakeServer() as server:
        options = [str(server.port) if option == "taken" else option for option in options]
        process = await run_gateway("--metrics-port", "off", *options)
        _, told = await process.communicate()
    assert (process.returncode, sentence in told.decode()) == (code, True), told.decode()

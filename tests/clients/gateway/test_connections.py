"""Clients that are gone, slow, half closed, too large or too late; requests that wait; the end of the process."""

import asyncio
import json
import socket
import struct

import pytest

from edge_rig.edge_server import serve_edge, wait_until
from edge_rig.scripted_backend import ScriptedBackend
from edge_rig.tiny import END, LONG_MODEL, encode
from gateway_rig import ASKING, CHAT, serve_gateway
from paceline.plan.values import FinishReason
from paceline_client import Limits
from paceline_client.testing import End, FakeServer, Hold, Tokens
from paceline_gateway import connection, exchange, process

HELD = [Tokens((1,), "a"), Hold(), Tokens((2,), "b"), End()]
SILENT = [Hold(), Tokens((1,), "a"), End()]
STREAMED = ASKING | {"stream": True}


def close(writer):
    writer.close()


def reset(writer):
    """Without a word: what is under way is lost."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("body", [STREAMED, ASKING], ids=["streamed", "whole"])
@pytest.mark.parametrize("script", [HELD, SILENT], ids=["held", "silent"])
async def test_what_nobody_waits_for_is_cancelled(leave, body, script):
    async with FakeServer(script) as server, serve_gateway(server.target) as gateway:
        reader, writer = await gateway.ask(body)
        await server.seen_that(lambda seen: seen.requests)
        if body is STREAMED and script is HELD:
            await reader.readuntil(b'"a"')
        leave(writer)
        await server.seen_that(lambda seen: seen.cancelled == [seen.requests[0].request_id])
        server.release()


@pytest.mark.parametrize("body", [STREAMED, ASKING], ids=["streamed", "whole"])
async def test_a_client_that_has_shut_its_side_down_still_gets_its_answer(body):
    async with FakeServer(HELD) as server, serve_gateway(server.target) as gateway:
        reader, writer = await gateway.ask(body | {"max_tokens": 2})
        await server.seen_that(lambda seen: seen.requests)
        writer.write_eof()
        await asyncio.sleep(0.5)  # until after the probes: nothing tells that none comes any more
        server.release()
        answer = await reader.readuntil(b'"stop"')
        assert (b'"b"' if body is STREAMED else b'"ab"') in answer
        assert server.seen.cancelled == []


async def test_a_stream_says_that_it_waits_and_its_errors_come_in_it(monkeypatch):
    monkeypatch.setattr(exchange, "_SILENCE_S", 0.05)
    async with FakeServer(SILENT) as server, serve_gateway(server.target) as gateway:
        reader, _ = await gateway.ask(STREAMED)
        await reader.readuntil(b": waiting\n\n")
        await reader.readuntil(b": waiting\n\n")
        server.release()
        await reader.readuntil(b"data: [DONE]\n\n")


async def test_a_reader_that_is_too_slow_loses_its_stream_alone(monkeypatch):
    monkeypatch.setattr(process, "_LIMITS", Limits(max_buffered_tokens=64))
    async with serve_edge(ScriptedBackend(LONG_MODEL)) as edge, serve_gateway(edge.address) as gateway:
        reader, _ = await gateway.ask(STREAMED, receive_bytes=4096)
        await wait_until(lambda: edge.backend.asked.requests)
        (slow,), (served,) = edge.backend.asked.requests, gateway.gateway._state.connections
        served.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        while not edge.backend.asked.cancelled:
            edge.backend.step({slow: encode("a")})
            await asyncio.sleep(0.001)
        asking = asyncio.create_task(gateway.post(CHAT, ASKING))
        await wait_until(lambda: len(edge.backend.asked.requests) == 2)
        edge.backend.step(
            {max(edge.backend.asked.requests): [END]}, {max(edge.backend.asked.requests): FinishReason.STOP}
        )
        assert (await asking).status_code == 200
        rest = await read_to_the_end(reader)
        assert b'"code":"slow_reader"' in rest
        assert b"[DONE]" not in rest


async def read_to_the_end(reader):
    """Of a chunked body."""
    rest = b""
    while not rest.endswith(b"\r\n0\r\n\r\n"):
        rest += await reader.read(1 << 20)
    return rest


async def status_of(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    error = json.loads(await reader.readexactly(length))["error"]
    assert error["type"] == "invalid_request_error"
    return int(head.split(b" ")[1])


async def test_a_request_that_does_not_become_whole_is_given_up():
    async with FakeServer() as server, serve_gateway(server.target, request_s=0.2) as gateway:
        silent, _ = await gateway.connect()
        in_head, writer_of_head = await gateway.connect()
        writer_of_head.write(b"GET /health HTTP/1.1\r\nx-a: ")
        in_body, writer_of_body = await gateway.connect()
        writer_of_body.write(f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n".encode())
        assert await silent.read() == b""
        assert await status_of(in_head) == 408
        assert await status_of(in_body) == 408
        assert (await gateway.http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("head", "body", "status"),
    [
        (f"GET /health HTTP/1.1\r\nx-a: {'a' * 40_000}\r\n\r\n", b"", 431),
        (f"GET /health HTTP/1.1\r\nx-a: {'a' * 40_000}", b"", 431),
        (f"GET /{'a' * 40_000} HTTP/1.1\r\n\r\n", b"", 431),
        (f"POST {CHAT} HTTP/1.1\r\ncontent-length: 5000000\r\n\r\n", b"a" * 5_000_000, 413),
        (f"POST {CHAT} HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n4c4b40\r\n", b"a" * 5_000_000, 413),
        ("nonsense\r\n\r\n", b"", 400),
    ],
    ids=["a header", "a header without end", "a path", "a body", "a body in chunks", "no HTTP"],
)
async def test_what_is_too_large_is_refused_and_read_to_its_end(head, body, status):
    async with FakeServer() as server, serve_gateway(server.target) as gateway:
        reader, writer = await gateway.connect()
        writer.write(head.encode() + body)
        assert await status_of(reader) == status


async def test_one_connection_serves_many_requests_one_after_the_other():
    async with FakeServer() as server, serve_gateway(server.target, request_s=0.3) as gateway:
        reader, writer = await gateway.connect()
        for _ in range(3):
            writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            await reader.readuntil(b"{}")
            await asyncio.sleep(0.2)  # together longer than one request may take
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" + b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n")
        assert b"version" not in await reader.read()


async def test_connections_are_bounded(monkeypatch):
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 1)
    async with FakeServer() as server, serve_gateway(server.target) as gateway:
        await gateway.connect()
        one_more, _ = await gateway.connect()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await one_more.readexactly(1)


async def test_a_drain_lets_what_runs_finish_and_tells_load_balancers(monkeypatch):
    monkeypatch.setattr(process, "_LEAVE_S", 0.3)
    async with FakeServer(HELD) as server, serve_gateway(server.target) as gateway:
        reader, _ = await gateway.ask(STREAMED)
        await reader.readuntil(b'"a"')
        assert (await gateway.http.get("/ready")).status_code == 200
        draining = asyncio.create_task(gateway.gateway.drain(30.0, asyncio.Event()))
        await asyncio.sleep(0)
        away = await gateway.http.get("/ready")
        assert (away.status_code, away.json()["error"]["code"]) == (503, "draining")
        server.release()
        await reader.readuntil(b"data: [DONE]\n\n")
        assert await draining


async def test_a_drain_that_is_hurried_ends_what_runs_with_an_error():
    async with FakeServer(HELD) as server:
        async with serve_gateway(server.target) as gateway:
            reader, _ = await gateway.ask(STREAMED)
            await reader.readuntil(b'"a"')
            hurrying = asyncio.Event()
            hurrying.set()
            assert not await gateway.gateway.drain(30.0, hurrying)
        assert b'data: {"error"' in await reader.read()
        assert server.seen.cancelled


async def test_without_a_scheduler_it_is_healthy_and_not_ready():
    async with serve_gateway("127.0.0.1:1") as gateway:
        assert (await gateway.http.get("/health")).status_code == 200
        asking = asyncio.create_task(gateway.post(CHAT, ASKING | {"model": "m"}))
        refused, failed = await gateway.http.get("/ready"), await asking
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert (failed.status_code, failed.headers["retry-after"]) == (503, "1")

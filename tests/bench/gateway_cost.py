"""What a gateway costs beside the client library: CPU per chunk, and time to the first token.

    paceline up --runner simulated
    PYTHONPATH=tests/bench python -m gateway_cost --target localhost:50051 --streams 1,32,256

Both sides ask the same scheduler for the same outputs, by turns. A chunk is a token. The gateway's CPU is that of its
process; that of the client library is this process's while nothing else runs in it.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from paceline_client import AsyncClient

_PROMPT = [1, 2, 3, 4]
_TICKS = os.sysconf("SC_CLK_TCK")
Ask = Callable[[int], Awaitable[tuple[float, int]]]
"""Generates so many tokens; returns the seconds to the first one, and the number of chunks."""


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def ask_gateway(port: int, num_tokens: int) -> tuple[float, int]:
    body = {"prompt": _PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    content = json.dumps(body | {"model": "simulated"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    began, first, num_chunks = time.perf_counter(), None, 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + content)
    while line := await reader.readline():
        if line.startswith(b'data: {"id"') and b'"finish_reason":null' in line:
            first = first or time.perf_counter()
            num_chunks += 1
    writer.close()
    return (first or time.perf_counter()) - began, num_chunks


async def ask_client(client: AsyncClient, num_tokens: int) -> tuple[float, int]:
    began, first, num_chunks = time.perf_counter(), None, 0
    stopping = {"max_tokens": num_tokens, "ignore_eos": True}
    async for delta in client.stream(
        token_ids=_PROMPT, model="simulated", sampling={"temperature": 0}, stopping=stopping
    ):
        first = first or time.perf_counter()
        num_chunks += bool(delta.token_ids)
    return (first or time.perf_counter()) - began, num_chunks


async def us_per_chunk(ask: Ask, pid: int, num_streams: int, num_tokens: int) -> float:
    await asyncio.gather(*(ask(2) for _ in range(num_streams)))
    before = cpu_s(pid)
    found = await asyncio.gather(*(ask(num_tokens) for _ in range(num_streams)))
    return 1e6 * (cpu_s(pid) - before) / sum(num_chunks for _, num_chunks in found)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="localhost:50051")
    parser.add_argument("--streams", default="1,32")
    parser.add_argument("--tokens", type=int, default=20_000, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    program = Path(sys.executable).with_name("paceline-gateway")
    command = (program, "--target", options.target, "--port", "0", "--metrics-port", "off")
    gateway = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert gateway.stdout is not None, "it was asked for"
    port = json.loads(await gateway.stdout.readline())["port"]
    async with AsyncClient(options.target) as client:
        asks: dict[str, tuple[Ask, int]] = {
            "gateway": (lambda num_tokens: ask_gateway(port, num_tokens), gateway.pid),
            "client": (lambda num_tokens: ask_client(client, num_tokens), os.getpid()),
        }
        for num_streams in map(int, options.streams.split(",")):
            for name, (ask, pid) in asks.items():
                num_tokens = min(options.tokens // num_streams, 4000)
                costs = [await us_per_chunk(ask, pid, num_streams, num_tokens) for _ in range(options.rounds)]
                print(f"{num_streams} streams, {name}: {statistics.median(costs):.1f} us of CPU per chunk", flush=True)
        times: dict[str, list[float]] = {name: [] for name in asks}
        for _ in range(200):
            for name, (ask, _) in asks.items():
                times[name].append((await ask(1))[0])
        for name, seconds in times.items():
            quantiles = statistics.quantiles(seconds, n=100)
            print(f"{name}: first token after {1e3 * quantiles[49]:.2f} ms p50, {1e3 * quantiles[98]:.2f} ms p99")
    gateway.terminate()
    await gateway.wait()


if __name__ == "__main__":
    asyncio.run(main())

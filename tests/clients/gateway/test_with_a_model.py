"""The gateway before a real scheduler and a real model: the text is the model's, and nothing is computed twice."""

import asyncio
import json
import signal
import subprocess
from contextlib import asynccontextmanager

import httpx2
import pytest

from gateway_rig import CHAT, events_of, serve_gateway
from paceline_client import AsyncClient
from repository_checks.programs import BIN

MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
LONG = {"messages": MESSAGES, "temperature": 0, "max_tokens": 48, "ignore_eos": True, "stream": True}


def text_of(content):
    """Of a stream that ended well."""
    *chunks, last = events_of(content)
    assert last == "[DONE]"
    return "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks)


@asynccontextmanager
async def begun(http, url, key):
    """A keyed request of which some of the output has come; yields the rest's lines."""
    async with http.stream("POST", url + CHAT, json=LONG, headers={"idempotency-key": key}) as response:
        lines = response.aiter_lines()
        async for line in lines:
            if '"content":' in line:
                break
        yield lines


async def num_generated(system):
    """How many tokens the scheduler has seen executors generate."""
    async with httpx2.AsyncClient() as http:
        shown = (await http.get(f"http://127.0.0.1:{system.port + 6}/metrics")).text
    return sum(
        float(line.split()[1]) for line in shown.splitlines() if line.startswith("paceline_generation_tokens_total")
    )


async def test_a_chat_is_what_the_client_library_gets(running_system):
    async with AsyncClient(running_system.api) as client, serve_gateway(running_system.api) as gateway:
        expected = await client.generate(
            messages=MESSAGES, sampling={"temperature": 0}, stopping={"max_tokens": 48, "ignore_eos": True}
        )
        streamed, whole = [await gateway.post(CHAT, LONG | {"stream": stream}) for stream in (True, False)]
        assert text_of(streamed.text) == expected.text
        choice = whole.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (expected.text, "length")
        assert whole.json()["usage"]["completion_tokens"] == 48


async def test_a_request_sent_again_with_its_key_is_told_whole_while_it_runs_and_after_its_end(running_system):
    async with serve_gateway(running_system.api) as one, serve_gateway(running_system.api) as other:
        expected = text_of((await one.post(CHAT, LONG)).text)
        async with begun(one.http, one.url, "sent-again") as first:
            again = await other.post(CHAT, LONG, {"idempotency-key": "sent-again"})
            told = [line async for line in first if line]
        assert json.loads(told[-1].removeprefix("data: "))["error"]["code"] == "conflict"
        assert text_of(again.text) == expected
        num_before = await num_generated(running_system)
        late = await one.post(CHAT, LONG, {"idempotency-key": "sent-again"})
        assert text_of(late.text) == expected
        assert await num_generated(running_system) == num_before


async def test_what_a_killed_gateway_has_begun_the_next_one_tells_from_the_beginning(running_system):
    command = (BIN / "paceline-gateway", "--target", running_system.api, "--port", "0", "--metrics-port", "off")
    killed = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    port = json.loads(await killed.stdout.readline())["port"]
    async with serve_gateway(running_system.api) as next_one, httpx2.AsyncClient() as http:
        expected = text_of((await next_one.post(CHAT, LONG)).text)
        async with begun(http, f"http://127.0.0.1:{port}", "survives") as first:
            killed.send_signal(signal.SIGKILL)
            await killed.wait()
            with pytest.raises(httpx2.TransportError):
                async for _ in first:
                    pass
        again = await next_one.post(CHAT, LONG, {"idempotency-key": "survives"})
        assert text_of(again.text) == expected

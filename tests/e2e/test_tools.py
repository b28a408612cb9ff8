"""A model that calls tools, as real processes serve it."""

import json
import os
import random
import signal
from dataclasses import replace

import jsonschema

from paceline_cli.chaos.system import LocalSystem
from paceline_cli.supervisor.programs import Deployment, free_ports
from paceline_client import AsyncClient, Message, Output, Sampling, Stopping, Tool, ToolChoice
from paceline_client.results import ToolCallPart
from part_rig import CHAT_TEMPLATES
from random_models import TINY_CONFIG, RandomCheckpoint, gguf_parts

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
SCHEMA = {
    "type": "object",
    "properties": {"towns": {"type": "array", "items": {"enum": ["Paris", "Rome"]}, "minItems": 15, "maxItems": 20}},
    "required": ["towns"],
    "additionalProperties": False,
}


class Silent:
    def on_event(self, event):
        """A scheduler ends here."""


def calling_model(path):
    """A GGUF file of random weights, with Qwen3's chat template and the marks of its outputs."""
    parts = gguf_parts(RandomCheckpoint(replace(TINY_CONFIG, max_model_len=4096)))
    parts.metadata["tokenizer.ggml.tokens"] += MARKS
    parts.metadata["tokenizer.ggml.token_type"] += [4] * len(MARKS)
    parts.metadata["tokenizer.chat_template"] = CHAT_TEMPLATES["Qwen-Qwen3-0.6B"]
    return parts.write(path)


def parts_of(deltas):
    """Neighbours of a kind joined, as (kind, call, id and name, text)."""
    joined = []
    for part in (part for delta in deltas for part in delta.parts):
        is_call = isinstance(part, ToolCallPart)
        kind, text = (type(part), part.index if is_call else None), part.arguments if is_call else part.text
        told = (part.id, part.name) if is_call else None
        if joined and joined[-1][0] == kind:
            joined[-1][2] += text
        else:
            joined.append([kind, told, text])
    return joined


async def test_a_call_goes_on_where_it_was_when_its_scheduler_died(tmp_path):
    """It is, id and all, that of the next scheduler's whole output, and valid. Tenants share no request."""
    deployment = Deployment(
        model=str(calling_model(tmp_path / "calling.gguf")),
        host="127.0.0.1",
        ports=free_ports(1),
        shutdown_timeout_seconds=10,
        num_threads=1,
    )
    system = LocalSystem(deployment, (), Silent(), random.Random(0))  # noqa: S311  no secret

    def asked(client, tenant):
        return client.stream(
            messages=[Message("user", "Where is it warm?")],
            tools=[Tool("weather", "Of towns, now", SCHEMA)],
            tool_choice=ToolChoice(mode="required", parallel_calls=False),
            sampling=Sampling(temperature=1.0, seed=59),
            stopping=Stopping(max_tokens=1000),
            output=Output(parts=True),
            request_id="asked-twice",
            tenant=tenant,
        )

    async with system:
        await system.ready()
        async with AsyncClient(system.target) as client:
            (scheduler,) = deployment.scheduler_names
            killed, deltas = 0, []
            async with asked(client, "disturbed") as stream:
                async for delta in stream:
                    deltas.append(delta)
                    if not killed and any(isinstance(part, ToolCallPart) and part.arguments for part in delta.parts):
                        killed = await system.process_id(scheduler)
                        os.kill(killed, signal.SIGKILL)
                result = stream.result
            assert await system.process_id(scheduler) != killed > 0
            async with asked(client, "undisturbed") as stream:
                whole = [delta async for delta in stream]
                expected = stream.result

    assert parts_of(deltas) == parts_of(whole)
    assert result.tool_calls == expected.tool_calls
    (call,) = result.tool_calls
    assert call.name == "weather"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)

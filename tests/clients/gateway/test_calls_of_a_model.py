"""A random model that a grammar holds to calls, in the form of a real chat template, before OpenAI's client."""

import openai
import pytest

from gateway_rig import ASKING, serve_gateway
from paceline_client import AsyncClient
from part_rig.calling_model import write_calling_model
from service_processes.measured import event, module_process, scheduler_of

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}}
    for name in ("weather", "map")
]
ASK = {
    "model": "caller",
    "messages": ASKING["messages"],
    "tools": TOOLS,
    "parallel_tool_calls": False,
    "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
}


@pytest.mark.slow  # the same calls as of a fake server, from a model
async def test_a_model_calls_what_it_is_asked_to(tmp_path):
    options = ("--model", str(write_calling_model(tmp_path / "caller")), "--port", "0", "--health-port", "0")
    async with (
        module_process("paceline_executor", *options, "--metrics-port", "0") as executor,
        scheduler_of(f"127.0.0.1:{(await event(executor, 'ready'))['port']}") as (_, ready),
        serve_gateway(target := f"127.0.0.1:{ready['port']}") as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as sdk,
    ):
        async with AsyncClient(target) as client:
            await client.wait_until_ready(60)
        for choice, names, reason in (
            ("required", ("weather", "map"), "tool_calls"),
            ({"type": "function", "function": {"name": "map"}}, ("map",), "stop"),
        ):
            whole = (await sdk.chat.completions.create(**ASK, tool_choice=choice, seed=1)).choices[0]
            async with sdk.chat.completions.stream(**ASK, tool_choice=choice, seed=1) as events:
                streamed = (await events.get_final_completion()).choices[0]
            (call,) = whole.message.tool_calls
            (told,) = streamed.message.tool_calls
            assert (whole.message.content, whole.finish_reason, streamed.finish_reason) == (None, reason, reason)
            assert call.function.name in names
            assert call.function.name == told.function.name
            assert call.function.arguments == told.function.arguments
            assert told.function.parsed_arguments["city"] in ("Paris", "Oslo")

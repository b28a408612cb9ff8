"""`/v1/responses`: events and whole answers are read by OpenAI's types and its client."""

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway_rig import serve_gateway
from paceline_client import FinishReason
from paceline_client.testing import End, FakeServer, Tokens, say

RESPONSES = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)
CUT = [Tokens((1,), "a"), End(FinishReason.LENGTH, num_prompt_tokens=3, num_cached_tokens=2)]


async def test_the_events_of_a_stream_are_numbered_and_add_up_to_the_response():
    async with FakeServer(say("one two")) as server, serve_gateway(server.target) as gateway:
        shown = await gateway.post(RESPONSES, {"input": "hi", "instructions": "Be kind.", "stream": True})
        blocks = [block.split("\n") for block in shown.text.split("\n\n")[:-1]]
        events = [EVENT.validate_json(data.removeprefix("data: ")) for _, data in blocks]
        assert [name.removeprefix("event: ") for name, _ in blocks] == [event.type for event in events]
        assert [event.type.removeprefix("response.") for event in events] == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
        ]  # fmt: skip
        assert [event.sequence_number for event in events] == list(range(10))
        assert "".join(event.delta for event in events[4:6]) == events[6].text == "one two"
        assert events[-1].response.output_text == "one two"
        assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
        said = [(turn.role, turn.content) for turn in server.seen.requests[0].chat.messages]
        assert said == [("system", "Be kind."), ("user", "hi")]


async def test_an_output_that_was_cut_is_incomplete():
    async with FakeServer(CUT) as server, serve_gateway(server.target) as gateway:
        form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
        parts = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
        shown = await gateway.post(RESPONSES, {"input": parts, "max_output_tokens": 1, "text": form, "store": False})
        response = Response.model_validate_json(shown.content)
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens) == (3, 2)
        assert server.seen.requests[0].structured.json_schema == '{"type":"object"}'
        assert server.seen.requests[0].stopping.max_tokens == 1


async def test_what_needs_a_memory_or_is_incomplete_is_refused_by_name():
    async with FakeServer(say("hi")) as server, serve_gateway(server.target) as gateway:
        for body, param in (
            ({"input": "x", "store": True}, "store"),
            ({"input": "x", "previous_response_id": "r"}, "previous_response_id"),
            ({"input": "x", "background": True}, "background"),
            ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
            ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
            ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
            ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
            ({"input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
            ({"input": "x", "tool_choice": {"type": "function"}}, "tool_choice.name"),
            ({"input": "x", "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
            ({"input": "x", "reasoning": {"summary": "detailed"}}, "reasoning.summary"),
            ({"input": []}, "input"),
            ({}, "input"),
        ):
            refused = await gateway.post(RESPONSES, body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_the_sdk_reads_both():
    async with (
        FakeServer(say("one two")) as server,
        serve_gateway(server.target) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as sdk,
    ):
        assert (await sdk.responses.create(model="fake", input="hi")).output_text == "one two"
        async with sdk.responses.stream(model="fake", input="hi") as events:
            assert (await events.get_final_response()).output_text == "one two"

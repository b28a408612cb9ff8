"""Tools and reasoning as OpenAI's API tells them, read by its own types, strictly, and by its client."""

import asyncio
import dataclasses
import json

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from edge_rig.edge_server import serve_edge
from edge_rig.scripted_backend import ScriptedBackend
from edge_rig.tiny import MODEL as PLAIN_MODEL
from edge_rig.tokenizers import byte_level_tokenizer, served_model, tokenizer_source
from gateway_rig import ASKING, CHAT, events_of, serve_gateway
from paceline.forms.library import LIBRARY
from paceline.plan.values import FinishReason as Finish
from paceline.plan.values import TokenLogprobs
from paceline.v1.inference_pb2 import Model
from paceline_client import FinishReason, ReasoningPart, TextPart, ToolCallPart
from paceline_client.testing import End, FakeServer, Tokens, say
from paceline_client.testing.server import DEFAULT_MODEL
from part_rig import CHAT_TEMPLATES

RESPONSES = "/v1/responses"
EVENT = TypeAdapter(ResponseStreamEvent)
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "It is.", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "g"}},
]
ASKING_TOOLS = ASKING | {"tools": TOOLS}
THINKING = [Tokens((1,), "<think>", parts=()), Tokens((2,), "Hm.", parts=(ReasoningPart("Hm."),))]
CALLING = [
    Tokens((3,), "Wait.", parts=(TextPart("Wait."),)),
    Tokens((4,), "…", parts=(ToolCallPart(0, '{"a": ', "abcdefg00", "f"),)),
    Tokens((5, 6), "…", parts=(ToolCallPart(0, '"ü"}'), ToolCallPart(1, "", "abcdefg01", "g"))),
    Tokens((7,), "…", parts=(ToolCallPart(1, "{}"),)),
]
SAID = [("f", '{"a": "ü"}'), ("g", "{}")]
REASONER = Model()
REASONER.CopyFrom(DEFAULT_MODEL)
REASONER.supports_reasoning = True


def sdk_of(gateway):
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0)


def told(content):
    """The choices of a stream that ended well."""
    *data, last = events_of(content)
    assert last == "[DONE]"
    for each in data:
        ChatCompletionChunk.model_validate_json(each, strict=True)
    return [choice for each in data for choice in json.loads(each)["choices"]]


async def test_a_call_is_named_once_and_its_arguments_follow():
    async with FakeServer([*CALLING, End()]) as server, serve_gateway(server.target) as gateway:
        choices = told((await gateway.post(CHAT, ASKING_TOOLS | {"stream": True})).text)
    assert [(choice["delta"], choice["finish_reason"]) for choice in choices] == [
        ({"role": "assistant", "content": "Wait."}, None),
        ({"tool_calls": [{"index": 0, "id": "abcdefg00", "type": "function",
                          "function": {"name": "f", "arguments": ""}}]}, None),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '{"a": '}}]}, None),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '"ü"}'}}]}, None),
        ({"tool_calls": [{"index": 1, "id": "abcdefg01", "type": "function",
                          "function": {"name": "g", "arguments": ""}}]}, None),
        ({"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}, None),
        ({}, "tool_calls"),
    ]  # fmt: skip


async def test_an_output_that_only_calls_has_no_content():
    async with FakeServer([*CALLING[1:], End()]) as server, serve_gateway(server.target) as gateway:
        first, *_ = told((await gateway.post(CHAT, ASKING_TOOLS | {"stream": True})).text)
        whole = ChatCompletion.model_validate_json((await gateway.post(CHAT, ASKING_TOOLS)).content, strict=True)
    assert (first["delta"]["role"], first["delta"]["content"]) == ("assistant", None)
    assert first["delta"]["tool_calls"][0]["id"] == "abcdefg00"
    (choice,) = whole.choices
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == SAID
    assert [call.id for call in choice.message.tool_calls] == ["abcdefg00", "abcdefg01"]


@pytest.mark.parametrize(
    ("steps", "choice", "reason"),
    [
        pytest.param(CALLING, {"type": "function", "function": {"name": "f"}}, "stop", id="the named one"),
        pytest.param(CALLING, "required", "tool_calls", id="any"),
        pytest.param(say("No.")[:-1], "auto", "stop", id="none"),
    ],
)
async def test_an_end_with_calls_says_so_unless_their_tool_was_named(steps, choice, reason):
    async with FakeServer([*steps, End()]) as server, serve_gateway(server.target) as gateway:
        body = ASKING_TOOLS | {"tool_choice": choice}
        *_, last = told((await gateway.post(CHAT, body | {"stream": True})).text)
        whole = (await gateway.post(CHAT, body)).json()["choices"][0]
    assert last["finish_reason"] == whole["finish_reason"] == reason


async def test_a_call_that_was_cut_claims_no_call():
    async with FakeServer([CALLING[1], End(FinishReason.LENGTH)]) as server, serve_gateway(server.target) as gateway:
        *_, last = told((await gateway.post(CHAT, ASKING_TOOLS | {"stream": True})).text)
        whole = (await gateway.post(CHAT, ASKING_TOOLS)).json()["choices"][0]
    assert last["finish_reason"] == whole["finish_reason"] == "length"
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": '


async def test_reasoning_of_a_model_that_reasons_is_apart_without_being_asked_for():
    async with (
        FakeServer([*THINKING, Tokens((3,), "Yes.", parts=(TextPart("Yes."),)), End()], models=[REASONER]) as server,
        serve_gateway(server.target) as gateway,
    ):
        choices = told((await gateway.post(CHAT, ASKING | {"stream": True})).text)
        whole = (await gateway.post(CHAT, ASKING)).json()
        assert server.seen.requests[0].output.parts
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": None},
        {"reasoning_content": "Hm."},
        {"content": "Yes."},
        {},
    ]
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_a_model_that_does_not_reason_is_asked_for_no_parts():
    async with FakeServer(say("hi")) as server, serve_gateway(server.target) as gateway:
        await gateway.post(CHAT, ASKING)
        assert not server.seen.requests[0].output.HasField("parts")


async def test_the_sdk_reads_calls_and_parses_their_arguments():
    tools = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
    ask = {"model": "fake", "messages": ASKING["messages"]}
    async with (
        FakeServer([*THINKING, *CALLING, End()]) as server,
        serve_gateway(server.target) as gateway,
        sdk_of(gateway) as sdk,
        sdk.chat.completions.stream(**ask, tools=tools) as events,
    ):
        done = [event async for event in events if event.type == "tool_calls.function.arguments.done"]
        final = (await events.get_final_completion()).choices[0]
    assert [(event.index, event.name, event.arguments) for event in done] == [(0, *SAID[0]), (1, *SAID[1])]
    assert done[0].parsed_arguments == {"a": "ü"}
    assert [(call.function.name, call.function.arguments) for call in final.message.tool_calls] == SAID
    assert (final.message.content, final.finish_reason) == ("Wait.", "tool_calls")


HISTORY = [
    {"role": "user", "content": "hi", "name": "anna"},
    {"role": "assistant", "content": None, "reasoning_content": "Hm.",
     "tool_calls": [{"id": "abcdefg00", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}]},
    {"role": "tool", "tool_call_id": "abcdefg00", "content": [{"type": "text", "text": "7"}]},
    {"role": "assistant", "content": "Se", "reasoning": "So."},
]  # fmt: skip
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
    {"type": "function_call", "call_id": "abcdefg00", "name": "f", "arguments": "{}"},
    {"type": "function_call", "call_id": "abcdefg01", "name": "g", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "abcdefg00", "output": "7"},
    {"type": "function_call_output", "call_id": "abcdefg01", "output": [{"type": "input_text", "text": "8"}]},
]


def turns_of(request):
    """As the scheduler gets them."""
    return [
        (
            turn.role,
            turn.content,
            turn.reasoning,
            [(call.id, call.name, call.arguments) for call in turn.tool_calls],
            turn.tool_call_id,
            turn.name,
        )
        for turn in request.chat.messages
    ]


async def test_tools_and_turns_reach_the_scheduler():
    body = ASKING_TOOLS | {
        "messages": HISTORY,
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False, "depth": 2},
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    async with FakeServer([*CALLING, End()]) as server, serve_gateway(server.target) as gateway:
        assert (await gateway.post(CHAT, body)).status_code == 200
        (request,) = server.seen.requests
    assert turns_of(request) == [
        ("user", "hi", "", [], "", "anna"),
        ("assistant", "", "Hm.", [("abcdefg00", "f", '{"a": "x"}')], "", ""),
        ("tool", "7", "", [], "abcdefg00", ""),
        ("assistant", "Se", "So.", [], "", ""),
    ]
    chat = request.chat
    assert [(tool.name, tool.description, tool.strict) for tool in chat.tools] == [
        ("f", "It is.", True),
        ("g", "", False),
    ]
    assert chat.tools[0].parameters_json_schema == json.dumps(SCHEMA, separators=(",", ":"))  # in this order
    assert not chat.tools[1].HasField("parameters_json_schema")
    assert (chat.tool_choice.name, chat.tool_choice.parallel_calls) == ("f", False)
    given = {name: getattr(each, each.WhichOneof("value")) for name, each in chat.template_arguments.items()}
    assert given == {"reasoning_effort": "low", "enable_thinking": False, "depth": 2}
    assert chat.continue_final_message


async def test_items_of_one_answer_are_one_turn():
    async with FakeServer(say("hi")) as server, serve_gateway(server.target) as gateway:
        tools = [{"type": "function", **TOOLS[0]["function"]}]
        choice = {"type": "function", "name": "f"}
        response = await gateway.post(RESPONSES, {"input": ITEMS, "tools": tools, "tool_choice": choice,
                                                  "reasoning": {"effort": "low"}})  # fmt: skip
        (request,) = server.seen.requests
    assert turns_of(request) == [
        ("user", "hi", "", [], "", ""),
        ("assistant", "Wait.", "Hm.", [("abcdefg00", "f", "{}"), ("abcdefg01", "g", "{}")], "", ""),
        ("tool", "7", "", [], "abcdefg00", ""),
        ("tool", "8", "", [], "abcdefg01", ""),
    ]
    assert request.chat.tool_choice.name == "f"
    assert request.chat.template_arguments["reasoning_effort"].text == "low"
    shown = Response.model_validate_json(response.content)
    assert (shown.tools[0].name, shown.tool_choice.name, shown.output_text) == ("f", "f", "hi")


async def test_events_tell_reasoning_text_and_calls_as_items_and_end_with_all_of_them():
    body = {"input": "hi", "tools": [{"type": "function", "name": "f"}, {"type": "function", "name": "g"}]}
    async with (
        FakeServer([*THINKING, *CALLING, End()]) as server,
        serve_gateway(server.target) as gateway,
        sdk_of(gateway) as sdk,
    ):
        content = (await gateway.post(RESPONSES, body | {"stream": True})).text
        whole = Response.model_validate_json((await gateway.post(RESPONSES, body)).content)
        async with sdk.responses.stream(model="fake", **body) as streamed:
            final = await streamed.get_final_response()
    events = [EVENT.validate_json(block.split("\ndata: ")[1]) for block in content.split("\n\n")[:-1]]
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in events if event.type == "response.output_item.added"] == [0, 1, 2, 3]
    assert len({item.id for item in done}) == 4
    for response in (events[-1].response, whole):
        assert response.output == done or [item.type for item in response.output] == [item.type for item in done]
        reasoning, message, *calls = response.output
        assert (reasoning.content[0].text, message.content[0].text) == ("Hm.", "Wait.")
        assert [(call.name, call.arguments, call.call_id) for call in calls] == [
            (*SAID[0], "abcdefg00"), (*SAID[1], "abcdefg01"),
        ]  # fmt: skip
        assert {item.status for item in response.output} == {"completed"}
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]


TOKENIZER = byte_level_tokenizer()
TOKENIZER.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
SOURCE = tokenizer_source(TOKENIZER, chat_template=CHAT_TEMPLATES["Qwen-Qwen3-0.6B"], eos_token="<|im_end|>")
MODEL = dataclasses.replace(served_model(SOURCE, max_model_len=4096, vocab_size=410), structured_output=LIBRARY)


def tool(**fields):
    return {"type": "function", "function": {"name": "f"} | fields}


def turn(**fields):
    function = {"name": "f", "arguments": "{}"} | fields
    return {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}]}


UNSUPPORTED = "unsupported_parameter"
REFUSED = [
    # As the gateway finds it.
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", UNSUPPORTED),
    ({"tools": [{"type": "function"}]}, "tools[0].function", None),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", None),
    ({"tools": {}}, "tools", None),
    ({"tools": [tool(parameters="{}")]}, "tools[0].function.parameters", None),
    ({"tool_choice": "any"}, "tool_choice", None),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice", UNSUPPORTED),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", None),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]}]},
     "messages[0].tool_calls[0].type", UNSUPPORTED),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function", None),
    ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt", None),
    ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs.x", None),
    # As the scheduler finds it.
    ({"tools": [tool(name="no space")]}, "tools[0].function.name", None),
    ({"tools": [tool(), tool()]}, "tools[1].function.name", None),
    ({"tools": [tool(parameters={"type": "nothing"}, strict=True)], "tool_choice": "required"},
     "tools[0].function.parameters", None),
    ({"tool_choice": "required"}, "tool_choice", None),
    ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "h"}}},
     "tool_choice.function.name", None),
    (turn(arguments="[]"), "messages[0].tool_calls[0].function.arguments", None),
    (turn(name=""), "messages[0].tool_calls[0].function.name", None),
    ({"reasoning_effort": "high"}, "reasoning_effort", None),
    ({"chat_template_kwargs": {"nobody_reads_it": 1}}, "chat_template_kwargs.nobody_reads_it", None),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages", None),
    (turn() | {"continue_final_message": True}, "continue_final_message", None),
]  # fmt: skip


async def test_what_is_wrong_with_tools_is_refused_by_its_name_in_openais_api():
    async with serve_edge(ScriptedBackend(MODEL)) as edge, serve_gateway(edge.address) as gateway:
        for more, param, code in REFUSED:
            response = await gateway.post(CHAT, ASKING | more)
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["code"]) == (400, param, code), (more, error)
        flat = {"input": "hi", "tools": [{"type": "function", "name": "no space"}]}
        assert (await gateway.post(RESPONSES, flat)).json()["error"]["param"] == "tools[0].name"
        effort = {"input": "hi", "reasoning": {"effort": "low"}}
        assert (await gateway.post(RESPONSES, effort)).json()["error"]["param"] == "reasoning.effort"


async def test_a_model_without_marks_of_calls_takes_no_tools():
    async with serve_edge(ScriptedBackend(PLAIN_MODEL)) as edge, serve_gateway(edge.address) as gateway:
        response = await gateway.post(CHAT, ASKING_TOOLS)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "tools", UNSUPPORTED)
    assert "no marks of calls are known" in error["message"]


async def test_log_probabilities_have_the_tokens_of_all_parts():
    tokens = [
        *TOKENIZER.encode("<think>é</think>").ids,
        *TOKENIZER.encode("Hi").ids,
        TOKENIZER.token_to_id("<|im_end|>"),
    ]
    backend = ScriptedBackend(MODEL)

    async def play():
        handle = (await backend.next_request()).handle
        for number, token in enumerate(tokens):
            is_last = number == len(tokens) - 1
            logprobs = TokenLogprobs(token, -0.5, ((token, -0.5),))
            backend.step({handle: [token]}, {handle: Finish.STOP} if is_last else None, logprobs={handle: (logprobs,)})

    body = ASKING | {"logprobs": True, "top_logprobs": 1, "stream": True}
    async with serve_edge(backend) as edge, serve_gateway(edge.address) as gateway, asyncio.TaskGroup() as group:
        group.create_task(play())
        choices = told((await gateway.post(CHAT, body)).text)
    found = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    spelt = b"".join(bytes(token["bytes"]) for token in found)
    assert spelt.decode() == "<think>é</think>Hi<|im_end|>"
    assert len(found) == len(tokens)
    assert all(token["top_logprobs"][0]["bytes"] == token["bytes"] for token in found)
    assert "".join(choice["delta"].get("reasoning_content", "") for choice in choices) == "é"
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "Hi"

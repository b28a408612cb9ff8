"""What a request says of tools and of its output becomes one form, or is refused by the field's name."""

import dataclasses
import json

import numpy as np
import pytest
from tokenizers import AddedToken

from edge_rig.edge_client import EdgeClient
from edge_rig.tokenizers import byte_level_tokenizer, served_model, tokenizer_source
from paceline.forms.library import LIBRARY
from paceline.plan.values import RecordId
from paceline.v1 import inference_pb2 as pb
from paceline.v1.sampling_pb2 import Choice, StructuredOutput
from paceline_scheduler.core.executors import NO_HISTORY
from paceline_scheduler.errors import InvalidRequestError, UnsupportedError
from paceline_scheduler.link.wire_contexts import read_context, write_context
from part_rig import CHAT_TEMPLATES

TOKENIZER = byte_level_tokenizer()
TOKENIZER.add_tokens([AddedToken(mark) for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>")])


def model_of(template, held_by=LIBRARY):
    """One whose chats are rendered so, and whose executors hold outputs to forms."""
    source = tokenizer_source(TOKENIZER, chat_template=CHAT_TEMPLATES[template], eos_token="<|im_end|>")
    source = dataclasses.replace(source, digest=template)
    return dataclasses.replace(served_model(source, max_model_len=8192, vocab_size=410), structured_output=held_by)


MODEL = model_of("Qwen-Qwen3-0.6B")
REQUIRED = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_REQUIRED)
NONE = pb.ToolChoice(mode=pb.TOOL_CHOICE_MODE_NONE)
JSON = StructuredOutput(json_object=True).SerializeToString()


def tool(name, properties=None, **fields):
    schema = {"type": "object", "properties": properties or {}, "additionalProperties": False}
    return pb.Tool(name=name, parameters_json_schema=json.dumps(schema), **fields)


def chat(*tools, choice=None, **fields):
    return pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")], tools=tools, tool_choice=choice, **fields)


CLOCK, STRICT = tool("clock"), tool("clock", strict=True)
NO_CALLS = pb.ToolChoice(parallel_calls=False)


async def form_of(edge, asked, structured=b"", prompt="hi", model=MODEL):
    """The grammars of the form that executors get; None: it is the request's own, or there is none."""
    token_ids = np.array(TOKENIZER.encode(prompt).ids, dtype=np.int32)
    form = await edge.texts.output_form(asked, structured, token_ids, model)
    if form == structured:
        return None
    return json.loads(StructuredOutput.FromString(form).composed)["grammars"]


@pytest.mark.parametrize(
    ("asked", "structured"),
    [
        pytest.param(chat(), b"", id="nothing"),
        pytest.param(chat(CLOCK), b"", id="tools"),
        pytest.param(chat(STRICT, choice=NONE), b"", id="no calls"),
        pytest.param(
            chat(), StructuredOutput(json_object=True, in_reasoning=True).SerializeToString(), id="over reasoning, too"
        ),
    ],
)
async def test_an_output_that_nothing_more_is_said_of_keeps_what_form_it_has(edge, asked, structured):
    assert await form_of(edge, asked, structured) is None


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(chat(CLOCK, choice=REQUIRED), id="required"),
        pytest.param(chat(CLOCK, choice=pb.ToolChoice(name="clock")), id="named"),
        pytest.param(chat(STRICT), id="strict"),
        pytest.param(chat(CLOCK, choice=NO_CALLS), id="one at most"),
    ],
)
async def test_calls_are_held_to_the_form_in_which_the_models_template_writes_these(edge, asked):
    lark, arguments = await form_of(edge, asked)
    (open_id,) = TOKENIZER.encode("<tool_call>").ids
    assert f'<[{open_id}]> "\\n{{\\"name\\": \\""' in lark["lark_grammar"]
    assert arguments["json_schema"]["additionalProperties"] is False


async def test_a_named_tool_alone_can_be_called(edge):
    lark, _ = await form_of(edge, chat(CLOCK, tool("map"), choice=pb.ToolChoice(name="map")))
    assert '"map"' in lark["lark_grammar"]
    assert "clock" not in lark["lark_grammar"]


async def test_reasoning_that_the_prompt_has_opened_needs_no_mark_to_begin(edge):
    (open_id,) = TOKENIZER.encode("<think>").ids
    begun = "<|im_start|>assistant\n<think>\n"
    plain, opened = [(await form_of(edge, chat(), JSON, prompt))[0]["lark_grammar"] for prompt in ("hi", begun)]
    assert f"<[{open_id}]>" in plain
    assert f"<[{open_id}]>" not in opened
    assert "@answer" in plain
    assert "@answer" in opened


async def test_with_tools_an_answer_in_a_form_may_be_calls_instead(edge):
    lark, *forms = await form_of(edge, chat(CLOCK), JSON)
    assert "| @answer" in lark["lark_grammar"]
    assert [form["name"] for form in forms] == ["arguments_0", "answer"]


LOOSE = {"place": {"type": "string", "not": {"const": "here"}}}


async def test_a_schema_that_cannot_be_held_to_is_refused_of_a_strict_tool_alone(edge):
    _, arguments = await form_of(edge, chat(tool("clock", LOOSE), choice=REQUIRED))
    assert "properties" not in arguments["json_schema"]
    with pytest.raises(InvalidRequestError) as caught:
        await form_of(edge, chat(CLOCK, tool("map", LOOSE, strict=True)))
    assert caught.value.field.startswith("chat.tools[1].parameters_json_schema")


@pytest.mark.parametrize(
    ("properties", "keyword"),
    [({"place": {"type": "string", "pattern": "a+"}}, "pattern"), ({"place": {"enum": ["a", 1]}}, "enum")],
)
async def test_a_family_that_writes_no_json_is_strict_as_far_as_its_form_can_hold(edge, properties, keyword):
    model = model_of("Qwen3-Coder")
    with pytest.raises(UnsupportedError, match=f"cannot be held to {keyword}") as caught:
        await form_of(edge, chat(tool("f", properties, strict=True)), model=model)
    assert caught.value.feature == "chat.tools[0].strict"
    assert await form_of(edge, chat(tool("f", properties), choice=REQUIRED), model=model)


async def test_tools_with_more_than_a_grammar_may_have_are_refused(edge):
    tools = [tool(f"f{index}", {"a": {"type": "string", "description": "x" * 30_000}}) for index in range(5)]
    with pytest.raises(InvalidRequestError, match="at most 131072 are taken"):
        await form_of(edge, chat(*tools, choice=REQUIRED))


async def test_a_form_with_more_than_a_grammar_may_have_is_refused_by_its_own_name(edge):
    choice = StructuredOutput(choice=Choice(options=['"' * 4000 + str(number) for number in range(16)]))
    with pytest.raises(InvalidRequestError, match="at most 131072 are taken") as caught:
        await form_of(edge, chat(), choice.SerializeToString())
    assert caught.value.field == "structured"


async def test_executors_that_hold_no_forms_hold_no_calls(edge):
    with pytest.raises(UnsupportedError, match="upgrade") as caught:
        await form_of(edge, chat(CLOCK, choice=REQUIRED), model=model_of("Qwen-Qwen3-0.6B", held_by=""))
    assert caught.value.feature == "chat.tool_choice"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"chat": chat(CLOCK, choice=pb.ToolChoice(name="map"))}, "chat.tool_choice.name"),
        ({"chat": chat(choice=REQUIRED)}, "chat.tool_choice.mode"),
        ({"chat": chat(CLOCK, choice=REQUIRED), "stopping": {"ignore_eos": True}}, "stopping.ignore_eos"),
        ({"text": "hi", "structured": StructuredOutput(composed="{}")}, "structured.composed"),
    ],
)
async def test_what_says_nothing_that_can_be_done_is_refused_by_its_field(edge, fields, field):
    with pytest.raises(InvalidRequestError) as caught:
        await EdgeClient(edge).send(pb.GenerateRequest(request_id="r1", **fields))
    assert caught.value.field == field


async def test_the_composed_form_goes_with_the_request_to_a_successor(edge, backend):
    (handle,) = await EdgeClient(edge).send(
        pb.GenerateRequest(request_id="r1", chat=chat(CLOCK, choice=REQUIRED), resumable=True)
    )
    request = backend.asked.requests[handle]
    assert StructuredOutput.FromString(request.structured).composed
    read, _ = read_context(RecordId("", "r1"), write_context(request, NO_HISTORY))
    assert read.structured == request.structured

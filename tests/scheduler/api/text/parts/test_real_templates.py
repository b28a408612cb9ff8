"""What real chat templates write of a turn is what an output is cut into."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from paceline_scheduler.api.text.parts import table
from paceline_scheduler.api.text.parts.table import chosen
from part_rig import CHAT_TEMPLATES, Cut, cut, render, tool

TEMPLATES = Path(table.__file__).with_name("response_templates")
MODELS = sorted(CHAT_TEMPLATES)
# What their templates can write; that of the second ends the turn behind each call but the first.
MAX_CALLS = {"meta-llama-Llama-3.1-8B-Instruct": 1, "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": 2}
IN_PAIRS = ("Qwen3-Coder", "Qwen3.5-4B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
THINKING = ("Qwen-Qwen3-0.6B", "Qwen3.5-4B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
PROPERTIES = {
    "city": {"type": "string", "description": "Which."},
    "number": {"type": "integer", "description": "How many."},
    "share": {"type": "number", "description": "How much."},
    "is_new": {"type": "boolean", "description": "Whether."},
    "words": {"type": "array", "items": {"type": "string"}, "description": "Some."},
    "more": {"type": "object", "additionalProperties": {"type": "string"}, "description": "More."},
}
TOOLS = [tool("get_weather", PROPERTIES), tool("stop_it", PROPERTIES)]
SCHEMAS = {each["function"]["name"]: json.dumps(each["function"]["parameters"]) for each in TOOLS}

MARKS = ("<tool_call>", "</tool_call>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "</function>", "```")
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from('"\\{}[],:\n'), max_size=12)
texts_with_marks = st.builds("".join, st.lists(texts | st.sampled_from(MARKS), max_size=3))
calls_in_json = st.tuples(
    st.sampled_from(["get_weather", "stop_it"]),
    st.fixed_dictionaries(
        {},
        optional={
            "city": texts_with_marks,
            "number": st.integers(-(2**70), 2**70),
            "share": st.floats(allow_nan=False, allow_infinity=False),
            "is_new": st.booleans(),
            "words": st.lists(texts_with_marks, max_size=3),
            "more": st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), texts_with_marks, max_size=2),
        },
    ),
)
FEW = settings(max_examples=max(1, settings.default.max_examples // 15))
MANY = settings(max_examples=2 * settings.default.max_examples)


def as_written(cut_turn: Cut) -> list[tuple[str, object]]:
    return [(name, json.loads(arguments)) for name, arguments in cut_turn.calls]


def is_told_apart(model: str, calls: list) -> bool:
    """Arguments between marks end at the first that closes one; Gemma's quotation marks have no other spelling."""
    written = json.dumps(calls, ensure_ascii=False)
    return "\\n</parameter>" not in written if model in IN_PAIRS else '<|\\"|>' not in written


@cache
def entry_of(model: str):
    return chosen(CHAT_TEMPLATES[model])


def check_a_call(model, data):
    calls = data.draw(st.lists(calls_in_json, min_size=1, max_size=MAX_CALLS.get(model, 3)))
    if is_told_apart(model, calls):
        turn = cut(entry_of(model), render(model, TOOLS, calls), tools=SCHEMAS)
        assert (as_written(turn), turn.text, turn.reasoning) == (calls, "", "")


@pytest.mark.parametrize("model", MODELS)
@FEW
@given(data=st.data())
def test_a_rendered_call_is_cut_into_the_same_call(model, data):
    check_a_call(model, data)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@MANY
@given(data=st.data())
def test_many_rendered_calls_are_cut_into_the_same_calls(model, data):
    check_a_call(model, data)


CALLS = [("get_weather", {"city": 'Zürich "☃" {', "number": 3, "more": {"a": "b"}}), ("stop_it", {})]


@pytest.mark.parametrize("model", sorted(set(MODELS) - MAX_CALLS.keys()))
def test_text_before_calls_and_two_calls_are_told_apart(model):
    turn = cut(entry_of(model), "Wait.\n\n" + render(model, TOOLS, CALLS), tools=SCHEMAS)
    assert (turn.text, as_written(turn)) == ("Wait.", CALLS)
    assert len(set(turn.ids)) == 2
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", each) for each in turn.ids)


@pytest.mark.parametrize("model", THINKING)
def test_reasoning_before_a_call_is_told_apart(model):
    turn = render(model, TOOLS, CALLS[:1], reasoning="Is it </thin or\n\n<tool_call>?")
    found = cut(entry_of(model), turn, tools=SCHEMAS)
    assert (found.reasoning, as_written(found)) == ("Is it </thin or\n\n<tool_call>?", CALLS[:1])


@pytest.mark.parametrize("model", MODELS)
def test_what_so_many_tokens_say_depends_on_them_alone(model):
    output = "Ünï " + render(model, TOOLS, CALLS[:1])
    whole = cut(entry_of(model), output, tools=SCHEMAS)
    length = len(output.encode())
    for end in range(length):
        begun = cut(entry_of(model), output.encode()[:end].decode("utf-8", "ignore"), tools=SCHEMAS, is_finished=False)
        assert begun.pieces == whole.pieces[: len(begun.pieces)]


# What transformers makes of the same: it takes the first closing mark, so none stands in an argument.
AS_TRANSFORMERS = [model for model in MODELS if not entry_of(model).is_whole_turn and "Gemma" not in model]


@pytest.mark.parametrize("model", AS_TRANSFORMERS)
def test_transformers_cuts_a_turn_in_the_same_way(model):
    content = json.loads((TEMPLATES / f"{entry_of(model).name}.json").read_text())
    content_of_it = "" if model in MAX_CALLS else "Wait."
    turn = render(model, TOOLS, CALLS[: MAX_CALLS.get(model, 1)], content=content_of_it, reasoning="Hm.").rstrip()
    theirs = parse_response(turn, content["response_template"], prefix="", tools=TOOLS)
    ours = cut(entry_of(model), turn, tools=SCHEMAS)
    functions = [each["function"] for each in theirs["tool_calls"]]
    assert as_written(ours) == [(each["name"], each["arguments"]) for each in functions]
    assert (ours.text, ours.reasoning) == (theirs.get("content", ""), theirs.get("reasoning_content", ""))

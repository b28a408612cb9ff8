"""Response templates: which are taken, which are refused and why, and which model has which."""

import json

import pytest
from transformers.utils.chat_parsing.response_templates import load_response_template

from paceline_scheduler.api.text.parts import table
from paceline_scheduler.api.text.parts.template import Body, TemplateError, read_template
from part_rig import CHAT_TEMPLATES

CALLS = {"open": "<c>", "close": "</c>", "repeats": True, "content": "json"}
NAMED = {"open_pattern": "<c=(?P<name>.*?)>", "repeats": True, "content": "json"}
ARGUMENTS = {"function": {"name": "{name}", "arguments": "{content}"}}
PAIRS = {"close": "</c>", "content": "xml-inline", "transform": ARGUMENTS}
TAG = r"<p=(?P<key>\w+)>(?P<value>.*?)</p>"


def template(**fields):
    """A whole one of some fields."""
    return {"start_anchor": "<a>", "fields": {"content": {}, **fields}}


@pytest.mark.parametrize(
    ("calls", "body"),
    [
        (CALLS, Body.CALL),
        ({**CALLS, "transform": {"type": "function", "function": "{content}"}}, Body.CALL),
        ({**NAMED, "transform": ARGUMENTS}, Body.ARGUMENTS),
        ({**NAMED, **PAIRS, "content_args": {"tag_pattern": TAG}}, Body.PAIRS),
    ],
)
def test_the_forms_of_calls_are_told_apart(calls, body):
    assert read_template(json.dumps(template(tool_calls=calls))).call.body is body


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("{", "no JSON"),
        ("[]", "no object with fields"),
        ({"fields": {"content": {}}}, "no start_anchor"),
        ({**template(), "version": 2}, "version is 2"),
        ({**template(), "more": 1}, "it has 'more'"),
        (template(images={"open": "<i>"}), "fields has 'images'"),
        (template(content={"open": "<t>"}), "content has an opening mark"),
        (template(content={"content": "int"}), "content.content is 'int'"),
        (template(thinking={"open": "<t>"}), "thinking needs an opening and a closing mark"),
        (template(thinking={"open": "<t>", "close": ""}), "has 0 characters"),
        (template(thinking={}, reasoning={}), "both reasoning"),
        (template(thinking={"open_pattern": "<(a|b)>", "close": ">"}), "'(a|b'"),
        (template(tool_calls={**CALLS, "optional": False}), "optional must be true"),
        (template(tool_calls={**CALLS, "join": "x"}), "tool_calls has 'join'"),
        (template(tool_calls={**CALLS, "repeats": False}), "no list"),
        (template(tool_calls={**CALLS, "transform": {"function": "f"}}), "does not say where"),
        (template(tool_calls={**CALLS, "transform": ARGUMENTS}), "no group 'name'"),
        (template(tool_calls={**CALLS, "content_args": {"unquoted_keys": True}}), "only arguments alone"),
        (template(tool_calls={"close": "</c>", "content": "json", "repeats": True}), "no opening mark"),
        (template(tool_calls={**NAMED, **PAIRS}), "no tag_pattern"),
        (template(tool_calls={**NAMED, **PAIRS, "content_args": {"tag_pattern": "<p>"}}), "no group key"),
        ("x" * 70_000, "at most 65536"),
    ],
)
def test_what_is_not_taken_is_refused_by_name(given, why):
    with pytest.raises(TemplateError, match=".*" + why.replace("(", r"\(").replace("|", r"\|")):
        read_template(given if isinstance(given, str) else json.dumps(given))


def test_transformers_takes_each_template_of_the_table():
    for entry in table.table():
        content = json.loads((table.files(table.__package__) / "response_templates" / f"{entry.name}.json").read_text())
        assert load_response_template(content["response_template"]).fields


# By the marks in its chat template.
CHOSEN = {
    "Qwen-Qwen2.5-7B-Instruct": "hermes@1",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes@1",
    "MiMo-VL": "hermes@1",
    "ibm-granite-granite-4.0": "hermes@1",
    "Qwen-Qwen3-0.6B": "hermes-think@1",
    "Qwen-QwQ-32B": "hermes-think@1",
    "Qwen3-Coder": "qwen3-coder@1",
    "Qwen3.5-4B": "qwen3-coder-think@1",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3-coder-think@1",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3-json@1",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral-list@1",
    "unsloth-mistral-Devstral-Small-2507": "mistral-args@1",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral-call-id@1",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral-think@1",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek-r1@1",
    "google-gemma-4-31B-it": "gemma4@1",
}


@pytest.mark.parametrize("model", sorted(CHAT_TEMPLATES))
def test_a_model_is_known_by_its_chat_template(model):
    assert table.chosen(CHAT_TEMPLATES[model]).name == CHOSEN[model]


def test_a_model_without_marks_has_text_alone():
    assert table.chosen(None).name == table.chosen("{{ messages }}").name == table.TEXT_ALONE


def test_a_format_is_found_by_its_name_and_version():
    assert table.named("hermes@1") is table.chosen(CHAT_TEMPLATES["MiMo-VL"])
    assert table.named(table.TEXT_ALONE) is table.NO_ENTRY
    assert table.named("hermes@77") is None

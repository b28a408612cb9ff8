"""What a model's grammar allows is what its output is cut into: calls that are asked for, and nothing beside them."""

import json
import random
import re
from functools import cache

import jsonschema_rs
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.chat_template import ChatRefusedError
from paceline.forms.compiling import LIMITS
from paceline_scheduler.api.text.parts.grammar import CallsForm, ToolForm, unheld_keyword, write_grammar
from paceline_scheduler.api.text.parts.style import EXAMPLES, read_style
from paceline_scheduler.api.text.parts.table import chosen
from part_rig import CHAT_TEMPLATES, Vocabulary, cut, output_format, render

MODELS = sorted(CHAT_TEMPLATES)
PLACE = {"type": "string", "description": "Which."}
WEATHER = {
    "type": "object",
    "properties": {
        "city": PLACE,
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "more": {
            "type": "object",
            "properties": {"of": {"type": "array", "items": {"type": "boolean"}}},
            "required": ["of"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "more"],
    "additionalProperties": False,
}
STOP = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (ToolForm("get_weather", json.dumps(WEATHER)), ToolForm("stop_it", json.dumps(STOP)))
SCHEMAS = {tool.name: tool.schema for tool in TOOLS}
CHOICES = {
    "required": (True, True, TOOLS),
    "one at most": (True, False, TOOLS),
    "named": (True, True, TOOLS[1:]),
    "strict": (False, True, TOOLS),
    "free and one at most": (False, False, TOOLS),
}
END = "<|the end|>"
MOST_STEPS = 6000


def marks_of(model):
    """What its response template has that tokens of real vocabularies are."""
    entry = chosen(CHAT_TEMPLATES[model])
    bound = output_format(entry, Vocabulary()).template
    patterns = [*bound.skipped, *bound.reasoning_opens, *bound.reasoning_closes.patterns, *bound.call.opens]
    patterns += bound.call.closes.patterns
    texts = [item.letters for pattern in patterns for item in pattern.items] + [
        q for qs in bound.call.quotes for q in qs
    ]
    return tuple(dict.fromkeys(mark for text in texts for mark in re.findall(r"<[^<>\s=]+>|\[[A-Z_/]+\]", text)))


def tokenizer_of(vocabulary):
    """Its tokens with the same ids, as executors get them."""
    letters = dict(zip(byte_letters(), range(256), strict=True))
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    num_shown = len(vocabulary.marks) - vocabulary.num_special
    for index, mark in enumerate(vocabulary.marks):
        tokenizer.add_tokens([AddedToken(mark, special=index >= num_shown)])
    return LLTokenizer(tokenizer.to_str(), eos_token=[tokenizer.token_to_id(END)])


def byte_letters():
    """Of all bytes in their order, as byte-level vocabularies write these."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


@cache
def writing(model, has_tokens):
    """Its vocabulary, tokenizer, format and style."""
    marks = marks_of(model) if has_tokens else ()
    special = [mark for mark in marks if mark[0] == "["]
    vocabulary = Vocabulary((*(m for m in marks if m not in special), *special, END), len(special) + 1)
    entry = chosen(CHAT_TEMPLATES[model])
    template = output_format(entry, vocabulary).template
    turns = []
    for examples in (EXAMPLES[:1], EXAMPLES):
        calls = [(example.name, example.arguments) for example in examples]
        try:
            turn = render(model, [], calls)
        except ChatRefusedError:  # of several
            turn = None
        turns.append(turn and template.alphabet.write(turn))
    return vocabulary, tokenizer_of(vocabulary), entry, template, read_style(template, *turns)


def walk(tokenizer, vocabulary, grammar, chance, nudges):
    """The tokens of a random output that the grammar allows; sometimes a text that may end what is free."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    token_ids, planned = [], []
    end = 256 + vocabulary.marks.index(END)
    for _ in range(MOST_STEPS):
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        assert allowed.size, "an output could not go on"
        if not planned and chance.random() < 0.05:
            planned = vocabulary.encode(chance.choice(nudges))
        token_id = planned.pop(0) if planned else int(chance.choice(allowed))
        if token_id not in allowed:
            planned, token_id = [], int(chance.choice(allowed))
        if token_id == end:
            return token_ids
        matcher.consume_token(token_id)
        token_ids.append(token_id)
    raise AssertionError("an output did not end")


def spelt(template, *patterns):
    return template.alphabet.spell("".join(pattern.items[0].letters for pattern in patterns))


def nudges_of(template, style):
    """What ends free text, as it is written."""
    closes = [pattern.items[0].letters for pattern in template.reasoning_closes.patterns]
    closes += [style.pairs.after_value] if style.pairs else []
    closes += [quote for quotes in template.call.quotes for quote in quotes]
    return [template.alphabet.spell(text) for text in closes] + ['"', "}", "]"]


@pytest.mark.parametrize("num_walks", [1, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("has_tokens", [True, False], ids=["marks are tokens", "marks are letters"])
@pytest.mark.parametrize("model", MODELS)
def test_every_output_that_is_allowed_has_the_calls_that_were_asked_for(model, has_tokens, num_walks):
    vocabulary, tokenizer, entry, template, style = writing(model, has_tokens)
    chance = random.Random(f"{model} {has_tokens}")  # noqa: S311 (the same each time)
    holds_schemas = not unheld_keyword(template, TOOLS[0].schema)
    for is_required, is_parallel, tools in CHOICES.values():
        calls = CallsForm(tools, style, is_required, is_parallel)
        for number in range(num_walks):
            is_reasoning = bool(template.reasoning_opens) and number % 3 == 0
            grammar = write_grammar(template, calls, (), is_reasoning=is_reasoning)
            output = walk(tokenizer, vocabulary, grammar, chance, nudges_of(template, style))
            prompt = spelt(template, *template.anchors.patterns[:1], *template.reasoning_opens[:is_reasoning])
            found = cut(entry, output, prompt=prompt, vocabulary=vocabulary, tools=SCHEMAS)
            if is_required:
                assert found.calls
                assert not found.text
            assert is_parallel or len(found.calls) <= 1
            for name, arguments in found.calls:
                assert name in [tool.name for tool in tools]
                assert not holds_schemas or jsonschema_rs.is_valid(json.loads(SCHEMAS[name]), json.loads(arguments))
                assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("model", "schema", "keyword"),
    [
        ("Qwen-Qwen3-0.6B", {"type": "object", "minProperties": 1}, ""),
        ("Qwen3-Coder", WEATHER, ""),
        ("Qwen3-Coder", {"type": "object", "minProperties": 1}, "minProperties"),
        ("Qwen3-Coder", {"type": "object", "required": ["a"]}, "required"),
        ("google-gemma-4-31B-it", STOP, "a schema"),
    ],
)
def test_what_the_form_of_a_family_cannot_hold_of_a_schema_is_named(model, schema, keyword):
    template = output_format(chosen(CHAT_TEMPLATES[model]), Vocabulary()).template
    assert unheld_keyword(template, json.dumps(schema)) == keyword

"""Forms that an output is asked to keep: how they are spelled, what is sent, and what comes of the output."""

import json
from dataclasses import dataclass

import pytest

from paceline.v1.sampling_pb2 import WHITESPACE_COMPACT, StructuredOutput
from paceline.v1.sampling_pb2 import Tag as SentTag
from paceline.v1.sampling_pb2 import Tags as SentTags
from paceline_client import (
    Choice,
    Client,
    FinishReason,
    Grammar,
    IncompleteOutputError,
    InvalidRequestError,
    JsonObject,
    JsonSchema,
    Regex,
    Tag,
    Tags,
)
from paceline_client.testing import End, FakeServer, Tokens, say

SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}
SPELLED = '{"type":"object","properties":{"z":{"type":"integer"},"a":{"type":"string"}}}'


@dataclass
class City:
    """What a class of pydantic's can do."""

    name: str

    @classmethod
    def model_json_schema(cls):
        return {"type": "object", "required": ["name"]}

    @classmethod
    def model_validate_json(cls, text):
        return cls(**json.loads(text)) if "name" in text else cls(**{}["name"])


FORMS = {
    "dict": (SCHEMA, StructuredOutput(json_schema=SPELLED)),
    "text": ("true", StructuredOutput(json_schema="true")),
    "class": (City, StructuredOutput(json_schema='{"type":"object","required":["name"]}')),
    "compact schema": (
        JsonSchema(SCHEMA, compact=True),
        StructuredOutput(json_schema=SPELLED, whitespace=WHITESPACE_COMPACT),
    ),
    "object": (JsonObject(), StructuredOutput(json_object=True)),
    "compact object": (JsonObject(compact=True), StructuredOutput(json_object=True, whitespace=WHITESPACE_COMPACT)),
    "pattern": (Regex("a+"), StructuredOutput(regex="a+")),
    "grammar": (Grammar('start: "a"'), StructuredOutput(grammar='start: "a"')),
    "choice": (Choice(["a", "b"]), StructuredOutput(choice={"options": ["a", "b"]})),
    "no choice": (Choice([]), StructuredOutput(choice={})),
    "tags": (
        Tags([Tag("<a>", JsonSchema("{}"), "</a>"), Tag("<b>", Regex("x"))], required=True, at_most_one=True),
        StructuredOutput(
            tags=SentTags(
                tags=[SentTag(begin="<a>", json_schema="{}", end="</a>"), SentTag(begin="<b>", regex="x", end="")],
                required=True,
                at_most_one=True,
            )
        ),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_sent_as_it_is_meant(name):
    form, sent = FORMS[name]
    with FakeServer(say("hi")) as server, Client(server.target) as client:
        client.generate("?", structured=form)
    assert server.seen.requests[0].structured == sent


WRONG = {
    "a number": (3, "not int"),
    "another class": (dict, "must be a form, a JSON Schema or a class with model_json_schema, not dict"),
    "no JSON": ({"default": {1, 2}}, "no JSON Schema"),
    "one text of choices": (Choice("ab"), "must be a list of texts"),
    "half a pair": (Regex("\ud800"), "structured.regex"),
    "a form in a tag": (Tags([Tag("<a>", Regex(3))]), "structured.tags.tags[0].regex"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_form_is_refused_where_it_is_made(name):
    form, sentence = WRONG[name]
    with (
        FakeServer(say("hi")) as server,
        Client(server.target) as client,
        pytest.raises(InvalidRequestError) as caught,
    ):
        client.generate("?", structured=form)
    assert sentence in str(caught.value)
    assert caught.value.violations[0].field.startswith("structured")
    assert server.seen.requests == []


def parsed(structured, *script):
    with FakeServer(script) as server, Client(server.target) as client:
        return client.generate("?", structured=structured).parsed


@pytest.mark.parametrize(
    ("form", "text", "meant"),
    [
        (City, '{"name":"Paris"}', City("Paris")),
        (SCHEMA, '{"z": 1}', {"z": 1}),
        ("true", "[1]", [1]),
        (JsonObject(), "{}", {}),
        (Regex(".*"), "{}", "{}"),
        (Choice(["yes"]), "yes", "yes"),
    ],
)
def test_an_output_is_parsed_as_its_form_means_it(form, text, meant):
    assert parsed(form, *say(text)) == meant


def test_an_output_that_was_cut_is_no_value():
    cut = Tokens((1,), '{"z": 1'), End(FinishReason.LENGTH)
    with pytest.raises(IncompleteOutputError, match="the output ended with length before its form was complete"):
        parsed(SCHEMA, *cut)
    with pytest.raises(IncompleteOutputError, match="cannot be parsed"):
        parsed(SCHEMA, Tokens((1,), '{"z": 1'), End(matched_stop="}"))
    with pytest.raises(IncompleteOutputError) as caught:
        parsed(Regex("a+"), Tokens((1,), "a"), End(FinishReason.LENGTH))
    assert caught.value.reason == "INCOMPLETE_OUTPUT"


def test_an_output_without_form_has_no_meaning():
    with pytest.raises(ValueError, match="asked for no form"):
        parsed(None, *say("{}"))

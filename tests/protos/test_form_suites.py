"""Forms against the schemas of others: what is taken is right, and what an output says that ended is valid."""

import json
from pathlib import Path

import pytest

from form_walks.schemas import foreign_schemas, read_suite
from form_walks.walks import Validators, WalkEnd, takes, walk
from paceline.forms.compiling import check_form
from paceline.forms.errors import FormError
from paceline.forms.grammar import grammar_of
from paceline.v1.sampling_pb2 import StructuredOutput

RATCHET = Path(__file__).with_name("json_schema_suite.json")
"""By draft: the groups that are refused, and the instances that are not judged as the suite says."""


def form_of(schema):
    return StructuredOutput(json_schema=json.dumps(schema, ensure_ascii=False))


def grammar_or_none(schema):
    """The text to compile of one that is taken."""
    form = form_of(schema)
    try:
        check_form(form)
    except FormError:
        return None
    return grammar_of(form)


def judged(draft):
    """What is refused, by group; valid instances that are rejected, invalid ones that are taken; how many are right."""
    refused, rejected, taken, num_right = [], [], [], 0
    for name, group in read_suite(draft):
        grammar = grammar_or_none(group["schema"])
        if grammar is None:
            refused.append(name)
            continue
        for test in group["tests"]:
            is_taken = takes(grammar, json.dumps(test["data"], ensure_ascii=False))
            if is_taken == test["valid"]:
                num_right += 1
            else:
                (taken if is_taken else rejected).append(f"{name}: {test['description']}")
    return {"right": num_right, "refused": refused, "valid but rejected": rejected, "invalid but taken": taken}


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["draft2020-12", "draft7"])
def test_the_json_schema_test_suite_is_judged_as_before(draft):
    """Whoever makes it better writes what is found now to the file; nothing may become worse."""
    found, before = judged(draft), json.loads(RATCHET.read_text(encoding="utf-8"))[draft]
    assert found == before


def test_no_invalid_instance_of_the_current_draft_is_taken():
    before = json.loads(RATCHET.read_text(encoding="utf-8"))["draft2020-12"]
    assert before["right"] >= 567
    assert len(before["valid but rejected"]) <= 22
    assert before["invalid but taken"] == []


def walked(schemas, num_walks):
    """How walks through forms of them ended, and what is wrong with their outputs."""
    ends, wrong, num_taken = [], [], 0
    for name, schema in schemas.items():
        grammar = grammar_or_none(schema)
        if grammar is None:
            continue
        validators, num_taken = Validators(schema), num_taken + 1
        for number in range(num_walks):
            end, text = walk(grammar, f"{name} {number}")
            ends.append(end)
            complaints = list(validators.complaints(text)) if end is WalkEnd.ENDED else []
            if complaints or end in (WalkEnd.STUCK, WalkEnd.FAILED):
                wrong.append((name, number, end, complaints, text))
    return num_taken, ends, wrong


def test_an_output_that_ends_is_valid():
    schemas = foreign_schemas()
    some = {name: schemas[name] for name in [*schemas][::60]}
    num_taken, ends, wrong = walked(some, 1)
    assert wrong == []
    assert ends.count(WalkEnd.ENDED) == num_taken >= 9


@pytest.mark.slow
def test_all_outputs_that_end_are_valid():
    """5,000 walks and more."""
    num_taken, ends, wrong = walked(foreign_schemas(), 8)
    assert wrong == []
    assert (num_taken, len(ends)) >= (640, 5000)
    assert ends.count(WalkEnd.ENDED) >= 0.99 * len(ends)


def test_a_walk_tells_what_is_invalid_and_what_is_stuck():
    """Of a form that says less than the schema it is put to, and of one whose mask is an error behind its beginning."""
    validators = Validators({"type": "object", "required": ["a"]})
    end, text = walk(grammar_of(form_of({"type": "object", "maxProperties": 0})), "")
    assert (end, text) == (WalkEnd.ENDED, "{}")
    assert len(list(validators.complaints(text))) == 2
    loop = {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/properties/a"}}}
    unchecked = json.dumps({"grammars": [{"json_schema": loop | {"x-guidance": {"whitespace_flexible": False}}}]})
    assert walk(unchecked, "") == (WalkEnd.FAILED, '{"a":')

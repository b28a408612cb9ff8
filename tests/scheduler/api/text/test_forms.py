"""Forms of outputs in a process of their own: what is asked of it, what it keeps, and what a hostile one costs."""

import contextlib
import json

import pytest

from paceline.v1.sampling_pb2 import StructuredOutput
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.text import forms as module
from paceline_scheduler.api.text.forms import Forms
from paceline_scheduler.errors import InvalidFormError, QueueFullError

SLOW = StructuredOutput(grammar="start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(450)))
"""A second until the compiler says that a name is unknown."""
LARGE = StructuredOutput(grammar="start: A\nA: /a{1000}/~1000")
"""Its first mask takes 180 MiB."""


@pytest.fixture
async def forms():
    forms = Forms(EdgeLimits())
    yield forms
    await forms.close()


@pytest.fixture
def checked(forms):
    """Seconds of each check that the process was asked for."""
    seconds = []
    forms.on_checked = seconds.append
    return seconds


async def refusal(forms, structured):
    with pytest.raises(InvalidFormError) as caught:
        await forms.check(structured.SerializeToString())
    return caught.value


async def test_a_form_is_checked_once_whether_it_is_taken_or_refused(forms, checked):
    for _ in range(2):
        await forms.check(StructuredOutput(regex="a").SerializeToString())
        error = await refusal(forms, StructuredOutput(json_schema='{"items":{"not":{}}}'))
        assert (error.reason, error.field) == ("STRUCTURED_UNSUPPORTED", "structured.json_schema")
        assert "the keyword not at #/items" in error.message
    assert len(checked) == 2


@pytest.mark.parametrize("form", [SLOW, LARGE], ids=["slow", "large"])
async def test_a_form_that_costs_too_much_ends_its_process_and_nothing_else(forms, checked, form):
    assert (await refusal(forms, form)).reason == "STRUCTURED_TOO_COMPLEX"
    await forms.check(StructuredOutput(regex="a").SerializeToString())
    assert (await refusal(forms, form)).reason == "STRUCTURED_TOO_COMPLEX"
    assert len(checked) == 2


async def test_only_so_many_answers_are_kept(forms, checked, monkeypatch):
    monkeypatch.setattr(module, "_MAX_KEPT", 2)
    for letter in "abcb":
        await forms.check(StructuredOutput(regex=letter).SerializeToString())
    assert len(checked) == 3
    await forms.check(StructuredOutput(regex="a").SerializeToString())
    assert len(checked) == 4


async def test_only_so_many_forms_wait():
    forms = Forms(EdgeLimits(max_num_waiting_texts=0))
    with pytest.raises(QueueFullError, match="0 forms wait to be checked"):
        await forms.check(b"")


HOSTILE = {
    "nothing": StructuredOutput(),
    "deep": StructuredOutput(json_schema='{"items":' * 7_000 + "{}" + "}" * 7_000),
    "brackets": StructuredOutput(json_schema="[" * 65_000),
    "parentheses": StructuredOutput(regex="(" * 2_000 + "a" + ")" * 2_000),
    "groups of a grammar": StructuredOutput(grammar="start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "quotes": StructuredOutput(grammar='"\\' * 32_000),
    "slashes": StructuredOutput(grammar="start: " + "/\\" * 32_000),
    "signs": StructuredOutput(grammar="start: " + "<a" * 32_000),
    "rules": StructuredOutput(grammar="start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(2_000))),
    "doubling rules": StructuredOutput(
        grammar="start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(40)) + 'a40: "x"?'
    ),
    "ambiguous rules": StructuredOutput(grammar='start: start start | "a" | '),
    "empty loops": StructuredOutput(grammar='start: a*\na: b*\nb: "x"*'),
    "nested counts": StructuredOutput(regex="(((a{10}){10}){10}){10}"),
    "nested stars": StructuredOutput(regex="(x+x+)+y"),
    "far choices": StructuredOutput(regex="(a|b)*a(a|b){60}"),
    "classes": StructuredOutput(regex=r"[\w&&[^\d]]" * 300),
    "unicode": StructuredOutput(regex=r"(?i)\p{L}{500}"),
    "counts beyond numbers": StructuredOutput(regex="a{99999999999999999999}"),
    "many counts": StructuredOutput(regex="a{0,1000}" * 400),
    "enum": StructuredOutput(json_schema=json.dumps({"enum": [f"{i}" for i in range(4_096)]})),
    "cases": StructuredOutput(
        json_schema=json.dumps(
            {"allOf": [{"anyOf": [{"properties": {f"{i}_{j}": {}}} for j in range(2)]} for i in range(14)]}
        )
    ),
    "references": StructuredOutput(
        json_schema=json.dumps(
            {
                "$ref": "#/$defs/0",
                "$defs": {f"{i}": {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(100)} | {"100": {}},
            }
        )
    ),
    "a loop of references": StructuredOutput(
        json_schema=json.dumps(
            {"$ref": "#/$defs/0", "$defs": {f"{i}": {"$ref": f"#/$defs/{(i + 1) % 500}"} for i in range(500)}}
        )
    ),
    "properties": StructuredOutput(json_schema=json.dumps({"properties": {f"p{i}": {} for i in range(500)}})),
    "patterns of names": StructuredOutput(
        json_schema=json.dumps({"patternProperties": {f"^{'a?' * i}$": {} for i in range(100)}})
    ),
    "a long text": StructuredOutput(json_schema='{"type":"string","minLength":1000000,"maxLength":1000001}'),
    "a large number": StructuredOutput(json_schema='{"type":"integer","minimum":' + "9" * 4_000 + "}"),
    "a multiple": StructuredOutput(json_schema='{"type":"number","multipleOf":0.000001,"maximum":1e300}'),
    "half a pair": StructuredOutput(json_schema='{"const":"\\ud800"}'),
    "a name": StructuredOutput(json_schema=json.dumps({"required": ["x" * 60_000], "type": "object"})),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_form_is_answered_and_the_next_one_is_checked(forms, name):
    with contextlib.suppress(InvalidFormError):
        await forms.check(HOSTILE[name].SerializeToString())
    await forms.check(StructuredOutput(regex="a").SerializeToString())

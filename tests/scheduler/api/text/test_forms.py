"""Forms of outputs in a process of their own: what is asked of it, what it keeps, and what a hostile one costs."""

import contextlib

import pytest

from form_walks.hostile import HOSTILE
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


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_form_is_answered_and_the_next_one_is_checked(forms, name):
    with contextlib.suppress(InvalidFormError):
        await forms.check(HOSTILE[name].SerializeToString())
    await forms.check(StructuredOutput(regex="a").SerializeToString())

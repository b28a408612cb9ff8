"""The comparison of streams sees every flaw: an honest stream passes however it is cut, a doctored one never."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_cli.chaos.comparison import StreamComparison
from paceline_client import Completion, Delta, FinishReason, Result, TokenLogprobs, ToolCall, Usage
from paceline_client.results import ReasoningPart, TextPart, ToolCallPart

TOKEN_IDS = (11, 12, 13, 14, 15, 16)
TEXTS = ("One", " two", " three", " four", " five", " six")
LOGPROBS = tuple(TokenLogprobs(token_id, -0.5 * number, ()) for number, token_id in enumerate(TOKEN_IDS))
PROMPT_LOGPROBS = (TokenLogprobs(7, -1.25, ()),)


def undisturbed_result(num_completions=1):
    completions = tuple(
        Completion(
            index=index,
            text="".join(TEXTS),
            token_ids=TOKEN_IDS,
            finish_reason=FinishReason.LENGTH,
            matched_stop=None,
            usage=Usage(3, 0, len(TOKEN_IDS)),
            attempt=1,
            logprobs=LOGPROBS,
        )
        for index in range(num_completions)
    )
    return Result("r", completions, PROMPT_LOGPROBS)


def honest_deltas(cuts=(2, 4), index=0):
    """The stream in pieces that end at these tokens."""
    bounds = [0, *sorted(cuts), len(TOKEN_IDS)]
    return [
        Delta(
            text="".join(TEXTS[first:end]),
            token_ids=TOKEN_IDS[first:end],
            offset=first,
            attempt=1,
            logprobs=LOGPROBS[first:end],
            index=index,
            prompt_logprobs=PROMPT_LOGPROBS if first == 0 and index == 0 else (),
        )
        for first, end in itertools.pairwise(bounds)
    ]


def flaws_of(deltas, result=None, num_completions=1):
    """(lost, doubled, changed) of a stream."""
    comparison = StreamComparison("story", undisturbed_result(num_completions))
    found = [
        *(comparison.take(delta) for delta in deltas),
        comparison.conclude(result or undisturbed_result(num_completions)),
    ]
    return tuple(
        sum(getattr(mismatches, name) for mismatches in found) for name in ("num_lost", "num_doubled", "num_changed")
    )


# What each token adds.
PARTS = (
    ReasoningPart("Hm"),
    TextPart("One"),
    ToolCallPart(0, '{"a":', id="a1B2c3D4e", name="f"),
    ToolCallPart(0, "1}"),
    ToolCallPart(1, "{", id="f5G6h7I8j", name="g"),
    ToolCallPart(1, "}"),
)
CALLS = (ToolCall("a1B2c3D4e", "f", '{"a":1}'), ToolCall("f5G6h7I8j", "g", "{}"))


def flaws_of_parts(parts, cuts=(2, 4)):
    """Of a stream whose tokens are right."""
    expected = undisturbed_result()
    told = replace(expected.completions[0], reasoning="Hm", content="One", tool_calls=CALLS)
    comparison = StreamComparison("story", replace(expected, completions=(told,)))
    found = []
    for delta in honest_deltas(cuts):
        added = tuple(parts[delta.offset : delta.offset + len(delta.token_ids)])
        found.append(comparison.take(replace(delta, parts=added)))
    return sum(each.num_changed for each in [*found, comparison.conclude(expected)])


def ended_with(**changes):
    """A result whose only completion differs."""
    result = undisturbed_result()
    return replace(result, completions=(replace(result.completions[0], **changes),))


@given(st.sets(st.integers(1, 5)), st.integers(1, 3), st.randoms())
def test_an_honest_stream_has_no_flaw_however_it_is_cut(cuts, num_completions, chance):
    unread = [honest_deltas(cuts, index) for index in range(num_completions)]
    deltas = []
    while unread := [deltas_of_one for deltas_of_one in unread if deltas_of_one]:
        deltas.append(replace(chance.choice(unread).pop(0), attempt=2))
    assert flaws_of(deltas, num_completions=num_completions) == (0, 0, 0)


@given(st.integers(0, 5), st.sets(st.integers(1, 5)))
def test_a_token_that_is_another_is_changed(place, cuts):
    doctored = []
    for delta in honest_deltas(cuts):
        token_ids = [99 if delta.offset + number == place else t for number, t in enumerate(delta.token_ids)]
        doctored.append(replace(delta, token_ids=tuple(token_ids)))
    assert flaws_of(doctored) == (0, 0, 1)


FIRST, SECOND, LAST = honest_deltas()
BEYOND_THE_END = Delta(text="", token_ids=(17, 18), offset=6, attempt=1)
UNASKED = Delta(text="", token_ids=(1, 2), offset=0, attempt=1, index=1)


@pytest.mark.parametrize(
    ("deltas", "flaws"),
    [
        pytest.param([FIRST, LAST], (2, 0, 1), id="a delta is left out"),
        pytest.param([FIRST, SECOND, SECOND, LAST], (0, 2, 1), id="a delta comes again"),
        pytest.param([FIRST, SECOND], (2, 0, 1), id="the end comes early"),
        pytest.param([FIRST, SECOND, LAST, BEYOND_THE_END], (0, 0, 2), id="tokens beyond the end"),
        pytest.param([FIRST, SECOND, LAST, UNASKED], (0, 0, 2), id="a completion nobody asked for"),
    ],
)
def test_what_is_lost_doubled_or_made_up_is_counted(deltas, flaws):
    assert flaws_of(deltas) == flaws


@pytest.mark.parametrize(
    "change",
    [
        {"text": "Two"},
        {"logprobs": (replace(LOGPROBS[0], logprob=-0.1), LOGPROBS[1])},
        {"logprobs": ()},
        {"prompt_logprobs": (replace(PROMPT_LOGPROBS[0], logprob=-1.0),)},
        {"prompt_logprobs": ()},
    ],
    ids=["text", "log-probability", "no log-probabilities", "prompt's log-probability", "none of the prompt"],
)
def test_what_comes_with_the_tokens_counts_too(change):
    first, *others = honest_deltas()
    assert flaws_of([replace(first, **change), *others]) == (0, 0, 1)


@given(st.sets(st.integers(1, 5)))
def test_parts_are_the_same_however_they_are_cut(cuts):
    assert flaws_of_parts(PARTS, cuts) == 0


def test_ids_of_calls_are_those_of_the_request():
    assert flaws_of_parts([*PARTS[:4], replace(PARTS[4], id="zzzzzzzzz"), PARTS[5]]) == 0


@pytest.mark.parametrize(
    ("place", "part"),
    [
        (0, TextPart("Hm")),
        (0, ReasoningPart("Oh")),
        (1, TextPart("")),
        (2, ToolCallPart(0, '{"a":', id="call_zzzzzzzzz", name="f")),
        (2, ToolCallPart(0, '{"a":', name="f")),
        (2, ToolCallPart(0, '{"a":', id="a1B2c3D4e", name="h")),
        (3, ToolCallPart(0, "1}", id="a1B2c3D4e", name="f")),
        (3, ToolCallPart(0, "2}")),
        (4, ToolCallPart(2, "{", id="f5G6h7I8j", name="g")),
        (5, ToolCallPart(1, "")),
        (5, ToolCallPart(1, "}}")),
    ],
    ids=[
        *("thought that is said", "other thought", "lost text", "no such id", "no id", "other name"),
        *("id again", "other arguments", "call of another index", "cut arguments", "longer arguments"),
    ],
)
def test_each_part_that_is_another_is_a_change(place, part):
    assert flaws_of_parts([*PARTS[:place], part, *PARTS[place + 1 :]]) > 0


@pytest.mark.parametrize(
    "change",
    [
        {"finish_reason": FinishReason.STOP},
        {"matched_stop": "six"},
        {"usage": Usage(4, 0, 6)},
        {"usage": Usage(3, 0, 7)},
    ],
    ids=["reason", "matched stop", "prompt tokens", "output tokens"],
)
def test_another_end_is_a_change(change):
    assert flaws_of(honest_deltas(), ended_with(**change)) == (0, 0, 1)


def test_how_much_was_cached_and_how_often_it_was_placed_may_differ():
    assert flaws_of(honest_deltas(), ended_with(usage=Usage(3, 2, 6), attempt=3)) == (0, 0, 0)

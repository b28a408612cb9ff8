"""What of an output is text, reasoning and a call, and when it is said."""

import json

import pytest

from paceline_scheduler.api.text.parts.part import Part, PartKind, call_id
from paceline_scheduler.api.text.parts.reading import MAX_HELD_CHARS
from paceline_scheduler.api.text.parts.table import NO_ENTRY, named
from part_rig import Vocabulary, cut

HERMES = named("hermes@1")
THINKING = named("hermes-think@1")
CODER = named("qwen3-coder@1")
LLAMA = named("llama3-json@1")
MISTRAL = named("mistral-args@1")
MISTRAL_LIST = named("mistral-list@1")
GEMMA = named("function-gemma@1")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
ASSISTANT = "<|im_start|>assistant\n"
WITH_TOKENS = Vocabulary(("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"))


def said(entry, output, **more):
    """Text and calls."""
    found = cut(entry, output, **more)
    return found.text, list(found.calls)


def test_without_a_format_all_is_text():
    output = f" <think>no</think> {CALL}\n"
    assert said(NO_ENTRY, output) == (output, [])


def test_the_name_comes_first_and_then_the_arguments_as_they_are_written():
    found = cut(HERMES, '<tool_call>{"name": "f", "arguments": {"a":  [1]}}</tool_call>')
    pieces = [part for parts in found.pieces for part in parts]
    assert pieces[0] == Part(PartKind.CALL, "{", 0, call_id("r1", 0, 0), "f")
    assert [part.text for part in pieces[1:]] == list('"a":  [1]}')


def test_text_is_said_at_once_unless_it_may_be_a_mark_or_the_spaces_at_the_end():
    found = cut(HERMES, "a <b <to", is_finished=False)
    assert ["".join(part.text for part in parts) for parts in found.pieces] == ["a", "", "", " <b", "", "", "", ""]


def test_what_may_have_become_a_mark_is_text_at_the_end():
    assert said(HERMES, "a <tool_cal") == ("a <tool_cal", [])


@pytest.mark.parametrize(
    "inside",
    [
        pytest.param("no JSON", id="no JSON"),
        pytest.param('{"name": 3, "arguments": {}}', id="a name that is no text"),
        pytest.param('{"arguments": {}}', id="no name"),
        pytest.param('["f"]', id="a list"),
        pytest.param('{"name": "f" "arguments": {}}', id="no comma"),
    ],
)
def test_a_call_that_cannot_be_read_is_text(inside):
    output = f"<tool_call>{inside}</tool_call>"
    assert said(HERMES, output) == (output, [])


def test_the_next_call_is_read_behind_one_that_cannot_be():
    assert said(HERMES, f"<tool_call>no{CALL}") == ("<tool_call>no", [("f", '{"a": 1}')])


def test_a_call_without_arguments_has_none():
    assert said(HERMES, '<tool_call>{"name": "f"}</tool_call>') == ("", [("f", "{}")])


def test_arguments_before_the_name_wait_for_it():
    assert said(HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>') == ("", [("f", '{"a": 1}')])


def test_arguments_in_a_text_are_taken_out_of_it():
    output = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert said(HERMES, output) == ("", [("f", '{"a": 1}')])


def test_a_forgotten_brace_does_not_swallow_what_follows():
    output = '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>Done.'
    assert said(HERMES, output) == ("Done.", [("f", '{"a": 1}')])


def test_the_end_of_the_tokens_inside_a_call_keeps_what_there_is():
    assert said(HERMES, CALL[:-15]) == ("", [("f", '{"a": 1')])
    assert said(HERMES, CALL[:25]) == (CALL[:25], [])


def test_a_mark_inside_a_text_of_json_closes_nothing():
    output = CALL.replace("1", '"</tool_call> \\" }"')
    assert said(HERMES, output) == ("", [("f", '{"a": "</tool_call> \\" }"}')])


class Spelt(Vocabulary):
    """No text is written with a mark's token."""

    def encode(self, text):
        return list(text.encode())


def test_a_mark_that_is_a_token_counts_as_that_token_alone():
    marks = ("<tool_call>", "</tool_call>")
    assert said(HERMES, CALL, vocabulary=Vocabulary(marks)) == ("", [("f", '{"a": 1}')])
    assert said(HERMES, CALL, vocabulary=Spelt(marks)) == (CALL, [])


def test_special_tokens_that_are_no_marks_are_left_out_of_text_and_marks_are_spelt_out_where_they_mean_nothing():
    vocabulary = Vocabulary(("<tool_call>", "<|special|>"), num_special=2)
    assert said(HERMES, "a<|special|>b<tool_call>c", vocabulary=vocabulary) == ("ab<tool_call>c", [])


@pytest.mark.parametrize("vocabulary", [Vocabulary(), WITH_TOKENS], ids=["letters", "tokens"])
@pytest.mark.parametrize(
    ("prompt", "output", "reasoning", "text"),
    [
        pytest.param("<think>\n", "Hm.</think>\n\nYes.", "Hm.", "Yes.", id="opened by the prompt"),
        pytest.param("<think>\n\n</think>\n\n", "Yes.", "", "Yes.", id="closed by the prompt"),
        pytest.param("", "<think>Hm.</think>Yes.", "Hm.", "Yes.", id="opened by the model"),
        pytest.param("<think>\n", "Hm.", "Hm.", "", id="never closed"),
        pytest.param("So", " it is.", "", " it is.", id="begun by the prompt"),
    ],
)
def test_reasoning_is_known_from_the_prompt(vocabulary, prompt, output, reasoning, text):
    earlier = f"{ASSISTANT}<think>not this<|im_end|>\n<|im_start|>user\n<think>"
    found = cut(THINKING, output, prompt=earlier + ASSISTANT + prompt, vocabulary=vocabulary)
    assert (found.reasoning, found.text) == (reasoning, text)


def test_a_prompt_without_a_turn_of_the_model_says_nothing():
    assert said(THINKING, "Hm.", prompt="What does <think> mean? <think>") == ("Hm.", [])


@pytest.mark.parametrize(
    ("prompt", "output", "count"),
    [
        pytest.param("", "ab<think>cd</think>ef", 4, id="both marks and what is between"),
        pytest.param("<think>", "cd</think>ef", 3, id="opened by the prompt"),
        pytest.param("", "ab", 0, id="none"),
    ],
)
def test_tokens_of_reasoning_are_counted_with_its_marks(prompt, output, count):
    assert cut(THINKING, output, prompt=ASSISTANT + prompt, vocabulary=WITH_TOKENS).num_reasoning_tokens == count
    letters = cut(THINKING, output, prompt=ASSISTANT + prompt).num_reasoning_tokens
    assert letters == count + (6 * output.count("<think>") + 7 * output.count("</think>"))


def test_spaces_around_the_whole_are_left_out_and_those_inside_stay():
    assert said(HERMES, f" \n a \n{CALL}\n b \n") == ("a \n\n b", [("f", '{"a": 1}')])


def test_calls_may_be_switched_off():
    found = cut(THINKING, f"<think>Hm.</think>{CALL}", takes_calls=False)
    assert (found.reasoning, found.text, found.calls) == ("Hm.", CALL, ())


def test_values_between_marks_become_json_of_the_types_of_the_schema():
    types = {"a": "string", "b": "integer", "c": "boolean", "d": "array", "e": ["number", "null"], "f": "integer"}
    schema = json.dumps({"properties": {name: {"type": kind} for name, kind in types.items()}})
    values = {"a": '1 "x"\n</parameter>', "b": "3", "c": "True", "d": '["y"]', "e": "None", "f": "many", "g": "2"}
    pairs = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items() if name != "a")
    first = '<parameter=a>\n1 "x"</parameter>\n</parameter>\n'
    (call,) = cut(
        CODER, f"<tool_call>\n<function=f>\n{first}{pairs}</function>\n</tool_call>", tools={"f": schema}
    ).calls
    expected = {"a": '1 "x"</parameter>', "b": 3, "c": True, "d": ["y"], "e": None, "f": "many", "g": "2"}
    assert (call[0], json.loads(call[1])) == ("f", expected)


def test_a_text_between_marks_is_said_as_it_comes():
    found = cut(CODER, "<tool_call>\n<function=f>\n<parameter=a>\nlong", is_finished=False)
    assert found.calls == (("f", '{"a": "long'),)


def test_a_call_that_is_the_whole_turn_names_a_tool():
    output = '{"name": "f", "parameters": {"a": 1}}'
    assert said(LLAMA, f"\n{output}", tools={"f": ""}) == ("", [("f", '{"a": 1}')])
    assert said(LLAMA, output, tools={"g": ""}) == (output, [])
    assert said(LLAMA, f"So: {output}", tools={"f": ""}) == (f"So: {output}", [])
    assert said(LLAMA, f"<|python_tag|>{output}") == ("", [("f", '{"a": 1}')])


def test_calls_end_where_their_json_does_if_nothing_marks_the_end():
    assert said(MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": {}}[TOOL_CALLS]g[ARGS]{} Ok') == (
        "Ok",
        [("f", '{"a": {}}'), ("g", "{}")],
    )
    listed = '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abc"}, {"name": "g", "arguments": {"a": []}}] Ok'
    assert said(MISTRAL_LIST, listed) == ("Ok", [("f", "{}"), ("g", '{"a": []}')])


def test_a_list_is_read_as_far_as_it_can_be():
    listed = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"no": 1}]'
    assert said(MISTRAL_LIST, listed) == ('{"no": 1}]', [("f", "{}")])


def test_bare_keys_and_other_quotation_marks_become_json():
    output = '<start_function_call>call:f{a:<escape>say "x"<escape>,b:[1,true,{c:"d\\""}]}<end_function_call>'
    (call,) = cut(GEMMA, output).calls
    assert (call[0], json.loads(call[1])) == ("f", {"a": 'say "x"', "b": [1, True, {"c": 'd"'}]})


def test_what_is_held_has_a_bound():
    name = "<tool_call>" + '{"name": "' + "x" * 5000
    assert cut(HERMES, name, is_finished=False).text.startswith('<tool_call>{"name": "x')
    early = '<tool_call>{"arguments": {"a": "' + "x" * (MAX_HELD_CHARS + 100)
    assert len(cut(HERMES, early, is_finished=False).text) > MAX_HELD_CHARS
    assert cut(HERMES, "a" + " " * 2000, is_finished=False).text.endswith(" ")


def test_ids_of_calls_differ_by_request_completion_and_number_and_are_the_same_again():
    ids = {call_id(*named) for named in (("r1", 0, 0), ("r1", 0, 1), ("r1", 1, 0), ("r2", 0, 0), ("r1 1", 0, 0))}
    assert len(ids) == 5
    assert call_id("r1", 0, 0) in ids

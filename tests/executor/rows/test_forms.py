"""Forms of outputs: masks say what may be drawn, whatever was asked before, and rows draw nothing else."""

import json
from collections import deque
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafting.serving import serve
from executor_rig.forms import WhenTold, bytes_forms, call, choice, json_schema, letter_forms, regex
from executor_rig.hash_runner import HashRunner
from executor_rig.plans import int32, placement, plan
from executor_rig.stepping import SteppingEngine
from paceline.bytes_tokenizer import END_TOKEN_IDS, VOCAB_SIZE
from paceline.plan.sampling import SamplingParams
from paceline.plan.values import RowFinish
from paceline_executor.limits import RowLimits
from paceline_executor.rows import forms as forms_module
from paceline_executor.rows.forms import LIMITS as FORM_LIMITS
from paceline_executor.rows.forms import MaskedRow
from paceline_executor.rows.table import RowTable

LETTERS, ENDS = 50, (7, 48)
LIMITS = RowLimits(
    num_rows=6, max_model_len=96, max_num_batched_tokens=96, num_blocks=150, block_size=4, vocab_size=VOCAB_SIZE
)
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["far", "near"]}},
    "required": ["x", "kind"],
    "additionalProperties": False,
}


def tokens(text):
    return ["abcdefghijkl".index(letter) for letter in text]


def left_by(filled, vocab_size=LETTERS):
    """The tokens that each mask leaves."""
    bits = np.unpackbits(filled.masks.words.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(line[:vocab_size]).tolist()) for line in bits]


def left(forms, form, output, drafts=(), vocab_size=LETTERS):
    return left_by(forms.fill([MaskedRow(0, form, int32(output), int32(drafts))]), vocab_size)


@pytest.fixture(scope="module")
def letters():
    return letter_forms(LETTERS, ENDS)


@pytest.fixture
def table(seen_or_hidden):
    return RowTable(LIMITS, bytes_forms())


def engine_of(table):
    return SteppingEngine(table, HashRunner(LIMITS.num_blocks, LIMITS.block_size, VOCAB_SIZE))


def asking(row, structured, **asked):
    return placement(
        row, [1 + row, 2, 3], end_token_ids=asked.pop("ends", END_TOKEN_IDS), structured=structured, **asked
    )


def text_of(outcome):
    return bytes(token for token in outcome.tokens if token < 256).decode()


WORDS = st.lists(st.text("abcdef", min_size=1, max_size=5), min_size=1, max_size=6, unique=True)


@given(WORDS, st.data())
def test_masks_leave_what_some_option_goes_on_with(letters, options, data):
    """In whatever order outputs are asked for: a row is where its output says, not where it was before."""
    form = letters.begin(placement(0, [1], end_token_ids=ENDS, structured=choice(*options)))
    for _ in range(6):
        word = data.draw(st.sampled_from(options))
        output = word[: data.draw(st.integers(0, len(word)))]
        going = {option[len(output)] for option in options if option.startswith(output) and option != output}
        ends = set(ENDS) if output in options else set()
        assert left(letters, form, tokens(output)) == [{*tokens(going), *ends}]


@given(WORDS, st.data())
def test_masks_behind_drafts_are_those_behind_such_outputs_up_to_the_first_that_is_refused(letters, options, data):
    """Behind that one nothing is masked, and the form is where its output says afterwards."""
    form = letters.begin(placement(0, [1], end_token_ids=ENDS, structured=choice(*options)))
    drafts = tokens(data.draw(st.sampled_from(options)) + data.draw(st.text("abcdef", max_size=2)))
    masks, is_refused = left(letters, form, [], drafts), False
    for place, mask in enumerate(masks):
        if is_refused:
            assert mask == set(range(LETTERS))
        else:
            fresh = letters.begin(placement(0, [1], end_token_ids=ENDS, structured=choice(*options)))
            assert [mask] == left(letters, fresh, drafts[:place])
            is_refused = place < len(drafts) and drafts[place] not in mask
    assert left(letters, form, []) == masks[:1]


@pytest.mark.parametrize(
    ("output", "allowed"),
    [
        pytest.param("", "a", id="open"),
        pytest.param("ab", "cEND", id="complete, and it may go on"),
        pytest.param("abc", "END", id="complete and closed"),
    ],
)
@pytest.mark.parametrize("of_row", [(7, 48), (7,), (7, 48, 40, 4), (48, 2)])
def test_tokens_that_end_the_row_are_left_where_the_form_is_complete(letters, output, allowed, of_row):
    """All of the row's: those of the model, and those of the request, even where the form has such a text."""
    form = letters.begin(placement(0, [1], end_token_ids=of_row, structured=choice("ab", "abc")))
    ends = set(of_row) if "END" in allowed else set()
    texts = set(tokens(allowed.removesuffix("END"))) - set(of_row)
    assert left(letters, form, tokens(output)) == [texts | ends]


def test_an_end_token_that_does_not_end_the_row_is_never_left(letters):
    form = letters.begin(
        placement(0, [1], end_token_ids=[7], ignored_end_token_ids=[48, 2], structured=choice("ab", "abc"))
    )
    assert [left(letters, form, tokens(output)) for output in ("ab", "abc")] == [[{7}], [{7}]]


def test_a_minimum_withholds_ends_only_while_the_form_allows_another_token(letters):
    form = letters.begin(placement(0, [1], end_token_ids=ENDS, min_tokens=3, structured=choice("ab", "abcd", "b")))
    assert left(letters, form, tokens("ab")) == [set(tokens("c"))]
    assert left(letters, form, tokens("b")) == [set(ENDS)]
    assert left(letters, form, [], tokens("abcd"))[2:] == [set(tokens("c")), set(tokens("d")), set(ENDS)]


def test_ids_without_a_text_are_never_left():
    forms = bytes_forms()
    form = forms.begin(placement(0, [1], end_token_ids=END_TOKEN_IDS, structured=regex("(?s:.*)")))
    (free,) = left(forms, form, [], vocab_size=288)
    assert free == {*range(0x80), *range(0xC2, 0xF5), *END_TOKEN_IDS}  # what UTF-8 begins with


def test_a_mark_that_is_one_token_may_be_drawn_as_one():
    forms = letter_forms(LETTERS, ENDS, marks={10: "<call>", 11: "</call>"})
    form = forms.begin(placement(0, [1], end_token_ids=ENDS, structured=call("<call>", "</call>", "ab")))
    assert 10 in left(forms, form, [])[0]
    assert left(forms, form, [10]) == [{0}]
    assert 11 in left(forms, form, [10, 0, 1])[0]
    assert left(forms, form, [10, 0, 1, 11]) == [set(ENDS)]


def test_rows_draw_what_their_forms_allow_and_end_with_them(table):
    """Beside a row without a form, which draws as alone."""
    requests = [asking(0, json_schema(POINT), max_tokens=40), asking(1, regex("(ab|cd){2,3}"), max_tokens=40)]
    free = placement(2, [3, 2, 3], max_tokens=20)
    outcomes, _ = serve(engine_of(table), [*requests, free])
    jsonschema.validate(json.loads(text_of(outcomes[0])), POINT)
    assert text_of(outcomes[1]) in {a + b + c for a in ("ab", "cd") for b in ("ab", "cd") for c in ("", "ab", "cd")}
    assert [outcome.finish for outcome in outcomes[:2]] == [RowFinish.END_TOKEN] * 2
    ((alone,), _) = serve(engine_of(RowTable(LIMITS)), [free])
    assert outcomes[2].tokens == alone.tokens


def test_completions_of_one_request_are_those_of_single_requests_with_their_seeds(table):
    def seeded(row, seed):
        sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
        return placement(
            row, [5, 6], end_token_ids=END_TOKEN_IDS, max_tokens=40, sampling=sampling, structured=json_schema(POINT)
        )

    together, _ = serve(engine_of(table), [seeded(row, 11 + row) for row in range(4)])
    for row, outcome in enumerate(together):
        ((alone,), _) = serve(engine_of(RowTable(LIMITS, bytes_forms())), [seeded(0, 11 + row)])
        assert alone == outcome
    assert len({text_of(outcome) for outcome in together}) > 1


@pytest.mark.parametrize("num_before", [1, 5, 11])
def test_a_row_that_is_placed_again_with_its_output_goes_on_the_same(table, num_before):
    ((whole,), _) = serve(engine_of(table), [asking(0, json_schema(POINT), max_tokens=40)])
    begun = asking(0, json_schema(POINT), output=whole.tokens[:num_before], max_tokens=40)
    engine = engine_of(RowTable(LIMITS, bytes_forms()))
    grants = [(0, index, index) for index in range(20)]
    results = [engine.execute(plan([(0, 3 + num_before)], place=[begun], grants=grants))]
    while not results[-1].finishes[0]:
        results.append(engine.execute(plan([(0, 1)], step_id=1 + len(results))))
    assert [result.token_ids.item() for result in results] == whole.tokens[num_before:]


def test_a_row_whose_form_is_not_compiled_waits_and_others_go_on(seen_or_hidden):
    """Its prompt is computed meanwhile, and it draws the same in the end."""
    pool = WhenTold()
    engine = engine_of(RowTable(LIMITS, bytes_forms(pool)))
    waiting, free = asking(0, regex("[a-c]{3}"), max_tokens=40), placement(1, [3, 2, 3], max_tokens=20)
    grants = [(row, index, row * 20 + index) for row in (0, 1) for index in range(8)]
    results = [engine.execute(plan([(0, 3), (1, 3)], place=[waiting, free], grants=grants))]
    results.append(engine.execute(plan([(0, 1), (1, 1)], step_id=2)))
    assert [result.num_accepted.tolist() for result in results] == [[0, 1], [0, 1]]
    (state,) = [state for state in engine.table.states() if state.row == 0]
    assert (state.num_computed_tokens, state.finish) == (2, RowFinish.GOES_ON)
    pool.finish()
    results += [engine.execute(plan([(0, 1), (1, 1)], step_id=step)) for step in range(3, 7)]
    drawn = [result.token_ids[0] for result in results[2:]]
    ((alone,), _) = serve(engine_of(RowTable(LIMITS, bytes_forms())), [waiting])
    assert drawn == alone.tokens
    assert results[-1].finishes[0] == RowFinish.END_TOKEN


def test_draws_wait_for_a_form_only_while_their_step_computes_anyway():
    pool, now = WhenTold(), [0]
    runner = HashRunner(LIMITS.num_blocks, LIMITS.block_size, VOCAB_SIZE)
    engine = SteppingEngine(RowTable(LIMITS, bytes_forms(pool)), runner, lambda: now[0])
    first = plan([(0, 3)], place=[asking(0, choice("a"))], grants=[(0, 0, 0)])
    late = engine.launch(replace(first, predicted_ns=1000))
    assert engine.pause() is not None
    now[0] = 900
    assert engine.pause() is None
    assert engine.collect(late).num_accepted.tolist() == [0]
    early = engine.launch(replace(plan([(0, 1)], step_id=2), predicted_ns=1000))
    assert not engine.pause().work.done()
    pool.finish()
    assert engine.pause() is None
    assert engine.collect(early).token_ids.tolist() == [ord("a")]


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_row_that_waited_draws_again_while_steps_before_are_in_flight(seen_or_hidden, num_steps):
    """It does nothing in what was launched before it could be described anew, and everything in what came later."""
    if seen_or_hidden == "seen":
        return  # one step is in flight
    pool = WhenTold()
    engine, waiting = engine_of(RowTable(LIMITS, bytes_forms(pool))), asking(0, regex("[a-c]{4}"), max_tokens=40)
    first = plan([(0, 3)], place=[waiting], grants=[(0, index, index) for index in range(8)])
    plans = [first, *(plan([(0, 1)], step_id=step) for step in range(2, 40))]
    in_flight, tokens, finish = deque(), [], 0
    for turn, planned in enumerate(plans):
        while not engine.can_launch(planned):
            result = engine.collect(in_flight.popleft())
            tokens, finish = tokens + result.token_ids.tolist(), finish or result.finishes[0]
        in_flight.append(engine.launch(planned))
        if turn == num_steps:
            pool.finish()
    ((alone,), _) = serve(engine_of(RowTable(LIMITS, bytes_forms())), [waiting])
    assert (tokens, finish) == (alone.tokens, RowFinish.END_TOKEN)


def drafting_engine(forms):
    limits = replace(LIMITS, max_num_draft_tokens=8)
    return SteppingEngine(RowTable(limits, forms), HashRunner(LIMITS.num_blocks, LIMITS.block_size, VOCAB_SIZE))


def test_what_a_form_forces_is_drafted_and_right(seen_or_hidden):
    """Of a tokenizer of bytes nothing else could be drawn: long keys come in a few steps, and outputs are the same."""
    keys = ["the_first_of_its_keys", "and_another_one"]
    schema = {"type": "object", "properties": {key: {"type": "boolean"} for key in keys}, "required": keys}
    request = asking(0, json_schema(schema | {"additionalProperties": False}), max_tokens=80)
    ((plain,), slow_steps) = serve(drafting_engine(bytes_forms()), [request])
    ((drafted,), steps) = serve(drafting_engine(bytes_forms()), [request], lambda *_: 8)
    assert drafted == plain
    assert len(slow_steps) == len(plain.tokens) > 3 * len(steps)
    assert sum(step.accepted for step in steps) > 0.9 * sum(step.verified for step in steps)


def test_a_row_whose_form_becomes_ready_while_masks_are_filled_draws_nothing(monkeypatch):
    forms, answers = bytes_forms(), iter([False, True, True])
    monkeypatch.setattr(forms_module.RowForm, "is_ready", property(lambda _: next(answers)))
    form = forms.begin(placement(0, [1], end_token_ids=END_TOKEN_IDS, structured=regex("a")))
    filled = forms.fill([MaskedRow(0, form, int32([]), int32(list(b"aa")))])
    assert (filled.waiting, left_by(filled, VOCAB_SIZE)) == ({0}, [set()] * 3)


def errors_of(outcomes):
    return [(RowFinish(outcome.finish).name, outcome.error) for outcome in outcomes]


LATE = regex("[a-z]{1,3}_(ab|[a-d]{30}e|[a-c]{25}z){2}")
"""With little fuel the mask behind its first letter cannot be computed."""


@pytest.fixture
def little_fuel(monkeypatch):
    monkeypatch.setattr(forms_module, "LIMITS", type(FORM_LIMITS)(step_lexer_fuel=20, verbose_errors=False))


def test_a_form_that_takes_more_than_a_step_may_fails_its_row_alone(table, little_fuel):
    """At whatever token: a mask of the end tokens alone would end the output instead."""
    outcomes, _ = serve(engine_of(table), [asking(0, LATE), placement(1, [4], max_tokens=9)])
    assert errors_of(outcomes) == [("ERROR", "STRUCTURED_FAILED"), ("LENGTH", "")]
    assert len(outcomes[0].tokens) == 1


def test_a_row_does_not_fail_by_what_others_met_in_the_same_form(monkeypatch):
    """Matchers share what the first was compiled to, and its errors."""
    monkeypatch.setattr(forms_module, "LIMITS", type(FORM_LIMITS)(step_lexer_fuel=200, verbose_errors=False))
    forms = bytes_forms()
    first, second = (forms.begin(placement(row, [1], end_token_ids=END_TOKEN_IDS, structured=LATE)) for row in range(2))
    assert left(forms, second, list(b"x"), vocab_size=VOCAB_SIZE) == [set(b"abcdefghijklmnopqrstuvwxyz_")]
    assert left(forms, first, list(b"xy_"), vocab_size=VOCAB_SIZE) == [set()]
    masks = [left(forms, second, list(b"x"), vocab_size=VOCAB_SIZE) for _ in range(2)]
    assert masks == [[set()], [set(b"abcdefghijklmnopqrstuvwxyz_")]]  # it waits, and goes on


def test_a_form_without_an_end_fails_its_row(table):
    """The library compiles it, and masks all but the end tokens."""
    loop = json_schema(
        {
            "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
            "$ref": "#/$defs/a",
        }
    )
    outcomes, _ = serve(engine_of(table), [asking(0, loop)])
    assert errors_of(outcomes) == [("ERROR", "STRUCTURED_FAILED")]


def test_a_row_whose_rules_and_form_leave_nothing_is_told_so(table):
    sampling = SamplingParams(0.0, 0, 1.0, 0.0, 0, allowed_token_ids=(ord("z"),))
    result = engine_of(table).execute(
        plan([(0, 3)], place=[asking(0, choice("a"), sampling=sampling)], grants=[(0, 0, 0)])
    )
    (error,) = result.errors
    assert error.reason == "NO_TOKEN_LEFT"
    assert "the output's form" in error.message


def test_a_form_is_refused_where_nothing_holds_outputs_to_it():
    engine = SteppingEngine(RowTable(LIMITS), HashRunner(LIMITS.num_blocks, LIMITS.block_size, VOCAB_SIZE))
    result = engine.execute(plan(place=[asking(0, choice("a"))]))
    (error,) = result.errors
    assert (error.reason, error.field) == ("UNSUPPORTED_FIELD", "structured")

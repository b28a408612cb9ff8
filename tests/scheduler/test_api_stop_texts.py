"""Stop texts: the output ends before the first one, and nothing of it is shown however tokens and characters lie."""

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_scheduler.api.completion import CompletionText
from paceline_scheduler.api.detokenizer import Detokenizer, Spelling
from paceline_scheduler.api.stop_texts import StopScanner

# A vocabulary in which everything about borders can happen: a character over three tokens, stop texts inside of one
# token and over several, and tokens that spell nothing.
VOCABULARY = (b"a", b"b", b"ab", b"aab", b"ba", b"b\xe2", b"\x82", b"\xac", b"\xe2\x82\xaca", b"", b"\xff")
SPELLING = Spelling(VOCABULARY, VOCABULARY, num_stripped_spaces=0)

token_lists = st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=25)
stop_lists = st.lists(st.text("ab€\ufffd", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)
group_sizes = st.lists(st.integers(1, 5), max_size=25)


def characters_so_far(token_ids):
    """All characters that are complete after these tokens: the model's own way to decode."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(VOCABULARY[i] for i in token_ids))


def first_stop(text, stop_texts):
    """Where the first stop text ends and which it is, by trying every end and every stop text; the longest wins."""
    for end in range(len(text) + 1):
        found = [stop for stop in stop_texts if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def without_beginnings(text, stop_texts):
    """The text without the longest end of it that is the beginning of a stop text."""
    for start in range(len(text) + 1):
        if any(stop.startswith(text[start:]) for stop in stop_texts):
            return text[:start]
    return text


def expected_after(token_ids, stop_texts):
    """The model: all text shown after these tokens, the number of tokens in the output, and the stop text found."""
    text = characters_so_far(token_ids)
    stop = first_stop(text, stop_texts)
    if stop is None:
        return without_beginnings(text, stop_texts), len(token_ids), None
    end, stop_text = stop
    num_tokens = next(n for n in range(len(token_ids) + 1) if len(characters_so_far(token_ids[:n])) >= end)
    return text[: end - len(stop_text)], num_tokens, stop_text


def in_groups(token_ids, sizes):
    """The tokens in groups of these sizes, the rest one by one."""
    start = 0
    while start < len(token_ids):
        size = sizes.pop(0) if sizes else 1
        yield token_ids[start : start + size]
        start += size


@given(token_lists, stop_lists, group_sizes)
def test_output_equals_the_model_after_every_group(token_ids, stop_texts, sizes):
    """The text shown, the cut and the stop text are a function of the tokens so far, not of their grouping."""
    completion = CompletionText(Detokenizer(SPELLING, skip_special_tokens=True), stop_texts)
    shown, num_tokens = "", 0
    for group in in_groups(token_ids, list(sizes)):
        text, match = completion.take(group)
        shown += text
        num_tokens += len(group) if match is None else match.num_tokens
        seen = token_ids[: num_tokens if match is None else num_tokens - match.num_tokens + len(group)]
        assert (shown, num_tokens, match and match.stop_text) == expected_after(seen, stop_texts)
        if match is not None:
            return
    text, stop_text = completion.finish()
    whole = b"".join(VOCABULARY[i] for i in token_ids).decode("utf-8", "replace")
    stop = first_stop(whole, stop_texts)
    assert (shown + text, stop_text) == ((whole, None) if stop is None else (whole[: stop[0] - len(stop[1])], stop[1]))


@pytest.mark.parametrize(
    ("pieces", "stop_texts", "shown", "found"),
    [
        (["one ST", "OP two"], ("STOP",), ["one ", ""], "STOP"),
        (["one ST", "ART two"], ("STOP",), ["one ", "START two"], None),
        (["aaa", "b"], ("aab",), ["a", ""], "aab"),
        (["abcd"], ("abcd", "bc"), ["a"], "bc"),
        (["xabc"], ("bc", "abc", "c"), ["x"], "abc"),
        (["STOP"], ("STOP",), [""], "STOP"),
        (["", "\n", "\n"], ("\n\n",), ["", "", ""], "\n\n"),
    ],
    ids=["over-a-border", "held-back-then-shown", "overlapping-itself", "first-complete-wins", "longest-at-one-end",
         "nothing-before", "empty-pieces"],
)  # fmt: skip
def test_what_is_shown_of_each_piece(pieces, stop_texts, shown, found):
    """What may become a stop text waits; the one that is complete first ends the output."""
    scanner = StopScanner(stop_texts)
    scans = [scanner.scan(piece) for piece in pieces]
    assert [text for text, _ in scans] == shown
    assert [stop_text for _, stop_text in scans] == [None] * (len(scans) - 1) + [found]


def test_no_more_is_held_back_than_a_stop_text_less_one_character():
    """However long the output."""
    scanner = StopScanner(("a" * 256,))
    shown = sum(len(scanner.scan("a" * 255 + "b")[0]) for _ in range(40))
    assert shown + len(scanner.flush()) == 40 * 256
    assert StopScanner(("a" * 256,)).scan("a" * 255) == ("", None)

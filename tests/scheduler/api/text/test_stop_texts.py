"""Stop texts: the output ends before the first one, and nothing of it is shown however tokens and characters lie."""

import codecs
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_scheduler.api.completion import CompletionText
from paceline_scheduler.api.text.detokenizer import Detokenizer, Spelling
from paceline_scheduler.api.text.stop_texts import MatchedText, StopScanner

# A vocabulary in which everything about borders can happen: a character over three tokens, stop texts inside of one
# token and over several, and tokens that spell nothing.
VOCABULARY = (b"a", b"b", b"ab", b"aab", b"ba", b"b\xe2", b"\x82", b"\xac", b"\xe2\x82\xaca", b"", b"\xff", b"<ab>")
SHOWN = (*VOCABULARY[:-1], b"")  # without the special token
SPELLING = Spelling(VOCABULARY, SHOWN, num_stripped_spaces=0)

token_lists = st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=25)
stop_lists = st.lists(st.text("ab€\ufffd>", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)
group_sizes = st.lists(st.integers(1, 5), max_size=25)


@dataclass(frozen=True)
class Asked:
    """What a request says of its text."""

    stop_texts: tuple
    matched_text: MatchedText
    min_tokens: int
    skip_special_tokens: bool

    def decoded(self, token_ids):
        """The bytes of these tokens."""
        return b"".join((SHOWN if self.skip_special_tokens else VOCABULARY)[i] for i in token_ids)

    def characters_so_far(self, token_ids):
        """All characters that are complete after these tokens: the model's own way to decode."""
        return codecs.getincrementaldecoder("utf-8")("replace").decode(self.decoded(token_ids))

    def first_stop(self, text, num_unsearched):
        """The first stop text that ends behind so many characters, by trying every end; the longest wins."""
        for end in range(num_unsearched + 1, len(text) + 1):
            found = [stop for stop in self.stop_texts if text[:end].endswith(stop)]
            if found:
                return end, max(found, key=len)
        return None

    def without_end(self, text, end, stop_text):
        """The text as far as it is shown when this stop text ends it."""
        return text[: end - (0 if self.matched_text is MatchedText.INCLUDED else len(stop_text))]

    def without_beginnings(self, text):
        """The text without the longest end of it that is the beginning of a stop text."""
        for start in range(len(text)):
            end = text[start:]
            if any(stop.startswith(end) and stop != end for stop in self.stop_texts):
                return text[:start]
        return text

    def expected_after(self, token_ids):
        """The model: all text shown after these tokens, the number of tokens in the output, and the stop text found."""
        text = self.characters_so_far(token_ids)
        stop = self.first_stop(text, len(self.characters_so_far(token_ids[: self.min_tokens])))
        if stop is None:
            shown = text if self.matched_text is MatchedText.INCLUDED else self.without_beginnings(text)
            return shown, len(token_ids), None
        end, stop_text = stop
        num_tokens = next(n for n in range(len(token_ids) + 1) if len(self.characters_so_far(token_ids[:n])) >= end)
        return self.without_end(text, end, stop_text), num_tokens, stop_text

    def expected_in_the_end(self, token_ids):
        """The model: the whole text and the stop text found, when the output ends after these tokens."""
        text = self.decoded(token_ids).decode("utf-8", "replace")
        is_searched = len(token_ids) > self.min_tokens
        num_unsearched = len(self.characters_so_far(token_ids[: self.min_tokens])) if is_searched else len(text)
        stop = self.first_stop(text, num_unsearched)
        return (text, None) if stop is None else (self.without_end(text, *stop), stop[1])


requests = st.builds(Asked, stop_lists, st.sampled_from(MatchedText), st.integers(0, 8), st.booleans())


def in_groups(token_ids, sizes):
    """The tokens in groups of these sizes, the rest one by one."""
    start = 0
    while start < len(token_ids):
        size = sizes.pop(0) if sizes else 1
        yield token_ids[start : start + size]
        start += size


@given(token_lists, requests, group_sizes)
def test_output_equals_the_model_after_every_group(token_ids, asked, sizes):
    detokenizer = Detokenizer(SPELLING, asked.skip_special_tokens)
    completion = CompletionText(detokenizer, asked.stop_texts, asked.matched_text, asked.min_tokens)
    shown, num_tokens = "", 0
    for group in in_groups(token_ids, list(sizes)):
        text, match = completion.take(group)
        shown += text
        num_tokens += len(group) if match is None else match.num_tokens
        seen = token_ids[: num_tokens if match is None else num_tokens - match.num_tokens + len(group)]
        assert (shown, num_tokens, match and match.stop_text) == asked.expected_after(seen)
        if match is not None:
            return
    text, stop_text = completion.finish()
    assert (shown + text, stop_text) == asked.expected_in_the_end(token_ids)


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
    scanner = StopScanner(stop_texts)
    scans = [scanner.scan(piece) for piece in pieces]
    assert [text for text, _ in scans] == shown
    assert [stop_text for _, stop_text in scans] == [None] * (len(scans) - 1) + [found]


def test_a_stop_text_that_is_kept_is_shown_as_it_comes():
    scanner = StopScanner(("STOP",), MatchedText.INCLUDED)
    assert [scanner.scan(piece) for piece in ("a ST", "OP b")] == [("a ST", None), ("OP", "STOP")]


def test_a_stop_text_that_is_passed_by_may_go_on_as_another_one():
    scanner = StopScanner(("aba",))
    assert scanner.pass_by("xaba") == "xab"
    assert scanner.scan("ba!") == ("", "aba")


def test_no_more_is_held_back_than_a_stop_text_less_one_character():
    scanner = StopScanner(("a" * 256,))
    shown = sum(len(scanner.scan("a" * 255 + "b")[0]) for _ in range(40))
    assert shown + len(scanner.flush()) == 40 * 256
    assert StopScanner(("a" * 256,)).scan("a" * 255) == ("", None)

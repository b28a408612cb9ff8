"""Whether a stream was delivered as it should have been: each delta at its offset, then the end.

Knows the undisturbed result of the same request. Counts by itself and trusts no check of the client library, since a
fault in one of them must show here.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline_client.results import Completion, Delta, ReasoningPart, Result, TextPart, TokenLogprobs

_CALL_ID = re.compile("[a-zA-Z0-9]{9}")


@dataclass(slots=True)
class Mismatches:
    """What is wrong with one stream or with many, in tokens."""

    num_lost: int = 0
    """Tokens of the undisturbed output that never came."""
    num_doubled: int = 0
    """Tokens that came again."""
    num_changed: int = 0
    """Tokens that are others, or have other log-probabilities; and each text, part, reason or count that is another."""
    first: str | None = None
    """The first of them in words."""

    def __bool__(self) -> bool:
        return self.first is not None

    def add(self, other: "Mismatches") -> None:
        self.num_lost += other.num_lost
        self.num_doubled += other.num_doubled
        self.num_changed += other.num_changed
        self.first = self.first or other.first


@dataclass(slots=True)
class _Seen:
    num_tokens: int = 0
    texts: defaultdict[str, str] = field(default_factory=lambda: defaultdict(str))
    others: set[str] = field(default_factory=set)
    """Which of the texts are not how the undisturbed ones begin."""


@dataclass(slots=True)
class StreamComparison:
    """Compares one stream with the result it should have, while it arrives. `name` is the request's."""

    name: str
    expected: Result
    _seen: dict[int, _Seen] = field(default_factory=dict)
    _num_prompt_logprobs: int = 0
    _found: Mismatches = field(default_factory=Mismatches)

    def take(self, delta: Delta) -> Mismatches:
        """A delta arrived: what is wrong with it."""
        self._found = Mismatches()
        if delta.index >= len(self.expected.completions):
            self._changed(len(delta.token_ids) or 1, f"completion {delta.index} was not asked for")
            return self._found
        expected = self.expected.completions[delta.index]
        seen = self._seen.setdefault(delta.index, _Seen())
        self._place(seen, delta)
        self._compare_tokens(expected, delta)
        self._compare_texts(expected, seen, delta)
        seen.num_tokens = max(seen.num_tokens, delta.offset + len(delta.token_ids))
        if delta.prompt_logprobs:
            self._compare_prompt(delta.prompt_logprobs)
        return self._found

    def conclude(self, result: Result) -> Mismatches:
        """The stream ended with this result: what is wrong with its end, or was missing before."""
        self._found = Mismatches()
        for expected in self.expected.completions:
            seen = self._seen.get(expected.index, _Seen())
            num_missing = len(expected.token_ids) - seen.num_tokens
            if num_missing > 0:
                self._lost(num_missing, f"the last {num_missing} tokens of completion {expected.index} did not come")
            for name, whole in _texts(expected).items():
                if seen.texts[name] != whole and name not in seen.others:
                    self._changed(
                        1, f"the {name} of completion {expected.index} is {seen.texts[name]!r}, not {whole!r}"
                    )
        if self._num_prompt_logprobs != len(self.expected.prompt_logprobs):
            self._changed(1, "log-probabilities of the prompt are missing")
        ends, expected_ends = _ends(result), _ends(self.expected)
        if ends != expected_ends:
            self._changed(1, f"the end is {ends}, not {expected_ends}")
        return self._found

    def _place(self, seen: _Seen, delta: Delta) -> None:
        gap = delta.offset - seen.num_tokens
        if gap > 0:
            self._lost(gap, f"{gap} tokens before offset {delta.offset} did not come")
        elif gap < 0:
            num_again = min(-gap, len(delta.token_ids))
            self._doubled(num_again, f"{num_again} tokens from offset {delta.offset} came again")

    def _compare_tokens(self, expected: Completion, delta: Delta) -> None:
        part = slice(delta.offset, delta.offset + len(delta.token_ids))
        wanted, wanted_logprobs = expected.token_ids[part], expected.logprobs[part]
        num_wrong = len(delta.token_ids) - len(wanted)
        num_wrong += sum(got != right for got, right in zip(delta.token_ids, wanted, strict=False))
        if num_wrong:
            self._changed(num_wrong, f"at offset {delta.offset} came {delta.token_ids}, not {wanted}")
        elif delta.logprobs != wanted_logprobs:
            num_wrong = sum(got != right for got, right in zip(delta.logprobs, wanted_logprobs, strict=False))
            what = f"at offset {delta.offset} log-probabilities are {delta.logprobs}, not {wanted_logprobs}"
            self._changed(max(num_wrong, 1), what)

    def _compare_texts(self, expected: Completion, seen: _Seen, delta: Delta) -> None:
        wholes = _texts(expected)
        for name, text in _pieces(delta):
            seen.texts[name] += text
            if not wholes.get(name, "").startswith(seen.texts[name]) and name not in seen.others:
                seen.others.add(name)
                what = f"the {name} {seen.texts[name]!r} is not how {wholes.get(name, '')!r} begins"
                self._changed(1, what)

    def _compare_prompt(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        self._num_prompt_logprobs += len(logprobs)
        if logprobs != self.expected.prompt_logprobs:
            self._changed(1, "log-probabilities of the prompt are others")

    def _lost(self, count: int, what: str) -> None:
        self._found.add(Mismatches(num_lost=count, first=f"{self.name}: {what}"))

    def _doubled(self, count: int, what: str) -> None:
        self._found.add(Mismatches(num_doubled=count, first=f"{self.name}: {what}"))

    def _changed(self, count: int, what: str) -> None:
        self._found.add(Mismatches(num_changed=count, first=f"{self.name}: {what}"))


def _pieces(delta: Delta) -> Iterator[tuple[str, str]]:
    """What a delta adds to which text. That of a call begins with its id and its tool's name.

    Ids follow from the request's, so those of another request are others: one is as good as any.
    """
    yield "text", delta.text
    for part in delta.parts:
        match part:
            case TextPart(text):
                yield "content", text
            case ReasoningPart(text):
                yield "reasoning", text
            case call:
                told = (call.id and _CALL_ID.sub("id", call.id), call.name, call.arguments)
                yield f"call {call.index}", " ".join(each for each in told if each is not None)


def _texts(expected: Completion) -> dict[str, str]:
    """The whole of what the pieces are of."""
    texts = {"text": expected.text, "content": expected.content, "reasoning": expected.reasoning}
    calls = enumerate(expected.tool_calls)
    return texts | {f"call {index}": f"id {call.name} {call.arguments}" for index, call in calls}


def _ends(result: Result) -> list[tuple[str, str | int | None, int, int]]:
    """How each completion ended, but for what may differ: cached tokens of the prompt, and attempts."""
    return [
        (
            completion.finish_reason.value,
            completion.matched_stop,
            completion.usage.num_prompt_tokens,
            completion.usage.num_output_tokens,
        )
        for completion in result.completions
    ]

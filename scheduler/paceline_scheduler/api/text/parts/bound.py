"""A response template as the tokens of one model write it: what outputs of the model are cut by."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from paceline_scheduler.api.text.parts.alphabet import Alphabet
from paceline_scheduler.api.text.parts.patterns import ItemKind, Marks, Pattern
from paceline_scheduler.api.text.parts.template import Body, CallForm, ResponseTemplate


class BoundCall:
    def __init__(self, form: CallForm, alphabet: Alphabet) -> None:
        self.form = form
        self.opens = _written(form.opens, alphabet)
        named = [item.kind for pattern in form.opens for item in pattern.items if item.group == form.name]
        self.has_plain_names = ItemKind.WORD in named
        self.closes = Marks(_written(form.closes, alphabet))
        self.quotes = tuple((alphabet.write(begin), alphabet.write(end)) for begin, end in form.quotes)
        firsts = "".join(map(re.escape, sorted(self.closes.firsts)))
        self.structure = re.compile(f'["{{}}\\[\\]{firsts}]')  # what counts between the texts of JSON
        self.scalar_end = re.compile(f"[,}}\\]\\s{firsts}]")
        if form.body is Body.PAIRS:
            assert form.pair_open is not None, "the template was read"
            assert form.pair_close is not None, "the template was read"
            self.tags = Marks((*_written([form.pair_open], alphabet), *self.closes.patterns))
            self.pair_close = Marks(_written([form.pair_close], alphabet))


class BoundTemplate:
    """Equal for all requests of a model."""

    def __init__(self, template: ResponseTemplate, tokens: Mapping[int, str], *, is_whole_turn: bool) -> None:
        """`tokens`: see `Alphabet`. `is_whole_turn`: a call may be the turn, without a mark."""
        self.template = template
        self.alphabet = alphabet = Alphabet(tokens, _letters(template))
        self.is_whole_turn = is_whole_turn
        self.anchors = Marks(_written(template.anchors, alphabet))
        self.skipped = _written(template.skipped, alphabet)
        self.reasoning_opens = _written(template.reasoning_opens, alphabet)
        self.reasoning_closes = Marks(_written(template.reasoning_closes, alphabet))
        self.call = None if template.call is None else BoundCall(template.call, alphabet)
        without_calls = (*self.skipped, *self.reasoning_opens)
        self.opens = Marks((*without_calls, *(self.call.opens if self.call else ())))
        self.opens_without_calls = Marks(without_calls)
        self.has_marks = bool(self.opens.patterns)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How outputs of a model are cut. `name` says so to other releases of the scheduler."""

    name: str
    template: BoundTemplate

    @property
    def has_calls(self) -> bool:
        return self.template.call is not None

    @property
    def has_reasoning(self) -> bool:
        return bool(self.template.reasoning_opens)


def _written(patterns: Iterable[Pattern], alphabet: Alphabet) -> tuple[Pattern, ...]:
    return tuple(pattern.written(alphabet.write) for pattern in patterns)


def _letters(template: ResponseTemplate) -> Iterator[str]:
    call = template.call
    patterns = [*template.anchors, *template.skipped, *template.reasoning_opens, *template.reasoning_closes]
    if call is not None:
        patterns += [*call.opens, *call.closes, *(pair for pair in (call.pair_open, call.pair_close) if pair)]
        for quote in call.quotes:
            yield from quote
    for pattern in patterns:
        for item in pattern.items:
            yield item.letters

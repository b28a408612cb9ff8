"""Forms that requests ask for, and what compiles and checks such forms in virtual time.

Each form has so few outputs that all are listed here: what may follow is known without a compiler.
"""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from paceline.bytes_tokenizer import END_TOKEN_IDS
from paceline_client.forms import Choice, Form, Grammar, JsonSchema, Regex
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.text.forms import Forms

_T = TypeVar("_T")
_WORDS = ("a", "at", "atom", "atlas", "be", "bee", "no", "north", "yes", "0", "ünder", "☃")
_FAILS = 0.2
_COMPILING_S = (0.0, 0.0, 0.01, 0.1, 0.4)
_CHECKING_S = (0.0, 0.005, 0.2)


@dataclass(frozen=True, slots=True)
class PlannedForm:
    """`outputs` are all of them. `fails`: a request fails where its output would be whole."""

    form: Form
    outputs: frozenset[bytes]
    fails: bool = False

    def left_after(self, output: Sequence[int], min_tokens: int) -> frozenset[int]:
        """Return the tokens that may follow. What ends an output may where one is whole, before min_tokens only if
        nothing else is left.
        """
        held = bytes(output)
        left = frozenset(whole[len(held)] for whole in self.outputs if whole.startswith(held) and whole != held)
        is_whole = held in self.outputs and (len(output) >= min_tokens or not left)
        return left.union(END_TOKEN_IDS) if is_whole and not self.fails else left


_LOOP = {"type": "object", "properties": {"next": {"$ref": "#/$defs/loop"}}, "required": ["next"]}
_HOPELESS = (
    PlannedForm(JsonSchema({"$defs": {"loop": _LOOP}, "$ref": "#/$defs/loop"}), frozenset((b"",)), fails=True),
    PlannedForm(Grammar('start: "no" more\nmore: "b" more'), frozenset((b"n",)), fails=True),
)
"""Schedulers refuse them."""


def draw_form(random: Random) -> PlannedForm:
    if random.random() < _FAILS:
        return random.choice(_HOPELESS)
    words = random.sample(_WORDS, random.randint(1, 4))
    least = random.randint(0, 1)
    most = least + random.randint(0, 2)
    lists = [each for count in range(least, most + 1) for each in itertools.product(words, repeat=count)]
    match random.randrange(4):
        case 0:
            return _planned(Choice(words), words)
        case 1:
            return _planned(Regex(f"({'|'.join(words)}){{{least},{most}}}"), ["".join(each) for each in lists])
        case 2:
            schema: dict[str, Any] = {
                "type": "array",
                "items": {"enum": words},
                "minItems": least,
                "maxItems": most,
            }
            return _planned(JsonSchema(schema, compact=True), map(_compact, lists))
    schema = {
        "type": "object",
        "properties": {"number": {"enum": [7, 71]}, "word": {"enum": words}},
        "required": ["number"],
        "additionalProperties": False,
    }
    objects = [{"number": number} | {"word": word} for number in (7, 71) for word in words]
    return _planned(JsonSchema(schema, compact=True), map(_compact, ({"number": 7}, {"number": 71}, *objects)))


def _planned(form: Form, outputs: Iterable[str]) -> PlannedForm:
    return PlannedForm(form, frozenset(output.encode() for output in outputs))


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


class FormsHere(Forms):
    """All pass, in their time: those of simulated clients harm nobody."""

    def __init__(self, limits: EdgeLimits, random: Random) -> None:
        super().__init__(limits)
        self._random = random

    async def _ask(self, structured: bytes) -> dict[str, str]:  # noqa: ARG002
        await asyncio.sleep(self._random.choice(_CHECKING_S))
        return {}


class SlowThread(Executor):
    """Does one piece of work after another, each when its time has come on the virtual clock."""

    def __init__(self, loop: asyncio.AbstractEventLoop, random: Random) -> None:
        self._loop = loop
        self._random = random
        self._free_s = 0.0

    def submit(self, work: Callable[..., _T], /, *arguments: Any) -> "Future[_T]":  # type: ignore[override]  # noqa: ANN401
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(work(*arguments))
            except Exception as error:
                future.set_exception(error)

        self._free_s = max(self._free_s, self._loop.time()) + self._random.choice(_COMPILING_S)
        self._loop.call_at(self._free_s, run)
        return future

"""What the keys of `top` mean: a selection, a question before anything is changed, a number that is typed.

Knows neither terminal nor scheduler: told of a key, it answers with what is to be done.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum

from paceline_cli.top.values import Executor, Limits, Overview, Request, RequestKey
from paceline_client.results import RequestState

_MAX_DIGITS = 15
LIMITS = tuple(field.name for field in fields(Limits))

Item = str | RequestKey
"""An executor by its address, or a request."""


@dataclass(frozen=True, slots=True)
class Explain:
    """Say where a request stands."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request, with all of its completions."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Drain:
    """Empty an executor."""

    address: str


@dataclass(frozen=True, slots=True)
class Undrain:
    """Use an executor again."""

    address: str


@dataclass(frozen=True, slots=True)
class ShowLimits:
    """Ask for the bounds."""


@dataclass(frozen=True, slots=True)
class SetLimit:
    """Change a bound."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class Quit:
    """Leave."""


Action = Explain | Cancel | Drain | Undrain | ShowLimits | SetLimit | Quit


class Shown(Enum):
    """Which requests are shown."""

    ALL = "requests"
    WAITING = "waiting requests"
    RUNNING = "running requests"


_NEXT = {Shown.ALL: Shown.WAITING, Shown.WAITING: Shown.RUNNING, Shown.RUNNING: Shown.ALL}
_WAITING_STATES = (RequestState.WAITING, RequestState.PREEMPTED)
HELP = (
    "up, down, page up, page down: select an executor or a request. s: all, waiting or running requests.",
    "e: where the request stands and what it waits for. c: cancel it.",
    "d: drain the executor: nothing new is placed there. u: use it again. l: bounds of the queue and of steps.",
    "Before anything is changed you are asked. escape closes this. q leaves.",
)


class Controls:
    """The state of the keyboard's half of the screen."""

    def __init__(self) -> None:
        self.selected: Item | None = None
        self.shown = Shown.ALL
        self.note: tuple[str, ...] = ()
        """Sentences for the lower end of the screen."""
        self.question: Action | None = None
        """What is done after a `y`."""
        self.limits: Limits | None = None
        """Set while they are shown, to be changed by their number."""
        self.typing: tuple[str, str] | None = None
        """Which bound is being typed, and the digits so far."""

    def requests(self, overview: Overview) -> list[Request]:
        """Return those that are shown: what runs before what waits, this by its place in the queue."""
        chosen = [
            request
            for request in overview.requests
            if self.shown is Shown.ALL or (self.shown is Shown.WAITING) == (request.state in _WAITING_STATES)
        ]
        return sorted(chosen, key=lambda one: (one.state in _WAITING_STATES, one.model, one.queue_position, -one.age_s))

    def press(self, key: str, overview: Overview) -> Action | None:
        """Take a key: a character, or the name of one that has none."""
        if key == "c-c" or (key == "q" and self.typing is None):
            return Quit()
        if self.typing is not None:
            return self._type(key, *self.typing)
        if self.question is not None:
            return self._answer(key)
        if self.limits is not None and key in ("1", "2", "3"):
            self.typing = LIMITS[int(key) - 1], ""
            return None
        if key == "escape":
            self.note, self.limits = (), None
            return None
        return self._browse(key, [*map(_item, overview.executors), *map(_item, self.requests(overview))])

    def _browse(self, key: str, items: Sequence[Item]) -> Action | None:
        steps = {"up": -1, "down": 1, "pageup": -10, "pagedown": 10, "home": -len(items), "end": len(items)}
        if key in steps:
            place = items.index(self.selected) if self.selected in items else -1 if steps[key] > 0 else 0
            place = max(0, min(len(items) - 1, place + steps[key]))
            self.selected = items[place] if items else None
        elif key == "s":
            self.shown = _NEXT[self.shown]
        elif key in ("h", "?"):
            self.note, self.limits = HELP, None
        elif key == "l":
            return ShowLimits()
        elif key in ("e", "enter", "c"):
            return self._of_request(key)
        elif key in ("d", "u"):
            return self._of_executor(key)
        return None

    def _of_request(self, key: str) -> Action | None:
        if not isinstance(self.selected, RequestKey):
            self.note, self.limits = ("Select a request first, with up and down.",), None
        elif key == "c":
            self._ask(Cancel(self.selected), f"Cancel the request {self.selected.request_id}? y: yes")
        else:
            return Explain(self.selected)
        return None

    def _of_executor(self, key: str) -> Action | None:
        if not isinstance(self.selected, str):
            self.note, self.limits = ("Select an executor first, with up and down.",), None
        elif key == "d":
            self._ask(Drain(self.selected), f"Place nothing new on {self.selected}, and move what runs there? y: yes")
        else:
            self._ask(Undrain(self.selected), f"Place requests on {self.selected} again? y: yes")
        return None

    def _ask(self, action: Action, question: str) -> None:
        self.question, self.note, self.limits = action, (question,), None

    def _answer(self, key: str) -> Action | None:
        action, self.question = self.question, None
        if key == "y":
            return action
        self.note = ("Nothing was changed.",)
        return None

    def _type(self, key: str, name: str, digits: str) -> Action | None:
        if key == "escape" or (key == "enter" and not digits):
            self.typing = None
        elif key == "enter":
            self.typing = None
            return SetLimit(name, int(digits))
        elif key == "backspace":
            self.typing = name, digits[:-1]
        elif key in tuple("0123456789") and len(digits) < _MAX_DIGITS:
            self.typing = name, digits + key
        return None


def _item(one: Executor | Request) -> Item:
    return one.address if isinstance(one, Executor) else one.key

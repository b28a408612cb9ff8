"""Visits every state that a model can reach, breadth first, and tells the shortest story of what goes wrong.

Knows states as tuples of parts and what changes them as rules over a few parts each. It refuses to know what they mean.

Two states differ in few parts, so parts are numbered once and a state is a tuple of small ints; what a rule makes of
the parts it looks at is worked out once, however many states have them in common.
"""

import gc
from array import array
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

Parts = tuple[Hashable, ...]
Move = tuple[str, Parts]
"""What happens, in words, and what it makes of the parts that the rule looks at."""
State = tuple[int, ...]


class Kind(Enum):
    """What makes a move happen: the system, the system after a wait of seconds, or something that befalls it.

    Slow steps are taken only where no step is left to take: timers of seconds outlast everything else, and that they
    sometimes do not is a fault of its own. Faults may always happen and never have to.
    """

    STEP = "step"
    SLOW_STEP = "slow step"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Rule:
    """Moves that depend on some parts of the state, given by index, and change only these.

    A condition on fewer parts saves working out, again and again, that there is no move.
    """

    kind: Kind
    looks_at: tuple[int, ...]
    moves: Callable[..., Iterable[Move]]
    condition_looks_at: tuple[int, ...] = ()
    condition: Callable[..., bool] | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A system to look at wholly.

    `violation` says in a sentence what is wrong with a state, "" if nothing. `is_settled` tells good ends: from every
    state, steps alone must be able to lead to one, and none lead out of it.
    """

    initial: Parts
    rules: tuple[Rule, ...]
    violation: Callable[..., str]
    is_settled: Callable[..., bool]


@dataclass(frozen=True, slots=True)
class Report:
    """What was visited, and the story of what went wrong: empty if nothing did."""

    num_states: int
    num_transitions: int
    story: tuple[str, ...] = ()


class TooManyStatesError(Exception):
    """The model is larger than it was meant to be."""


@dataclass(slots=True)
class _Visited:
    """All states found, by number in the order they were found, and the steps between them."""

    states: list[State] = field(default_factory=list)
    numbers: dict[State, int] = field(default_factory=dict)
    parents: "array[int]" = field(default_factory=lambda: array("l"))
    settled: bytearray = field(default_factory=bytearray)
    sources: "array[int]" = field(default_factory=lambda: array("l"))  # of steps, faults left out
    targets: "array[int]" = field(default_factory=lambda: array("l"))


def explore(model: Model, max_states: int = 1_500_000) -> Report:
    """Visit every reachable state; raises TooManyStatesError beyond `max_states`."""
    was_enabled = gc.isenabled()
    gc.disable()  # millions of tuples and not one cycle: looking for some takes a third of the time
    try:
        return _Search(model, max_states).run()
    finally:
        if was_enabled:
            gc.enable()


class _Parts:
    """All parts that occur in states, by number."""

    def __init__(self) -> None:
        self._parts: list[Hashable] = []
        self._numbers: dict[Hashable, int] = {}

    def number(self, part: Hashable) -> int:
        number = self._numbers.setdefault(part, len(self._parts))
        if number == len(self._parts):
            self._parts.append(part)
        return number

    def numbers(self, parts: Parts) -> State:
        return tuple([self.number(part) for part in parts])  # a generator takes twice as long

    def of(self, numbers: Iterable[int]) -> list[Hashable]:
        return [self._parts[number] for number in numbers]


class _KnownMoves:
    """The moves of rules that look at the same parts, worked out once for all states that have these in common."""

    def __init__(self, looks_at: tuple[int, ...], rules: list[Rule], parts: _Parts) -> None:
        self.looks_at = looks_at
        self._rules = rules
        self._parts = parts
        self._known: dict[State, list[tuple[str, State]]] = {}

    def moves(self, state: State) -> list[tuple[str, State]]:
        key = tuple([state[index] for index in self.looks_at])  # a generator takes twice as long
        known = self._known.get(key)
        if known is None:
            before = self._parts.of(key)
            moves = (
                (label, self._parts.numbers(after)) for rule in self._rules for label, after in rule.moves(*before)
            )
            known = self._known[key] = [(label, after) for label, after in moves if after != key]
        return known


class _KnownConditions:
    """Which of some rules, whose conditions look at the same parts, have moves at all."""

    def __init__(self, looks_at: tuple[int, ...], rules: list[Rule], parts: _Parts) -> None:
        self._looks_at = looks_at
        self._rules = [(rule, _KnownMoves(rule.looks_at, [rule], parts)) for rule in rules]
        self._parts = parts
        self._known: dict[State, list[_KnownMoves]] = {}

    def holding(self, state: State) -> list[_KnownMoves]:
        key = tuple([state[index] for index in self._looks_at])
        known = self._known.get(key)
        if known is None:
            parts = self._parts.of(key)
            known = self._known[key] = [
                moves for rule, moves in self._rules if rule.condition is not None and rule.condition(*parts)
            ]
        return known


class _Rules:
    """All rules of one kind."""

    def __init__(self, rules: Iterable[Rule], parts: _Parts) -> None:
        free: dict[tuple[int, ...], list[Rule]] = {}
        bound: dict[tuple[int, ...], list[Rule]] = {}
        for rule in rules:
            if rule.condition is None:
                free.setdefault(rule.looks_at, []).append(rule)
            else:
                bound.setdefault(rule.condition_looks_at, []).append(rule)
        self._free = [_KnownMoves(looks_at, group, parts) for looks_at, group in free.items()]
        self._bound = [_KnownConditions(looks_at, group, parts) for looks_at, group in bound.items()]

    def moves(self, state: State) -> list[tuple[str, State]]:
        found = []
        groups = [*self._free, *(group for each in self._bound for group in each.holding(state))]
        for group in groups:
            for label, parts in group.moves(state):
                after = list(state)
                for index, part in zip(group.looks_at, parts, strict=True):
                    after[index] = part
                found.append((label, tuple(after)))
        return found


class _Search:
    def __init__(self, model: Model, max_states: int) -> None:
        self._model = model
        self._max_states = max_states
        self._parts = _Parts()
        self._rules = {kind: _Rules((rule for rule in model.rules if rule.kind is kind), self._parts) for kind in Kind}
        self._visited = _Visited()
        self._num_transitions = 0
        self._broken = ""

    def run(self) -> Report:
        visited = self._visited
        self._find(self._parts.numbers(self._model.initial), -1)
        number = 0
        while number < len(visited.states):
            if self._broken:
                return self._report(self._story(len(visited.states) - 1, self._broken))
            wrong = self._visit(number)
            if wrong:
                return self._report(self._story(number, wrong))
            number += 1
        stuck = self._first_stuck()
        if stuck is None:
            return self._report(())
        return self._report(self._story(stuck, "from here no good end can be reached any more, whatever happens"))

    def _visit(self, number: int) -> str:
        """Find what follows a state; returns what is wrong with that, "" if nothing."""
        visited = self._visited
        state, is_settled = visited.states[number], visited.settled[number]
        steps = self._steps(state)
        if not steps and not is_settled:
            return "nothing can happen any more, and this is no good end"
        for label, after in steps:
            target = self._find(after, number)
            visited.sources.append(number)
            visited.targets.append(target)
            if self._broken:
                return ""
            if is_settled and not visited.settled[target]:
                return f"what was settled is upset, though nothing befell it, when {label}"
        for _, after in self._rules[Kind.FAULT].moves(state):
            self._find(after, number)
            if self._broken:
                return ""
        return ""

    def _find(self, state: State, parent: int) -> int:
        visited = self._visited
        self._num_transitions += 1
        number = visited.numbers.get(state)
        if number is not None:
            return number
        number = len(visited.states)
        if number >= self._max_states:
            raise TooManyStatesError(f"more than {self._max_states} states")
        visited.numbers[state] = number
        visited.states.append(state)
        visited.parents.append(parent)
        parts = self._parts.of(state)
        visited.settled.append(self._model.is_settled(*parts))
        self._broken = self._model.violation(*parts)
        return number

    def _steps(self, state: State) -> list[tuple[str, State]]:
        return self._rules[Kind.STEP].moves(state) or self._rules[Kind.SLOW_STEP].moves(state)

    def _first_stuck(self) -> int | None:
        """Return the first state from which steps alone lead to no settled one."""
        visited = self._visited
        reaches = bytearray(visited.settled)
        starts, origins = _reversed(visited.sources, visited.targets, len(visited.states))
        found = [number for number, is_settled in enumerate(visited.settled) if is_settled]
        while found:
            target = found.pop()
            for origin in origins[starts[target] : starts[target + 1]]:
                if not reaches[origin]:
                    reaches[origin] = 1
                    found.append(origin)
        stuck = reaches.find(0)
        return None if stuck < 0 else stuck

    def _report(self, story: tuple[str, ...]) -> Report:
        visited = self._visited
        return Report(len(visited.states), self._num_transitions - 1, story)

    def _story(self, number: int, ending: str) -> tuple[str, ...]:
        visited = self._visited
        path = [number]
        while visited.parents[path[-1]] >= 0:
            path.append(visited.parents[path[-1]])
        path.reverse()
        lines = [self._label(visited.states[a], visited.states[b]) for a, b in pairwise(path)]
        numbered = (f"{place}. {line}" for place, line in enumerate(lines, 1))
        parts = (f"   {part}" for part in self._parts.of(visited.states[number]))
        return (*numbered, f"=> {ending}:", *parts)

    def _label(self, before: State, after: State) -> str:
        for label, state in (*self._steps(before), *self._rules[Kind.FAULT].moves(before)):
            if state == after:
                return label
        raise AssertionError("a state was found by a move")


def _reversed(sources: "array[int]", targets: "array[int]", num_states: int) -> "tuple[array[int], array[int]]":
    """Return the sources in the order of their targets, and where those of each target begin."""
    starts = array("l", bytes(array("l").itemsize * (num_states + 1)))
    for target in targets:
        starts[target + 1] += 1
    for number in range(num_states):
        starts[number + 1] += starts[number]
    places = array("l", starts)
    origins = array("l", bytes(array("l").itemsize * len(sources)))
    for source, target in zip(sources, targets, strict=True):
        origins[places[target]] = source
        places[target] += 1
    return starts, origins

"""What something is made of, as plain values that can be compared.

Objects are taken apart by their attributes and arrays by their bytes. Left out are functions, and what is only kept to
be found again sooner: the keys of blocks, and what those are told that find the queue full.
"""

from collections import deque
from collections.abc import Mapping, Set
from types import FunctionType, MethodType

import numpy as np

_ONLY_KEPT = {"chains", "_retry", "num_plannings"}


def fingerprint(thing: object) -> object:
    return _taken_apart(thing, {})


def _taken_apart(thing: object, seen: dict[int, int]) -> object:
    if thing is None or isinstance(thing, str | bytes | int | float | FunctionType | MethodType | type):
        return "a function" if isinstance(thing, FunctionType | MethodType) else thing
    if isinstance(thing, np.ndarray):
        return (str(thing.dtype), thing.shape, thing.tobytes())
    if isinstance(thing, np.generic):
        return thing.item()
    if id(thing) in seen:
        return ("seen", seen[id(thing)])
    seen[id(thing)] = len(seen)
    if isinstance(thing, Mapping):
        return tuple((_taken_apart(key, seen), _taken_apart(value, seen)) for key, value in thing.items())
    if isinstance(thing, Set):
        return tuple(sorted((_taken_apart(each, seen) for each in thing), key=repr))
    if isinstance(thing, list | tuple | deque):
        return tuple(_taken_apart(each, seen) for each in thing)
    return (type(thing).__name__, *((name, _taken_apart(value, seen)) for name, value in _attributes(thing)))


def _attributes(thing: object) -> list[tuple[str, object]]:
    """Includes slots, and the arguments of an error."""
    names = dict.fromkeys(name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
    names.update(dict.fromkeys(getattr(thing, "__dict__", {})))
    found = [(name, getattr(thing, name)) for name in names if name not in _ONLY_KEPT and hasattr(thing, name)]
    return [("args", thing.args), *found] if isinstance(thing, BaseException) else found

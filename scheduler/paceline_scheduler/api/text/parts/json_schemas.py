"""Values that a model wrote as bare text, as JSON of the types that a tool's schema names.

Casts as transformers does, whose response templates declare such calls.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

_TRUE, _FALSE = ("true", "1"), ("false", "0")


def properties_of(schema: str) -> Mapping[str, Any]:
    """Of a JSON Schema document, which may be none."""
    try:
        document = json.loads(schema) if schema else None
    except (ValueError, RecursionError):
        return {}
    properties = document.get("properties") if isinstance(document, dict) else None
    return properties if isinstance(properties, dict) else {}


def schema_types(schema: object, depth: int = 8) -> tuple[str, ...]:
    """Those that it allows, in its order; unknown: none."""
    if not isinstance(schema, dict) or not depth:
        return ()
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else []
    if isinstance(declared, list):
        types += [each for each in declared if isinstance(each, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            types += schema_types(choice, depth - 1)
    if schema.get("nullable") and "null" not in types:
        types.append("null")
    return tuple(types)


def json_of(raw: str, types: tuple[str, ...]) -> str:
    """As the first type that takes it, else as text."""
    for name in types:
        try:
            return json.dumps(_CASTS[name](raw), ensure_ascii=False, allow_nan=False)
        except (KeyError, ValueError, OverflowError, RecursionError):
            continue
    return json.dumps(raw, ensure_ascii=False)


def _integer(raw: str) -> int:
    try:
        return int(raw)
    except ValueError:
        number = float(raw)  # JSON Schema takes 3.0
        if not number.is_integer():
            raise
        return int(number)


def _number(raw: str) -> int | float:
    number = float(raw)
    return int(number) if number.is_integer() and "." not in raw else number


def _boolean(raw: str) -> bool:
    word = raw.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(word)
    return word in _TRUE


def _null(raw: str) -> None:
    if raw.strip() not in ("null", "None"):
        raise ValueError(raw)


def _decoded(raw: str, kind: type) -> Any:  # noqa: ANN401 (JSON)
    value = json.loads(raw)
    if not isinstance(value, kind):
        raise ValueError(raw)
    return value


_CASTS: dict[str, Callable[[str], object]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
    "object": lambda raw: _decoded(raw, dict),
    "array": lambda raw: _decoded(raw, list),
}

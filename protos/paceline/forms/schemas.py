"""JSON Schemas of clients, before any compiler sees them. Every walk is a loop: depth is theirs to choose.

What the compiler ignores or cannot end is refused here: options to it, references that lead nowhere but back.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.forms.errors import FormError, Reason
from paceline.forms.patterns import check_pattern

MAX_DEPTH = 64  # of the document
MAX_NODES = 10_000
MAX_ENUM = 4096
MAX_OPTIONAL_PROPERTIES = 500  # of one object

_OPTIONS_KEY = "x-guidance"  # the compiler's own, which could make it ignore keywords
_WHITESPACE = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
_COMPACT = {"whitespace_flexible": False}
# Others are annotations; the compiler would refuse them.
_KNOWN_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
_DATA_KEYS = frozenset(("const", "enum", "default", "examples"))
_NAME_KEYS = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependentRequired", "dependencies")
)

Schema = dict[str, Any]


def _finite(text: str) -> float:
    """Of NaN and Infinity, too, which Python takes for JSON. The compiler wants whole counts to be written so."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:32]} is no number of JSON, or too large")
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite)


@dataclass(frozen=True, slots=True)
class _Place:
    """A value in the document; `is_schema`: neither data nor a table of names."""

    path: str
    value: Any
    depth: int
    is_schema: bool
    is_data: bool = False


def read_schema(text: str, field: str, *, is_compact: bool) -> Schema:
    """Returns it as the compiler shall take it. Raises FormError."""
    return prepare_schema(_parse(text, field), field, is_compact=is_compact)


def prepare_schema(document: Any, field: str, *, is_compact: bool) -> Schema:  # noqa: ANN401 (any JSON)
    """Changes the document. Raises FormError."""
    if document is True:
        document = {}
    if not isinstance(document, dict):
        raise FormError(Reason.MALFORMED, field, "is no JSON Schema: it must be an object")
    for number, place in enumerate(_places(document), 1):
        if place.depth > MAX_DEPTH:
            raise FormError(Reason.TOO_LARGE, field, f"has more than {MAX_DEPTH} levels at {_shown(place.path)}")
        if number > MAX_NODES:
            raise FormError(Reason.TOO_LARGE, field, f"has more than {MAX_NODES} values")
        if isinstance(place.value, dict) and place.is_schema:
            _check_keywords(place, field)
    schemas = {place.path: place.value for place in _places(document) if place.is_schema}
    _check_references(schemas, field)
    _check_ends(schemas, field)
    document[_OPTIONS_KEY] = _COMPACT if is_compact else _WHITESPACE
    return document


def place_of(document: Schema, keyword: str) -> str:
    """Returns where a schema has the keyword first, empty if nowhere."""
    for place in _places(document):
        if place.is_schema and isinstance(place.value, dict) and keyword in place.value:
            return _shown(place.path)
    return ""


def _parse(text: str, field: str) -> Any:  # noqa: ANN401 (any JSON)
    try:
        return DECODER.decode(text)
    except RecursionError:
        raise FormError(Reason.TOO_LARGE, field, f"has more than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise FormError(Reason.MALFORMED, field, f"is no JSON: {error}") from None


def _places(document: Schema) -> Iterator[_Place]:
    waiting = [_Place("", document, 1, is_schema=True)]
    while waiting:
        place = waiting.pop()
        yield place
        if isinstance(place.value, dict):
            waiting.extend(_of_object(place))
        elif isinstance(place.value, list):
            waiting.extend(
                _Place(f"{place.path}/{index}", value, place.depth + 1, place.is_schema, place.is_data)
                for index, value in enumerate(place.value)
            )


def _of_object(place: _Place) -> Iterator[_Place]:
    for key, value in place.value.items():
        is_data = place.is_data or (place.is_schema and key in _DATA_KEYS)
        is_table = place.is_schema and key in _NAME_KEYS and isinstance(value, dict)
        path = f"{place.path}/{key.replace('~', '~0').replace('/', '~1')}"
        yield _Place(path, value, place.depth + 1, not is_data and not is_table, is_data)


def _check_keywords(place: _Place, field: str) -> None:
    schema, where = place.value, _shown(place.path)
    if _OPTIONS_KEY in schema:
        raise FormError(Reason.UNSUPPORTED, field, f"has {_OPTIONS_KEY} at {where}, which is no keyword; leave it out")
    values = schema.get("enum")
    if isinstance(values, list) and len(values) > MAX_ENUM:
        sentence = f"has an enum of {len(values)} values at {where}, at most {MAX_ENUM} are allowed"
        raise FormError(Reason.TOO_LARGE, field, sentence)
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict):
        num_optional = len(properties.keys() - _texts(required))
        if num_optional > MAX_OPTIONAL_PROPERTIES:
            sentence = (
                f"has {num_optional} optional properties at {where}, at most {MAX_OPTIONAL_PROPERTIES} are allowed"
            )
            raise FormError(Reason.TOO_LARGE, field, sentence)
    patterns = schema.get("patternProperties")
    for pattern in (schema.get("pattern"), *(patterns if isinstance(patterns, dict) else ())):
        if isinstance(pattern, str):
            check_pattern(pattern, field, f"the pattern at {where}")
    form = schema.get("format")
    if isinstance(form, str) and form not in _KNOWN_FORMATS:
        del schema["format"]


def _texts(value: Any) -> set[str]:  # noqa: ANN401 (any JSON)
    return {text for text in value if isinstance(text, str)} if isinstance(value, list) else set()


def _shown(path: str) -> str:
    return f"#{path if len(path) <= 160 else path[:160] + '…'}"


def _check_references(schemas: dict[str, Any], field: str) -> None:
    """What an $id of the document may be the base of is left to the compiler, which fetches nothing."""
    objects = [(path, value) for path, value in schemas.items() if isinstance(value, dict)]
    if any("$id" in value for _, value in objects):
        return
    for path, value in objects:
        reference = value.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            sentence = f"has a $ref to {reference[:80]!r} at {_shown(path)}; references must stay inside the document"
            raise FormError(Reason.UNSUPPORTED, field, sentence)


def _check_ends(schemas: dict[str, Any], field: str) -> None:
    """Refuses a schema of which no finite value is: the compiler takes it, and its masks then end the output.

    Horn clauses, solved in time linear in the document: a schema has an end once each of its needs has one alternative
    that does.
    """
    needs = {path: list(_needs(path, value, schemas)) for path, value in schemas.items() if isinstance(value, dict)}
    users: dict[str, list[tuple[str, int]]] = {}
    for path, alternatives in needs.items():
        for index, paths in enumerate(alternatives):
            for used in paths:
                users.setdefault(used, []).append((path, index))
    open_needs = {path: set(range(len(alternatives))) for path, alternatives in needs.items()}
    ended = [path for path in schemas if not open_needs.get(path)]
    while ended:
        for path, index in users.get(ended.pop(), ()):
            if index in open_needs[path]:
                open_needs[path].discard(index)
                if not open_needs[path]:
                    ended.append(path)
    for path, missing in open_needs.items():
        if missing:
            sentence = f"has no finite value at {_shown(path)}: it asks for itself again"
            raise FormError(Reason.MALFORMED, field, sentence)


def _needs(path: str, schema: Schema, schemas: dict[str, Any]) -> Iterator[list[str]]:
    """Yields alternatives, of which one must have an end if the schema shall have one."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#") and reference[1:] in schemas:
        yield [reference[1:]]
    for keyword in ("anyOf", "oneOf"):
        if isinstance(schema.get(keyword), list) and schema[keyword]:
            yield [f"{path}/{keyword}/{index}" for index in range(len(schema[keyword]))]
    if isinstance(schema.get("allOf"), list):
        yield from ([f"{path}/allOf/{index}"] for index in range(len(schema["allOf"])))
    properties = schema.get("properties")
    if schema.get("type") in ("object", ["object"]) and isinstance(properties, dict):
        yield from (
            [f"{path}/properties/{name.replace('~', '~0').replace('/', '~1')}"]
            for name in _texts(schema.get("required")) & properties.keys()
        )
    num_items = schema.get("minItems")
    has_items = schema.get("type") in ("array", ["array"]) and isinstance(num_items, int) and num_items > 0
    if has_items and isinstance(schema.get("items"), dict) and "prefixItems" not in schema:
        yield [f"{path}/items"]

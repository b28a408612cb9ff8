"""Schemas that others wrote: the JSON-Schema-Test-Suite, Kubernetes', and those of check-jsonschema.

`make test` fetches two of them into the virtual environment.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate

FETCHED = Path(sys.prefix) / "schemas"
SUITE = FETCHED / "jsonschema-4.26.0" / "json" / "tests"
_KUBERNETES = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
_SAID_BY_PEOPLE = ("description", "x-kubernetes-")


def read_suite(draft: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each group of the required files with its name: a schema, and instances that are valid or not."""
    for file in sorted((SUITE / draft).glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            yield f"{file.stem}: {group['description']}", group


def foreign_schemas() -> dict[str, Any]:
    """Returns them by name: 862 of Kubernetes 1.37, strict and whole in themselves, and 27 of well-known files."""
    folder = _KUBERNETES / "v1.37.0-local-strict"
    definitions = _without_words(json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))["$defs"])
    files = sorted(file for file in folder.glob("*.json") if file.name not in ("_definitions.json", "all.json"))
    found = {file.stem: _whole(_without_words(json.loads(file.read_bytes())), definitions) for file in files}
    others = sorted((FETCHED / "check_jsonschema" / "builtin_schemas").glob("*/*.json"))
    return found | {file.stem: json.loads(file.read_bytes()) for file in others}


def _without_words(value: Any) -> Any:  # noqa: ANN401 (any JSON)
    if isinstance(value, list):
        return [_without_words(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_words(each)
        for key, each in value.items()
        if not (key.startswith(_SAID_BY_PEOPLE) and not isinstance(each, dict))
    }


def _whole(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """With the definitions that it needs inside."""
    needed: dict[str, Any] = {}
    waiting = [schema]
    while waiting:
        for name in _references(waiting.pop()):
            if name in definitions and name not in needed:
                needed[name] = definitions[name]
                waiting.append(definitions[name])
    found: dict[str, Any] = _inward(schema)
    return found | {"$defs": {name: _inward(needed[name]) for name in sorted(needed)}} if needed else found


def _references(value: Any) -> Iterator[str]:  # noqa: ANN401 (any JSON)
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "$ref" and isinstance(each, str):
                yield each.rpartition("/")[2]
            else:
                yield from _references(each)
    elif isinstance(value, list):
        for each in value:
            yield from _references(each)


def _inward(value: Any) -> Any:  # noqa: ANN401 (any JSON)
    if isinstance(value, list):
        return [_inward(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: f"#/$defs/{each.rpartition('/')[2]}" if key == "$ref" and isinstance(each, str) else _inward(each)
        for key, each in value.items()
    }

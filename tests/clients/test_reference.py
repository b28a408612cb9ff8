"""The README names every argument, setting and field that there is, with its type and default, and no other."""

import enum
import inspect
import re

import paceline_client
from paceline_client import AsyncClient, AsyncStream, PacelineError, Stream
from repository_checks.sources import ROOT

README = (ROOT / "clients" / "README.md").read_text(encoding="utf-8")


def spelled(name, annotation, default=None):
    """`?` for None, which is a default then; `or` for the bar, which would end a cell."""
    kind = re.sub(r"\b[a-z_.]+\.", "", inspect.formatannotation(annotation))
    kind = kind.replace(" | None", "?").replace(" | ", " or ")
    if default is None or default is inspect.Parameter.empty:
        return f"{name}: {kind}"
    return f"{name}: {kind} = {getattr(default, '__name__', repr(default).replace('<factory>', '{}'))}"


def parts(thing):
    """The arguments of a call or class, which are a value's fields, and the properties; the choices of an enum."""
    if isinstance(thing, enum.EnumType):
        return {f"{member.name} = {member.value!r}" for member in thing}
    is_made_by_users = thing not in (AsyncStream, Stream)
    takes = list(inspect.signature(thing).parameters.values()) if is_made_by_users else []
    has = [(name, each.fget) for name, each in inspect.getmembers(thing, lambda each: isinstance(each, property))]
    return {
        *(spelled(each.name, each.annotation, each.default) for each in takes if each.name != "self"),
        *(spelled(name, inspect.signature(getter).return_annotation) for name, getter in has),
    }


def public():
    """Classes by their names, of errors only the first, as the others have nothing more; and the calls of a client."""
    kinds = {name: kind for name in paceline_client.__all__ if isinstance(kind := getattr(paceline_client, name), type)}
    errors = {name for name, kind in kinds.items() if issubclass(kind, PacelineError) and kind is not PacelineError}
    assert all(parts(kinds[name]) == parts(PacelineError) for name in errors)
    calls = {name: call for name, call in inspect.getmembers(AsyncClient, inspect.isroutine) if name[0] != "_"}
    return {name: found for name, thing in (kinds | calls).items() if name not in errors and (found := parts(thing))}


def documented():
    """By the names in a row's first cell, of which several share what is in the second one."""
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", README, re.MULTILINE)
    found = [(re.findall(r"`(\w+)`", names), set(re.findall(r"`(\w+(?:: | = )[^`]+)`", told))) for names, told in rows]
    return [(names, told) for names, told in found if told]


def test_the_readme_names_every_argument_and_field_with_its_type_and_default():
    there = public()
    rows = documented()
    assert sorted(name for names, _ in rows for name in names) == sorted(there)
    for names, told in rows:
        assert told == set().union(*(there[name] for name in names)), names

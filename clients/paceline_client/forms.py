"""Forms that an output can be asked to keep, and what an output of a form means. What a form may say is the server's
to check.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline_client.errors import FieldViolation, InvalidRequestError

Schema = Mapping[str, Any] | str | type[Any]
"""As a dict or as text, or a class of pydantic's: one with `model_json_schema` and `model_validate_json`."""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that is valid against a schema, its keys in the schema's order."""

    schema: Schema
    compact: bool = False
    """True: no whitespace between the tokens of JSON; else runs of at most 32 characters."""

    @property
    def text(self) -> str:
        """`InvalidRequestError` for what is no JSON."""
        return schema_text(self.schema, "structured")

    def parse(self, text: str) -> Any:  # noqa: ANN401 (what the caller's class or JSON makes of it)
        """An object of the class, or plain JSON. `ValueError`."""
        return self.schema.model_validate_json(text) if isinstance(self.schema, type) else json.loads(text)


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any object of JSON."""

    compact: bool = False

    def parse(self, text: str) -> Any:  # noqa: ANN401 (JSON)
        """`ValueError`."""
        return json.loads(text)


class _PlainText:
    """A form whose outputs mean what they say."""

    __slots__ = ()

    def parse(self, text: str) -> str:
        return text


@dataclass(frozen=True, slots=True)
class Regex(_PlainText):
    """A text that the whole pattern matches."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Grammar(_PlainText):
    """A text that a grammar in Lark form derives."""

    lark: str


@dataclass(frozen=True, slots=True)
class Choice(_PlainText):
    """One of these texts."""

    options: Sequence[str]


@dataclass(frozen=True, slots=True)
class Tag:
    """A form between two marks in free text. `end` empty: the form's own end is the tag's."""

    begin: str
    form: JsonSchema | Regex | Grammar
    end: str = ""


@dataclass(frozen=True, slots=True)
class Tags(_PlainText):
    """Free text with forms between marks."""

    tags: Sequence[Tag]
    required: bool = False
    """True: at least one."""
    at_most_one: bool = False
    """True: the output ends behind the first."""
    compact: bool = False


Form = JsonSchema | JsonObject | Regex | Grammar | Choice | Tags
FormLike = Form | Schema


def schema_text(schema: Schema, field: str) -> str:
    """`InvalidRequestError`, which names the field, for what is no JSON."""
    if isinstance(schema, str):
        return schema
    try:
        made = schema.model_json_schema() if isinstance(schema, type) else schema
        return json.dumps(made, ensure_ascii=False, separators=(",", ":"))
    except (AttributeError, TypeError, ValueError) as error:
        raise _invalid(f"is no JSON Schema: {error}", field) from None


def as_form(given: FormLike | None) -> Form | None:
    """What is no form is a JSON Schema. `InvalidRequestError` for what is of another type."""
    if given is None or isinstance(given, Form):
        return given
    if isinstance(given, str | Mapping) or (isinstance(given, type) and hasattr(given, "model_json_schema")):
        return JsonSchema(given)
    kind = given.__name__ if isinstance(given, type) else type(given).__name__
    raise _invalid(f"must be a form, a JSON Schema or a class with model_json_schema, not {kind}")


def _invalid(description: str, field: str = "structured") -> InvalidRequestError:
    violations = (FieldViolation(field, description),)
    return InvalidRequestError(f"{field}: {description}", reason="INVALID_FIELD", violations=violations)

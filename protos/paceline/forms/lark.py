"""Grammars of clients in Lark form, before any compiler sees them.

Commands to the compiler and names of tokens are refused: they would let an output stop, or hold tokens, that no text
of the grammar says. Schemas inside are checked as those beside.
"""

import json
import re
from typing import Any

from paceline.forms.errors import FormError, Reason
from paceline.forms.patterns import check_pattern
from paceline.forms.schemas import DECODER, prepare_schema

_TOKEN = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
      | (?P<text>"(?:\\.|[^"\\\n])*")
      | (?P<regex>/(?:\\(?s:.)|[^/\\])+/)
      | (?P<special><[^<>\s]*>)
      | (?P<schema>%json\b\s*)
      | (?P<directive>%\w*)
      | (?P<grammar>@[\w-]*)
      | (?P<attribute>\w+\s*=|\b(?:stop_)?capture\s*(?=[\],]))
      | (?P<parameter>::)
      | (?P<open>["/])
      | \w+
      | (?s:.)""",
    re.VERBOSE,
)
_DIRECTIVES = frozenset(("%ignore", "%import"))
_UNSUPPORTED = {
    "special": "names the token {}; write its text in quotes",
    "directive": "has {}; only %ignore, %import and %json are taken",
    "grammar": "refers to the grammar {}, which is none of its own",
    "attribute": "has the command {}; only [lazy] is taken",
    "parameter": "has a rule with parameters ({})",
}


def check_lark(text: str, field: str, *, is_compact: bool) -> str:
    """Returns it as the compiler shall take it. Raises FormError."""
    if text.lstrip().startswith("{"):
        raise FormError(Reason.UNSUPPORTED, field, "begins with {; only Lark is taken")
    parts, at, line = [], 0, 1
    while at < len(text) and (found := _TOKEN.match(text, at)):
        kind, part = found.lastgroup, found.group()
        if kind == "open":
            raise FormError(Reason.MALFORMED, field, f"has an open {part} in line {line}")
        if kind in _UNSUPPORTED and part not in _DIRECTIVES:
            sentence = _UNSUPPORTED[kind].format(part.rstrip(" ="))
            raise FormError(Reason.UNSUPPORTED, field, f"{sentence}, in line {line}")
        if kind == "regex":
            check_pattern(part[1:-1], field, f"the regular expression in line {line}")
        line, at = line + part.count("\n"), found.end()
        if kind == "schema":
            schema, end = _schema_at(text, at, line, field)
            line, at = line + text.count("\n", at, end), end
            part = f"%json {json.dumps(prepare_schema(schema, field, is_compact=is_compact))}"
        parts.append(part)
    return "".join(parts)


def _schema_at(text: str, at: int, line: int, field: str) -> tuple[Any, int]:
    """Returns it and where it ends."""
    try:
        return DECODER.raw_decode(text, at)
    except RecursionError:
        raise FormError(Reason.TOO_LARGE, field, f"has a schema with too many levels in line {line}") from None
    except ValueError as error:
        raise FormError(Reason.MALFORMED, field, f"has no JSON behind %json in line {line}: {error}") from None

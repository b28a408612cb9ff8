"""A model's chat template: jinja2 source, rendered as Hugging Face transformers renders it.

The source is not trusted: it runs in jinja2's immutable sandbox, and only in processes that nobody else waits for:
the scheduler's `chat_worker`, whose time and memory are bounded, and a validation, which its user ends.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import ext, nodes, parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_CHARS = 1 << 20
_NOTHING: Mapping[str, Any] = {}


class ChatRefusedError(Exception):
    """The template refuses this conversation and says why."""


class TemplateFailedError(Exception):
    """The template cannot be compiled, or fails with this conversation."""


class _GenerationBlocks(ext.Extension):
    """`{% generation %}` marks what a model is trained on; in prompts it is just text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(self, source: str, constants: Mapping[str, str]) -> None:
        """Raises TemplateFailedError."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise TemplateFailedError(f"the template has {len(source)} characters, the limit is {MAX_TEMPLATE_CHARS}")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self._constants: dict[str, object] = dict(constants)
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # a hostile source can fail in any way
            raise TemplateFailedError(_sentence(error)) from error

    def render(
        self, messages: list[dict[str, Any]], now: datetime, max_chars: int, variables: Mapping[str, Any] = _NOTHING
    ) -> str:
        """The template may show the local time `now`. `variables` are such as tools. Raises ChatRefusedError, and
        TemplateFailedError also above `max_chars`.
        """
        given = self._constants | {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            "strftime_now": now.strftime,
            **variables,
        }
        pieces, num_chars = [], 0
        try:
            for piece in self._template.generate(given):
                num_chars += len(piece)
                if num_chars > max_chars:
                    raise TemplateFailedError(f"the rendered chat has more characters than the limit of {max_chars}")
                pieces.append(piece)
        except (ChatRefusedError, TemplateFailedError):
            raise
        except Exception as error:
            raise TemplateFailedError(_sentence(error)) from error
        return "".join(pieces)


def _raise_exception(message: object) -> None:
    raise ChatRefusedError(str(message))


def _to_json(
    value: Any,  # noqa: ANN401 (whatever the template has)
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Writes it as transformers does: jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

"""A model's chat template: jinja2 source, rendered as Hugging Face transformers renders it.

The source is not trusted: it runs in jinja2's immutable sandbox, and only in processes that nobody else waits for:
the scheduler's `chat_worker`, whose time and memory are bounded, and a validation, which its user ends.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any

from jinja2 import ext, meta, nodes, parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.chat_variables import OWN_VARIABLES

MAX_TEMPLATE_CHARS = 1 << 20
_CONTINUATION = "\ufffe "  # a noncharacter behind the text to go on with; without the space where the template trims it


class ChatRefusedError(Exception):
    """The template refuses this conversation and says why."""


class TemplateFailedError(Exception):
    """The template cannot be compiled, or fails with this conversation."""


class UnreadError(Exception):
    """The template does not show a part of the conversation, whose field of a Chat is `part`, as it stands."""

    def __init__(self, part: str, sentence: str) -> None:
        super().__init__(sentence)
        self.part = part


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
            tree = environment.parse(source)
            self._read = meta.find_undeclared_variables(tree) - self._constants.keys()
            self._shows_calls = "tool_calls" in source
            self._knows_no_content = _asks_for_no_content(tree)
            self._template = environment.from_string(tree)
        except Exception as error:  # a hostile source can fail in any way
            raise TemplateFailedError(_sentence(error)) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        now: datetime,
        max_chars: int,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The template may show the local time `now`.

        messages: as transformers takes them, contents as texts. variables: `tools`, `add_generation_prompt` (unset:
        True), `continue_final_message`, which ends the text behind the last content, and arguments of the caller's.

        Raises ChatRefusedError, UnreadError, and TemplateFailedError also above `max_chars`.
        """
        self._check_read(messages, variables)
        known = {"documents": None, "strftime_now": now.strftime, "add_generation_prompt": True, "tools": None}
        known |= {name: value for name, value in variables.items() if name != "continue_final_message"}
        turns = [_turn(message) for message in messages]
        continues = bool(variables.get("continue_final_message"))
        if continues:
            turns[-1] = turns[-1] | {"content": turns[-1]["content"] + _CONTINUATION}
        bare = [_without_content(turn) for turn in turns] if self._knows_no_content else turns
        try:
            text = self._text(self._constants | known | {"messages": bare}, max_chars)
        except TemplateFailedError:
            if bare == turns:
                raise
            text = self._text(self._constants | known | {"messages": turns}, max_chars)  # it asks for both
        return _before_continuation(text, messages[-1]["content"]) if continues else text

    def _check_read(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> None:
        if variables.get("tools") and "tools" not in self._read:
            raise UnreadError("tools", "are not shown by the model's chat template; leave them out")
        if not self._shows_calls and any("tool_calls" in message for message in messages):
            raise UnreadError("messages", "have tool_calls, which the model's chat template does not show")
        for name in sorted(variables.keys() - OWN_VARIABLES - self._read):
            raise UnreadError(f"template_arguments[{name}]", "is not read by the model's chat template; leave it out")

    def _text(self, variables: dict[str, Any], max_chars: int) -> str:
        pieces, num_chars = [], 0
        try:
            for piece in self._template.generate(variables):
                num_chars += len(piece)
                if num_chars > max_chars:
                    raise TemplateFailedError(f"the rendered chat has more characters than the limit of {max_chars}")
                pieces.append(piece)
        except (ChatRefusedError, TemplateFailedError):
            raise
        except Exception as error:
            raise TemplateFailedError(_sentence(error)) from error
        return "".join(pieces)


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """With the reasoning under both names that templates read, as transformers gives it."""
    return {"thinking": message["reasoning_content"], **message} if "reasoning_content" in message else dict(message)


def _without_content(turn: dict[str, Any]) -> dict[str, Any]:
    return turn if turn.get("content") or not turn.get("tool_calls") else turn | {"content": None}


def _asks_for_no_content(tree: nodes.Template) -> bool:
    """Whether a template tests the content of a message for none: it may take an empty one for an answer."""
    tested = (test.node for test in tree.find_all(nodes.Test) if test.name == "none")
    return any(
        node.attr == "content"
        if isinstance(node, nodes.Getattr)
        else isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        for node in tested
    )


def _before_continuation(text: str, content: str) -> str:
    """As transformers cuts it: where the template trims contents, what it would have trimmed goes, too."""
    at = text.rfind(_CONTINUATION.strip())
    kept = text[:at] if text.startswith(_CONTINUATION, at) else text[:at].rstrip()
    if at < 0 or not kept.rstrip().endswith(content.strip()):
        raise UnreadError("continue_final_message", "is set, and the model's chat template changes the last content")
    return kept


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

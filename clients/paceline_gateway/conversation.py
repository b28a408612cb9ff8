"""The turns of a chat and the tools that it may call, as the client library takes them."""

from collections.abc import Sequence

from paceline_client import Message, Tool, ToolCall, ToolChoice
from paceline_gateway.bodies import CallOfTurn, ContentPart, ToolOfBody, ToolSelection, Turn
from paceline_gateway.errors import ApiError, refused

_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text")  # all but the first in `/v1/responses`
_MODES = ("none", "auto", "required")


def turns(messages: Sequence[Turn]) -> list[Message]:
    """Raises ApiError for what a turn may not have."""
    if not messages:
        raise refused("messages", "is empty")
    return [message_of(turn, f"messages[{number}]") for number, turn in enumerate(messages)]


def message_of(turn: Turn, path: str) -> Message:
    """Raises ApiError, with `path` as the name of the turn."""
    for name in ("function_call", "audio"):
        if getattr(turn, name):
            raise _unsupported(f"{path}.{name}", "is not supported; leave it out")
    return Message(
        "system" if turn.role == "developer" else turn.role,
        (turn.refusal or "") if turn.content is None else text_of(turn.content, f"{path}.content"),
        reasoning=turn.reasoning_content or turn.reasoning or None,
        tool_calls=[_call(call, f"{path}.tool_calls[{number}]") for number, call in enumerate(turn.tool_calls or ())],
        tool_call_id=turn.tool_call_id,
        name=turn.name,
    )


def text_of(content: str | Sequence[ContentPart], path: str) -> str:
    """Raises ApiError."""
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text if part.type in _TEXT_PARTS else None
        if text is None:
            sentence = f"{part.type!r} is not taken: parts are text" if part.type not in _TEXT_PARTS else "has no text"
            raise _unsupported(f"{path}[{number}].type", sentence)
        texts.append(text)
    return "\n".join(texts)


def _call(call: CallOfTurn, path: str) -> ToolCall:
    if call.type != "function":
        raise _unsupported(f"{path}.type", f"{call.type!r} is not taken: calls are of functions")
    if call.function is None:
        raise refused(f"{path}.function", "is missing")
    return ToolCall(call.id, call.function.name, call.function.arguments)


def tools_of(given: Sequence[ToolOfBody]) -> list[Tool]:
    """Raises ApiError."""
    tools = []
    for number, tool in enumerate(given):
        path, function = f"tools[{number}]", tool.function
        if tool.type != "function":
            raise _unsupported(f"{path}.type", f"{tool.type!r} is not taken: tools are functions")
        if function is None or function.name is None:
            raise refused(f"{path}.function" if function is None else f"{path}.function.name", "is missing")
        tools.append(Tool(function.name, function.description, function.parameters, function.strict))
    return tools


def choice_of(given: str | ToolSelection | None, parallel_calls: bool | None) -> ToolChoice | None:
    """Raises ApiError."""
    mode = name = None
    if isinstance(given, str):
        if given not in _MODES:
            raise refused("tool_choice", f"{given!r} is none of {', '.join(_MODES)}")
        mode = given
    elif given is not None:
        if given.type != "function":
            raise _unsupported("tool_choice", f"of type {given.type!r} is not supported")
        if given.function is None or given.function.name is None:
            raise refused("tool_choice.function", "is missing")
        name = given.function.name
    if mode is None and name is None and parallel_calls is None:
        return None
    return ToolChoice(mode=mode, name=name, parallel_calls=parallel_calls)


def _unsupported(param: str, sentence: str) -> ApiError:
    return refused(param, sentence, code="unsupported_parameter")

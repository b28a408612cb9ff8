"""A chat as chat templates take it: the dicts that transformers gives them, JSON read, calls as mappings.

Every sentence names the field. Knows no template: what one reads is for its own process to say.
"""

import json
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, Never, TypedDict

from paceline.chat_variables import OWN_VARIABLES
from paceline.v1 import inference_pb2
from paceline_scheduler.api.rules import check_count, check_num_bytes
from paceline_scheduler.errors import InvalidRequestError

MAX_TOOLS = 128
MAX_TOOL_CALLS = 2048  # of a chat
MAX_NAME_BYTES = 64  # of a tool, a call, an id, a template argument
MAX_SCHEMA_BYTES = 64 * 1024
MAX_TEMPLATE_ARGUMENTS = 32
MAX_ARGUMENT_BYTES = 64 * 1024
MAX_JSON_DEPTH = 64
MAX_JSON_VALUES = 1 << 15  # of a chat, all looked at while everybody waits, for 25 ms at most
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}}


class TemplateInput(TypedDict):
    """`variables`: what the template is given beside the messages."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]


def num_chars(chat: inference_pb2.Chat) -> int:
    """Of all texts of a client in it."""
    calls = (call for turn in chat.messages for call in turn.tool_calls)
    return (
        sum(len(turn.role + turn.content + turn.reasoning + turn.tool_call_id + turn.name) for turn in chat.messages)
        + sum(len(call.id + call.name + call.arguments) for call in calls)
        + sum(len(tool.name + tool.description + tool.parameters_json_schema) for tool in chat.tools)
        + sum(len(name + argument.text) for name, argument in chat.template_arguments.items())
    )


def check_chat(chat: inference_pb2.Chat) -> None:
    """All but JSON. Raises InvalidRequestError and UnsupportedError."""
    check_count("chat.messages.tool_calls", sum(len(turn.tool_calls) for turn in chat.messages), 0, MAX_TOOL_CALLS)
    for index, turn in enumerate(chat.messages):
        if not turn.role:
            raise InvalidRequestError(f"chat.messages[{index}].role", 'is empty; it is usually "user"')
        if turn.tool_call_id:
            _check_name(f"chat.messages[{index}].tool_call_id", turn.tool_call_id)
        for number, call in enumerate(turn.tool_calls):
            _check_name(f"chat.messages[{index}].tool_calls[{number}].id", call.id)
            _check_name(f"chat.messages[{index}].tool_calls[{number}].name", call.name)
    _check_tools(chat.tools)
    _check_choice(chat)
    check_count("chat.template_arguments", len(chat.template_arguments), 0, MAX_TEMPLATE_ARGUMENTS)
    for name, argument in chat.template_arguments.items():
        field = f"chat.template_arguments[{name}]"
        _check_name("chat.template_arguments", name)
        if name in OWN_VARIABLES:
            raise InvalidRequestError(field, "is what every chat template is given; leave it out")
        if argument.WhichOneof("value") is None or not math.isfinite(argument.number):
            raise InvalidRequestError(field, "has no value; set a flag, an integer, a finite number or a text")
        check_num_bytes(field, argument.text, MAX_ARGUMENT_BYTES)
    if chat.continue_final_message and chat.messages[-1].tool_calls:
        raise InvalidRequestError("chat.continue_final_message", "is set, and the last turn ends with calls of tools")


def template_input(chat: inference_pb2.Chat, default_system_text: str | None) -> TemplateInput:
    """Of one that was checked. The system text is that of a chat that has none. Raises InvalidRequestError."""
    documents = _Documents()
    messages = [_message(turn, f"chat.messages[{index}]", documents) for index, turn in enumerate(chat.messages)]
    if default_system_text is not None and all(message["role"] != "system" for message in messages):
        messages = [{"role": "system", "content": default_system_text}, *messages]
    given = {name: getattr(each, str(each.WhichOneof("value"))) for name, each in chat.template_arguments.items()}
    own = {
        "tools": [_tool(tool, f"chat.tools[{index}]", documents) for index, tool in enumerate(chat.tools)] or None,
        "add_generation_prompt": not chat.continue_final_message,
        "continue_final_message": chat.continue_final_message,
    }
    return {"messages": messages, "variables": given | own}


def _check_name(field: str, name: str) -> None:
    if not name:
        raise InvalidRequestError(field, "is empty")
    check_num_bytes(field, name, MAX_NAME_BYTES)


def _check_tools(tools: Sequence[inference_pb2.Tool]) -> None:
    check_count("chat.tools", len(tools), 0, MAX_TOOLS)
    names: set[str] = set()
    for index, tool in enumerate(tools):
        field = f"chat.tools[{index}].name"
        if not _TOOL_NAME.fullmatch(tool.name):
            raise InvalidRequestError(field, "must have 1 to 64 of A-Z, a-z, 0-9, underscore, hyphen and dot")
        if tool.name in names:
            raise InvalidRequestError(field, f"is {tool.name!r}, as that of another tool")
        names.add(tool.name)
        check_num_bytes(f"chat.tools[{index}].parameters_json_schema", tool.parameters_json_schema, MAX_SCHEMA_BYTES)


def _check_choice(chat: inference_pb2.Chat) -> None:
    choice = chat.tool_choice
    if choice.HasField("name") and all(tool.name != choice.name for tool in chat.tools):
        raise InvalidRequestError("chat.tool_choice.name", f"is {choice.name!r}, which none of the tools is called")
    if choice.mode not in inference_pb2.ToolChoiceMode.values():
        raise InvalidRequestError("chat.tool_choice.mode", f"is {choice.mode}, which means nothing")
    if choice.mode == inference_pb2.TOOL_CHOICE_MODE_REQUIRED and not chat.tools:
        raise InvalidRequestError("chat.tool_choice.mode", "asks for a call, and there are no tools")


def _message(turn: inference_pb2.ChatMessage, place: str, documents: "_Documents") -> dict[str, Any]:
    """What is unset has no key: templates ask whether there is one."""
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        calls = enumerate(turn.tool_calls)
        message["tool_calls"] = [_call(call, f"{place}.tool_calls[{number}]", documents) for number, call in calls]
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    if turn.name:
        message["name"] = turn.name
    return message


def _call(call: inference_pb2.ToolCall, place: str, documents: "_Documents") -> dict[str, Any]:
    arguments = documents.read(f"{place}.arguments", call.arguments or "{}")
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}}


def _tool(tool: inference_pb2.Tool, place: str, documents: "_Documents") -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    schema = tool.parameters_json_schema
    function["parameters"] = documents.read(f"{place}.parameters_json_schema", schema) if schema else _NO_PARAMETERS
    return {"type": "function", "function": function}


def _refused_number(text: str) -> Never:
    raise ValueError(f"{text[:32]} is no number of JSON, or too large")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refused_number(text)


_DECODER = json.JSONDecoder(parse_constant=_refused_number, parse_float=_finite)


class _Documents:
    """The JSON objects of one chat, which share the values that it may have."""

    def __init__(self) -> None:
        self._num_left = MAX_JSON_VALUES

    def read(self, field: str, text: str) -> dict[str, Any]:
        """Keys keep their order. Raises InvalidRequestError."""
        try:
            document = _DECODER.decode(text)
            # Python alone takes half a surrogate pair for a character.
            json.dumps(document, ensure_ascii=False).encode()
        except RecursionError:
            raise InvalidRequestError(field, f"has more than {MAX_JSON_DEPTH} levels") from None
        except ValueError as error:
            raise InvalidRequestError(field, f"is no JSON: {error}") from None
        if not isinstance(document, dict):
            raise InvalidRequestError(field, "is no JSON object")
        self._check_size(field, document)
        return document

    def _check_size(self, field: str, document: dict[str, Any]) -> None:
        level: list[Collection[Any]] = [document]
        for _ in range(MAX_JSON_DEPTH):
            self._num_left -= sum(map(len, level))
            if self._num_left < 0:
                raise InvalidRequestError(field, f"is where the JSON of the chat exceeds {MAX_JSON_VALUES} values")
            values = (value for each in level for value in (each.values() if isinstance(each, dict) else each))
            level = [value for value in values if isinstance(value, dict | list)]
            if not level:
                return
        raise InvalidRequestError(field, f"has more than {MAX_JSON_DEPTH} levels")

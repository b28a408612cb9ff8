"""`/v1/responses`, of text and without a memory: a body as a chat, and an output as items and numbered events."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from paceline_client import (
    Delta,
    FinishReason,
    Message,
    OutputPart,
    ReasoningPart,
    Result,
    TextPart,
    ToolCall,
    ToolCallPart,
)
from paceline_gateway.answers import encoded, finish_reason
from paceline_gateway.bodies import (
    ChatBody,
    Function,
    InputItem,
    ResponseFormat,
    ResponsesBody,
    TextFormat,
    ToolOfBody,
    ToolSelection,
    Turn,
)
from paceline_gateway.conversation import message_of, text_of
from paceline_gateway.errors import refused

# An item's events, and its content, are named so.
_TEXT, _REASONING, _CALL = "output_text", "reasoning_text", "function_call_arguments"


def prompt_of(body: ResponsesBody) -> list[Message]:
    """Reasoning, text and calls of one answer are one turn. Raises ApiError."""
    items = [InputItem(body.input)] if isinstance(body.input, str) else body.input
    if not items:
        raise refused("input", "is empty")
    messages = [] if body.instructions is None else [Message("system", body.instructions)]
    is_open = False  # the last turn is the model's, and calls or text may follow
    for number, item in enumerate(items):
        message = _message(item, f"input[{number}]")
        if is_open and message.role == "assistant" and item.type != "reasoning":
            messages[-1] = _joined(messages[-1], message)
        else:
            messages.append(message)
        is_open = message.role == "assistant"
    return messages


def _message(item: InputItem, path: str) -> Message:
    match item.type:
        case "message":
            return message_of(Turn(item.role, item.content), path)
        case "reasoning":
            return Message("assistant", reasoning=text_of(item.content or "", f"{path}.content") or None)
        case "function_call":
            if item.call_id is None or item.name is None:
                raise refused(f"{path}.call_id" if item.call_id is None else f"{path}.name", "is missing")
            return Message("assistant", tool_calls=(ToolCall(item.call_id, item.name, item.arguments or ""),))
        case "function_call_output":
            if item.call_id is None or item.output is None:
                raise refused(f"{path}.call_id" if item.call_id is None else f"{path}.output", "is missing")
            return Message("tool", text_of(item.output, f"{path}.output"), tool_call_id=item.call_id)
    raise refused(f"{path}.type", f"{item.type!r} is not taken", code="unsupported_parameter")


def _joined(turn: Message, more: Message) -> Message:
    content = "\n".join(filter(None, (turn.content, more.content)))
    return replace(turn, content=content, tool_calls=(*turn.tool_calls, *more.tool_calls))


def chat_of(body: ResponsesBody) -> ChatBody:
    """What it asks for, beside its messages. Raises ApiError."""
    if body.truncation not in (None, "disabled"):
        raise refused("truncation", "is not supported; leave it out", code="unsupported_parameter")
    if body.reasoning is not None and body.reasoning.summary not in (None, "auto"):
        raise refused("reasoning.summary", "is not supported; leave it out", code="unsupported_parameter")
    form, choice = None if body.text is None else body.text.format, body.tool_choice
    for number, tool in enumerate(body.tools or ()):
        if tool.type == "function" and tool.name is None:
            raise refused(f"tools[{number}].name", "is missing")
    if isinstance(choice, ToolSelection):
        if choice.type == "function" and choice.name is None:
            raise refused("tool_choice.name", "is missing")
        choice = ToolSelection(choice.type, function=Function(choice.name))
    return ChatBody(
        model=body.model,
        stream=body.stream,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        service_tier=body.service_tier,
        tools=[ToolOfBody(type=each.type, function=each) for each in body.tools or ()],
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        response_format=None if form is None else ResponseFormat(form.type, form),
    )


@dataclass(slots=True)
class _Item:
    """One item of the output, as far as it has been told. `stem` is that of the names of its events."""

    stem: str
    fields: dict[str, Any]
    place: dict[str, Any]
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def shown(self, status: str) -> dict[str, Any]:
        fields = self.fields | {"status": status}
        if self.stem == _CALL:
            return fields | {"arguments": self.text}
        return fields | {"content": [_content(self.stem, self.text)] if status != "in_progress" else []}


class ResponseAnswer:
    """Of one request. `has_parts`: its output comes cut."""

    def __init__(
        self, request_id: str, body: ResponsesBody, model: str, created: int, *, has_parts: bool = False
    ) -> None:
        self._has_parts = has_parts
        self._num_events = 0
        self._items: list[_Item] = []  # all but the last are done
        self._head = b""  # of each event that adds to the last one
        self._response = {
            "id": request_id,
            "object": "response",
            "created_at": created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _set_fields((body.text and body.text.format) or TextFormat())},
            "tool_choice": _set_fields(body.tool_choice or "auto"),
            "tools": [{"parameters": None, "strict": None} | _set_fields(tool) for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def chunks(self, _number: int, delta: Delta) -> bytes:
        """What a delta adds; the first one begins the response."""
        events = b""
        if not self._num_events:
            events = self._event("created", {"response": self._response})
            events += self._event("in_progress", {"response": self._response})
        parts: Sequence[OutputPart] = delta.parts if self._has_parts else (TextPart(delta.text),) if delta.text else ()
        for part in parts:
            events += self._begun(part) if self._begins(part) else b""
            events += self._added(part.arguments if isinstance(part, ToolCallPart) else part.text)
        return events

    def end(self, results: Sequence[Result]) -> bytes:
        (result,) = results
        events = b"" if self._items else self._begun(TextPart(""))
        response = self._ended(result)
        return events + self._done(response["status"]) + self._event(response["status"], {"response": response})

    def whole(self, results: Sequence[Result]) -> bytes:
        (result,) = results
        (completion,) = result.completions
        parts: list[OutputPart] = [ReasoningPart(completion.reasoning)] if completion.reasoning else []
        text = completion.content if self._has_parts else completion.text
        parts += [TextPart(text)] if text or not completion.tool_calls else []
        parts += [ToolCallPart(at, call.arguments, call.id, call.name) for at, call in enumerate(completion.tool_calls)]
        for part in parts:
            self._begun(part)
            self._added(part.arguments if isinstance(part, ToolCallPart) else part.text)
        return encoded(self._ended(result))

    def _begins(self, part: OutputPart) -> bool:
        """Whether it is of another item than what came before."""
        if isinstance(part, ToolCallPart):
            return part.id is not None
        return not self._items or self._items[-1].stem != (_TEXT if isinstance(part, TextPart) else _REASONING)

    def _begun(self, part: OutputPart) -> bytes:
        events = self._done("completed") if self._items else b""
        fields: dict[str, Any]
        match part:
            case TextPart():
                stem, prefix, fields = _TEXT, "msg", {"type": "message", "role": "assistant"}
            case ReasoningPart():
                stem, prefix, fields = _REASONING, "rs", {"type": "reasoning", "summary": []}
            case _:
                stem, prefix = _CALL, "fc"
                fields = {"type": "function_call", "call_id": part.id, "name": part.name}
        index = len(self._items)
        fields["id"] = f"{prefix}_{self._response['id']}" + (f"_{index}" if index else "")
        place = {"item_id": fields["id"], "output_index": index} | ({} if stem == _CALL else {"content_index": 0})
        self._items.append(item := _Item(stem, fields, place))
        kind = f"response.{stem}.delta"
        constant = {"type": kind} | place | ({"logprobs": []} if stem == _TEXT else {})
        self._head = b"event: %b\ndata: %b" % (kind.encode(), encoded(constant)[:-1])
        events += self._event("output_item.added", {"output_index": index, "item": item.shown("in_progress")})
        if stem != _CALL:
            events += self._event("content_part.added", place | {"part": _content(stem, "")})
        return events

    def _added(self, text: str) -> bytes:
        if not text:
            return b""
        self._items[-1].pieces.append(text)
        return b'%b,"delta":%b,"sequence_number":%d}\n\n' % (self._head, encoded(text), self._count())

    def _done(self, status: str) -> bytes:
        """Of the last item."""
        item = self._items[-1]
        told: dict[str, Any] = {"arguments": item.text, "name": item.fields["name"]} if item.stem == _CALL else {}
        if item.stem != _CALL:
            told = {"text": item.text} | ({"logprobs": []} if item.stem == _TEXT else {})
        events = self._event(f"{item.stem}.done", item.place | told)
        if item.stem != _CALL:
            events += self._event("content_part.done", item.place | {"part": _content(item.stem, item.text)})
        index = item.place["output_index"]
        return events + self._event("output_item.done", {"output_index": index, "item": item.shown(status)})

    def _ended(self, result: Result) -> dict[str, Any]:
        finish_reason(result.finish_reason)
        is_cut = result.finish_reason is FinishReason.LENGTH
        status, usage = "incomplete" if is_cut else "completed", result.usage
        *items, last = self._items
        return self._response | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [*(item.shown("completed") for item in items), last.shown(status)],
            "usage": {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.num_output_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
                "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
            },
        }

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        content = encoded({"type": f"response.{kind}", "sequence_number": self._count(), **fields})
        return b"event: response.%b\ndata: %b\n\n" % (kind.encode(), content)

    def _count(self) -> int:
        self._num_events += 1
        return self._num_events - 1


def _set_fields(value: str | msgspec.Struct) -> Any:  # noqa: ANN401  (what JSON has)
    if isinstance(value, str):
        return value
    return {name: each for name, each in msgspec.structs.asdict(value).items() if each is not None}


def _content(stem: str, text: str) -> dict[str, Any]:
    return {"type": stem, "text": text} | ({"annotations": [], "logprobs": []} if stem == _TEXT else {})

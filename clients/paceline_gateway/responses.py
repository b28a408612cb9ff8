"""`/v1/responses`, of text and without a memory: a body as a chat, and an output as items and numbered events."""

from collections.abc import Sequence
from typing import Any

import msgspec

from paceline_client import Delta, FinishReason, Message, Result
from paceline_gateway.answers import encoded, finish_reason
from paceline_gateway.asked import message_of
from paceline_gateway.bodies import ChatBody, InputItem, ResponseFormat, ResponsesBody, TextFormat, Turn
from paceline_gateway.errors import refused


def prompt_of(body: ResponsesBody) -> list[Message]:
    """Raises ApiError."""
    items = [InputItem(body.input)] if isinstance(body.input, str) else body.input
    if not items:
        raise refused("input", "is empty")
    instructions = [] if body.instructions is None else [Message("system", body.instructions)]
    return instructions + [_message(item, f"input[{number}]") for number, item in enumerate(items)]


def _message(item: InputItem, path: str) -> Message:
    if item.type != "message":
        raise refused(f"{path}.type", f"{item.type!r} is not taken", code="unsupported_parameter")
    return message_of(Turn(item.role, item.content), path)


def chat_of(body: ResponsesBody) -> ChatBody:
    """What it asks for, beside its messages. Raises ApiError."""
    if body.truncation not in (None, "disabled"):
        raise refused("truncation", "is not supported; leave it out", code="unsupported_parameter")
    form = None if body.text is None else body.text.format
    return ChatBody(
        model=body.model,
        stream=body.stream,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        service_tier=body.service_tier,
        tool_choice=body.tool_choice,
        response_format=None if form is None else ResponseFormat(form.type, form),
    )


class ResponseAnswer:
    """Of one request."""

    def __init__(self, request_id: str, body: ResponsesBody, model: str, created: int) -> None:
        self._message_id = f"msg_{request_id}"
        self._num_events = 0
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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _shown(None if body.text is None else body.text.format)},
            "tool_choice": "auto",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        self._place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        self._head = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
        self._head += encoded(self._place)[1:-1] + b',"logprobs":[],"delta":'

    def chunks(self, _number: int, delta: Delta) -> bytes:
        """What a delta adds; the first one begins response, message and text."""
        begins = self._begin() if not self._num_events else b""
        if not delta.text:
            return begins
        return begins + b'%b%b,"sequence_number":%d}\n\n' % (self._head, encoded(delta.text), self._count())

    def end(self, results: Sequence[Result]) -> bytes:
        (result,) = results
        response = self._ended(result)
        (message,) = response["output"]
        (part,) = message["content"]
        return (
            self._event("response.output_text.done", self._place | {"text": result.text, "logprobs": []})
            + self._event("response.content_part.done", self._place | {"part": part})
            + self._event("response.output_item.done", {"output_index": 0, "item": message})
            + self._event(f"response.{response['status']}", {"response": response})
        )

    def whole(self, results: Sequence[Result]) -> bytes:
        return encoded(self._ended(results[0]))

    def _begin(self) -> bytes:
        message = self._message("in_progress", [])
        return (
            self._event("response.created", {"response": self._response})
            + self._event("response.in_progress", {"response": self._response})
            + self._event("response.output_item.added", {"output_index": 0, "item": message})
            + self._event("response.content_part.added", self._place | {"part": _text("")})
        )

    def _ended(self, result: Result) -> dict[str, Any]:
        finish_reason(result.finish_reason)
        is_cut = result.finish_reason is FinishReason.LENGTH
        status, usage = "incomplete" if is_cut else "completed", result.usage
        return self._response | {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._message(status, [_text(result.text)])],
            "usage": {
                "input_tokens": usage.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.num_output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
            },
        }

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        content = encoded({"type": kind, "sequence_number": self._count(), **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), content)

    def _count(self) -> int:
        self._num_events += 1
        return self._num_events - 1


def _shown(form: TextFormat | None) -> dict[str, Any]:
    fields = msgspec.structs.asdict(form or TextFormat())
    return {name: value for name, value in fields.items() if value is not None}


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

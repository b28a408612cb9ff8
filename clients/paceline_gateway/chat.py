"""Chats: from a body to what is asked for, and from outputs to messages and chunks.

A chunk is put together from three pieces: all but its text is the same in every chunk of a choice.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from paceline_client import Completion, Delta, FinishReason, OutputPart, ReasoningPart, Result, TextPart, ToolCall
from paceline_gateway import logprobs
from paceline_gateway.answers import DONE, encoded, finish_reason, usage

_CALLED = b'"tool_calls"'


class ChatAnswer:
    """Of one request. `has_parts`: its outputs come cut. `is_call_named`: it named the tool that is called."""

    def __init__(
        self,
        request_id: str,
        model: str,
        created: int,
        *,
        has_logprobs: bool,
        has_token_ids: bool,
        has_usage: bool,
        has_parts: bool = False,
        is_call_named: bool = False,
    ) -> None:
        self._has_parts = has_parts
        self._is_call_named = is_call_named
        self._calling: set[int] = set()  # choices
        self._has_logprobs = has_logprobs
        self._has_token_ids = has_token_ids
        self._fields = {"id": request_id, "created": created, "model": model}
        head = encoded({"id": request_id, "object": "chat.completion.chunk", "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._has_usage = has_usage
        self._tail = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"
        self._begun: set[int] = set()

    def chunks(self, _number: int, delta: Delta) -> bytes:
        """What a delta adds: a chunk of its tokens, or of each of their parts, and one of the choice's end."""
        chunks, index, extras = b"", delta.index, self._extras(delta)
        is_first = index not in self._begun
        pieces = self._pieces(delta, is_first=is_first)
        if not pieces and (is_first or (delta.token_ids and (self._has_logprobs or self._has_token_ids))):
            pieces = [b'"content":null' if self._has_parts else b'"content":""']
        for number, piece in enumerate(pieces):
            role = b'"role":"assistant",' if is_first and not number else b""
            chunks += self._chunk(index, role + piece, b'"logprobs":null,' if number else extras, b"null")
        if pieces:
            self._begun.add(index)
        if delta.finish_reason is not None:
            reason = self._finish_reason(delta.finish_reason, has_calls=index in self._calling)
            chunks += self._chunk(index, b"", b'"logprobs":null,', reason)
        return chunks

    def _pieces(self, delta: Delta, *, is_first: bool) -> list[bytes]:
        """The fields of each chunk's `delta`."""
        if not self._has_parts:
            return [b'"content":' + encoded(delta.text)] if delta.text else []
        pieces = [piece for part in delta.parts for piece in self._pieces_of(part, delta.index)]
        if is_first and pieces and not pieces[0].startswith(b'"content"'):
            pieces[0] = b'"content":null,' + pieces[0]
        return pieces

    def _pieces_of(self, part: OutputPart, choice: int) -> Iterator[bytes]:
        match part:
            case TextPart(text):
                yield b'"content":' + encoded(text)
            case ReasoningPart(text):
                yield b'"reasoning_content":' + encoded(text)
            case _:
                self._calling.add(choice)
                if part.id is not None:  # clients append what they find in later pieces
                    call = {"index": part.index} | _call(ToolCall(part.id, part.name or ""))
                    yield b'"tool_calls":[' + encoded(call) + b"]"
                if part.arguments:
                    rest = b'"tool_calls":[{"index":%d,"function":{"arguments":%b}}]'
                    yield rest % (part.index, encoded(part.arguments))

    def _finish_reason(self, reason: FinishReason, *, has_calls: bool) -> bytes:
        is_called = has_calls and not self._is_call_named and reason is FinishReason.STOP
        return _CALLED if is_called else finish_reason(reason)

    def end(self, results: Sequence[Result]) -> bytes:
        if not self._has_usage:
            return DONE
        return self._head + b'],"usage":' + encoded(usage(results)) + b"}\n\n" + DONE

    def whole(self, results: Sequence[Result]) -> bytes:
        (result,) = results
        choices = [self._choice(completion) for completion in result.completions]
        answer = self._fields | {"object": "chat.completion", "choices": choices, "usage": usage(results)}
        if result.prompt_logprobs:
            answer["prompt_logprobs"] = logprobs.of_prompt(result.prompt_logprobs)
        return encoded(answer)

    def _chunk(self, index: int, delta: bytes, extras: bytes, reason: bytes) -> bytes:
        return b'%b{"index":%d,"delta":{%b},%b"finish_reason":%b}%b' % (
            self._head, index, delta, extras, reason, self._tail,
        )  # fmt: skip

    def _extras(self, delta: Delta) -> bytes:
        if not (self._has_logprobs or self._has_token_ids):
            return b'"logprobs":null,'
        extras = b'"logprobs":' + encoded(logprobs.of_chat(delta.logprobs) if self._has_logprobs else None) + b","
        return extras + b'"token_ids":' + encoded(delta.token_ids) + b"," if self._has_token_ids else extras

    def _choice(self, completion: Completion) -> dict[str, Any]:
        calls = completion.tool_calls
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if self._has_parts:
            message["content"] = completion.content or (None if calls else "")
            message |= {"reasoning_content": completion.reasoning} if completion.reasoning else {}
            message |= {"tool_calls": [_call(call) for call in calls]} if calls else {}
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": message,
            "logprobs": logprobs.of_chat(completion.logprobs) if self._has_logprobs else None,
            "finish_reason": msgspec.Raw(self._finish_reason(completion.finish_reason, has_calls=bool(calls))),
        }
        return choice | ({"token_ids": completion.token_ids} if self._has_token_ids else {})


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

"""Chats: from a body to what is asked for, and from outputs to messages and chunks.

A chunk is put together from three pieces: all but its text is the same in every chunk of a choice.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from paceline_client import Completion, Delta, Result
from paceline_gateway import logprobs
from paceline_gateway.answers import DONE, encoded, finish_reason, usage


class ChatAnswer:
    """Of one request."""

    def __init__(
        self, request_id: str, model: str, created: int, *, has_logprobs: bool, has_token_ids: bool, has_usage: bool
    ) -> None:
        self._has_logprobs = has_logprobs
        self._has_token_ids = has_token_ids
        self._fields = {"id": request_id, "created": created, "model": model}
        head = encoded({"id": request_id, "object": "chat.completion.chunk", "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._has_usage = has_usage
        self._tail = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"
        self._begun: set[int] = set()

    def chunks(self, _number: int, delta: Delta) -> bytes:
        """What a delta adds: a chunk of its tokens, unless they have no text yet, and one of the choice's end."""
        chunks = b""
        is_first = delta.index not in self._begun
        if delta.text or is_first or (delta.token_ids and (self._has_logprobs or self._has_token_ids)):
            self._begun.add(delta.index)
            # The place where `Delta.parts` is going to say `reasoning_content` and `tool_calls`.
            text = (b'"role":"assistant","content":' if is_first else b'"content":') + encoded(delta.text)
            chunks = self._chunk(delta.index, text, self._extras(delta), b"null")
        if delta.finish_reason is not None:
            chunks += self._chunk(delta.index, b"", b'"logprobs":null,', finish_reason(delta.finish_reason))
        return chunks

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
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": logprobs.of_chat(completion.logprobs) if self._has_logprobs else None,
            "finish_reason": msgspec.Raw(finish_reason(completion.finish_reason)),
        }
        return choice | ({"token_ids": completion.token_ids} if self._has_token_ids else {})

"""Completions: prompts as texts or token ids, one or several, and from outputs to choices and chunks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from paceline_client import AsyncClient, Completion, Delta, Result, TokenLogprobs
from paceline_gateway import logprobs
from paceline_gateway.answers import DONE, encoded, finish_reason, usage
from paceline_gateway.bodies import CompletionBody
from paceline_gateway.errors import refused
from paceline_gateway.logprobs import CompletionLogprobs

MAX_PROMPTS = 128
OutputT = TypeVar("OutputT", Delta, Completion)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is shown again: its text, and the first token of its log-probabilities, if they are asked for."""

    text: str = ""
    first_token: str | None = None


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """Raises ApiError."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise refused("prompt", "is missing" if given is None else "is empty")
    if _are_ids(given):
        return [given]
    if len(given) > MAX_PROMPTS:
        raise refused("prompt", f"has {len(given)} prompts; at most {MAX_PROMPTS} are taken")
    if not all(isinstance(each, str) or _are_ids(each) for each in given):
        raise refused("prompt", "has to be a text, a list of texts, token ids, or a list of these")
    return given


def _are_ids(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(type(each) is int for each in given)


async def echo_of(client: AsyncClient, prompt: str | list[int], model: str, *, has_logprobs: bool) -> Echo:
    if not isinstance(prompt, str):
        text = await client.detokenize(prompt, model=model, skip_special_tokens=False)
        if not has_logprobs:
            return Echo(text)
        return Echo(text, await client.detokenize(prompt[:1], model=model, skip_special_tokens=False))
    if not has_logprobs:
        return Echo(prompt)
    tokens = await client.tokenize(prompt, model=model, with_texts=True)
    return Echo(prompt, tokens.token_texts[0])


def _without_output(output: OutputT) -> OutputT:
    return replace(output, text="", token_ids=(), logprobs=())


class _Choice:
    """One completion of one prompt, as far as it has been told."""

    def __init__(self, echo: Echo, *, has_logprobs: bool) -> None:
        self._echo = echo
        self._logprobs = CompletionLogprobs() if has_logprobs else None
        self._is_begun = False

    def text(self, text: str) -> str:
        return text if self._is_begun else self._echo.text + text

    def piece(self, delta: Delta | Completion, prompt_logprobs: Sequence[TokenLogprobs]) -> object:
        """Its `logprobs`, those of an echoed prompt first."""
        if self._logprobs is None:
            return None
        pieces = []
        if not self._is_begun and (first := self._echo.first_token) is not None:
            # A token that begins every prompt is not in its text.
            num_chars = len(first) if self._echo.text.startswith(first) else 0
            pieces = [self._logprobs.first(first, num_chars), self._logprobs.of(prompt_logprobs)]
        return logprobs.joined(*pieces, self._logprobs.of(delta.logprobs))

    def begin(self) -> bool:
        """False from the second time on."""
        was_begun, self._is_begun = self._is_begun, True
        return not was_begun


class CompletionAnswer:
    """Of one HTTP request: choices are numbered over all prompts. `is_echo_alone`: what was generated is left out."""

    def __init__(
        self,
        request_id: str,
        model: str,
        created: int,
        echoes: Sequence[Echo],
        num_each: int,
        *,
        has_logprobs: bool,
        has_token_ids: bool,
        has_usage: bool,
        is_echo_alone: bool,
    ) -> None:
        self._fields = {"id": request_id, "object": "text_completion", "created": created, "model": model}
        self._head = b"data: " + encoded(self._fields)[:-1] + b',"choices":['
        self._has_usage = has_usage
        self._tail = b'],"usage":null}\n\n' if has_usage else b"]}\n\n"
        self._num_each = num_each
        self._choices = [_Choice(echo, has_logprobs=has_logprobs) for echo in echoes for _ in range(num_each)]
        self._has_token_ids = has_token_ids
        self._has_logprobs = has_logprobs
        self._is_echo_alone = is_echo_alone
        self._prompt_logprobs: dict[int, Sequence[TokenLogprobs]] = {}  # by prompt

    def chunks(self, number: int, delta: Delta) -> bytes:
        """What a delta of the request with this number adds."""
        if delta.prompt_logprobs:
            self._prompt_logprobs[number] = delta.prompt_logprobs
        index = number * self._num_each + delta.index
        choice = self._choices[index]
        delta = _without_output(delta) if self._is_echo_alone else delta
        text, chunks = choice.text(delta.text), b""
        piece = choice.piece(delta, self._prompt_logprobs.get(number, ()))
        if choice.begin() or text or (delta.token_ids and (self._has_logprobs or self._has_token_ids)):
            chunks = self._chunk(index, text, self._extras(piece, delta.token_ids), b"null")
        if delta.finish_reason is not None:
            chunks += self._chunk(index, "", b'"logprobs":null,', finish_reason(delta.finish_reason))
        return chunks

    def end(self, results: Sequence[Result]) -> bytes:
        if not self._has_usage:
            return DONE
        return self._head + b'],"usage":' + encoded(usage(results)) + b"}\n\n" + DONE

    def whole(self, results: Sequence[Result]) -> bytes:
        choices = [
            self._whole_choice(number * self._num_each + completion.index, completion, result)
            for number, result in enumerate(results)
            for completion in result.completions
        ]
        return encoded(self._fields | {"choices": choices, "usage": usage(results)})

    def _whole_choice(self, index: int, completion: Completion, result: Result) -> dict[str, Any]:
        choice, output = self._choices[index], _without_output(completion) if self._is_echo_alone else completion
        fields = {
            "index": index,
            "text": choice.text(output.text),
            "logprobs": choice.piece(output, result.prompt_logprobs),
            "finish_reason": msgspec.Raw(finish_reason(completion.finish_reason)),
        }
        if result.prompt_logprobs and not self._has_logprobs:
            fields["prompt_logprobs"] = logprobs.of_prompt(result.prompt_logprobs)
        return fields | ({"token_ids": output.token_ids} if self._has_token_ids else {})

    def _chunk(self, index: int, text: str, extras: bytes, reason: bytes) -> bytes:
        return b'%b{"index":%d,"text":%b,%b"finish_reason":%b}%b' % (
            self._head, index, encoded(text), extras, reason, self._tail,
        )  # fmt: skip

    def _extras(self, piece: object, token_ids: Sequence[int]) -> bytes:
        extras = b'"logprobs":' + encoded(piece) + b"," if piece is not None else b'"logprobs":null,'
        return extras + b'"token_ids":' + encoded(token_ids) + b"," if self._has_token_ids else extras

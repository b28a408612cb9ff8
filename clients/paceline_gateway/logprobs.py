"""Log-probabilities as the two APIs show them. Pure functions of what the client library read."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from paceline_client import TokenLogprob, TokenLogprobs

_LEAST = -9999.0  # what JSON has no number for
_Token = TokenLogprob | TokenLogprobs


def of_chat(tokens: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """The field `logprobs` of a choice of a chat."""
    return {
        "content": [_chat_token(token) | {"top_logprobs": [_chat_token(top) for top in token.top]} for token in tokens],
        "refusal": None,
    }


def _chat_token(token: _Token) -> dict[str, Any]:
    return {"token": text_of(token), "bytes": list(token.token_bytes or b""), "logprob": finite(token.logprob)}


def text_of(token: _Token) -> str:
    """Bytes that are no whole character appear as U+FFFD."""
    return (token.token_bytes or b"").decode(errors="replace")


def finite(logprob: float) -> float:
    return max(_LEAST, logprob)  # which is _LEAST for what is no number


class CompletionLogprobs:
    """The field `logprobs` of one choice of a completion, piece by piece: offsets go over the whole text."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def first(self, text: str, num_chars: int) -> dict[str, Any]:
        """Of the prompt's first token, which nothing predicts; it adds so many characters to the text."""
        offset, self._num_chars = self._num_chars, self._num_chars + num_chars
        return {"tokens": [text], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [offset]}

    def of(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Of the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._num_chars)
            self._num_chars += len(self._decoder.decode(token.token_bytes or b""))
        return {
            "tokens": [text_of(token) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens],
            "text_offset": offsets,
        }


def _by_text(token: TokenLogprobs) -> dict[str, float]:
    """Tokens of one text would hide each other: the less likely ones are told by their ids."""
    found: dict[str, float] = {}
    for each in (*token.top, *(() if any(top.token_id == token.token_id for top in token.top) else (token,))):
        text = text_of(each)
        found[f"token_id:{each.token_id}" if text in found else text] = finite(each.logprob)
    return found


def joined(*pieces: dict[str, Any]) -> dict[str, Any]:
    """Several pieces of a completion's, as one."""
    return {name: [value for piece in pieces for value in piece[name]] for name in pieces[0]}


def of_prompt(tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, nothing for the first token."""
    return [None, *(_vllm_position(token) for token in tokens)]


def _vllm_position(token: TokenLogprobs) -> dict[str, Any]:
    several: tuple[_Token, ...] = (*token.top, token)
    return {str(each.token_id): _vllm_token(each) for each in several}


def _vllm_token(token: _Token) -> dict[str, Any]:
    return {"logprob": finite(token.logprob), "decoded_token": text_of(token)}

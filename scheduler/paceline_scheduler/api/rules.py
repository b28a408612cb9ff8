"""The kinds of rule that a field may have to keep.

Knows no field but the prompt, whose length `text` checks too. Every rule raises InvalidRequestError, which names the
one it was given.
"""

import math
from collections.abc import Sequence

import numpy as np

from paceline.plan.ranges import Range
from paceline.plan.values import Int32Array
from paceline.v1 import inference_pb2
from paceline_scheduler.backend import ServedModel
from paceline_scheduler.errors import InvalidRequestError, PromptTooLongError

Prompt = inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest


def check_range(field: str, value: float | None, allowed: Range) -> None:
    """Unset is fine."""
    if value is not None and value not in allowed:
        shown = value if isinstance(value, int) else f"{value:.7g}"
        start = f"above {allowed.low}" if allowed.is_open else f"at least {allowed.low}"
        end = "" if math.isinf(allowed.high) else f" and at most {allowed.high}"
        raise InvalidRequestError(field, f"is {shown}, must be {start}{end}")


def check_count(field: str, count: int, at_least: int, at_most: int) -> None:
    if not at_least <= count <= at_most:
        raise InvalidRequestError(field, f"has {count} items, must have {at_least} to {at_most}")


def check_num_bytes(field: str, text: str, at_most: int) -> None:
    num_bytes = len(text.encode())
    if num_bytes > at_most:
        raise InvalidRequestError(field, f"has {num_bytes} bytes, at most {at_most} are allowed")


def check_token_ids(field: str, token_ids: Int32Array, vocab_size: int) -> None:
    outside = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
    if outside.size:
        index = int(outside[0])
        raise InvalidRequestError(
            f"{field}[{index}]", f"is {token_ids[index]}, must be a token id from 0 to {vocab_size - 1}"
        )


def check_ids(field: str, token_ids: Sequence[int], at_most: int, vocab_size: int) -> Sequence[int]:
    check_count(field, len(token_ids), 0, at_most)
    if token_ids:
        check_token_ids(field, np.array(token_ids, dtype=np.int32), vocab_size)
    return token_ids


def check_texts(field: str, texts: Sequence[str], at_most: int, max_chars: int) -> None:
    check_count(field, len(texts), 0, at_most)
    for index, text in enumerate(texts):
        if not 1 <= len(text) <= max_chars:
            raise InvalidRequestError(f"{field}[{index}]", f"has {len(text)} characters, must have 1 to {max_chars}")


def check_prompt_length(num_tokens: int, model: ServedModel) -> None:
    if num_tokens == 0:
        raise InvalidRequestError("prompt", "has no tokens")
    if num_tokens >= model.max_model_len:
        raise PromptTooLongError(
            "prompt",
            f"has {num_tokens} tokens; at most {model.max_model_len - 1} fit, as prompt and output share the "
            f"{model.max_model_len} tokens of the context",
        )

"""Which requests a row can run: the fields of a placement.

What is wrong here fails one request alone; what is wrong with the plan itself is `table`'s business.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from paceline.plan.ranges import Range
from paceline.plan.sampling import MAX_LOGIT_BIAS, SAMPLING_RANGES
from paceline.plan.values import NewRequest
from paceline_executor.errors import InvalidFieldError, RequestError, UnsupportedFieldError
from paceline_executor.limits import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_CONTEXT_BYTES,
    MAX_END_TOKENS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    RowLimits,
)
from paceline_executor.runner.interface import Int32Array

_Check = Callable[[NewRequest, RowLimits], RequestError | None]


def fault_of(placement: NewRequest, limits: RowLimits, *, has_forms: bool) -> RequestError | None:
    """has_forms: outputs can be held to them."""
    for check in _CHECKS:
        fault = check(placement, limits)
        if fault is not None:
            return fault
    return _unsupported_field("structured") if placement.structured and not has_forms else None


def bounded(placement: NewRequest) -> NewRequest:
    """Of a request that cannot run, without what is too large for a snapshot."""
    return replace(
        placement,
        end_token_ids=placement.end_token_ids[:MAX_END_TOKENS],
        ignored_end_token_ids=(),
        bad_word_token_ids=(),
        context=placement.context if len(placement.context) <= MAX_CONTEXT_BYTES else b"",
        sampling=replace(placement.sampling, logit_bias=(), allowed_token_ids=()),
    )


def _unsupported(placement: NewRequest, limits: RowLimits) -> RequestError | None:  # noqa: ARG001  # one signature
    if not placement.unsupported_fields:
        return None
    return _unsupported_field(placement.unsupported_fields[0])


def _unsupported_field(field: str) -> UnsupportedFieldError:
    return UnsupportedFieldError(f"{field} is not supported by this executor; leave it unset", field)


def _tokens(placement: NewRequest, limits: RowLimits) -> RequestError | None:
    num_prompt = placement.prompt_token_ids.size
    if num_prompt == 0:
        return InvalidFieldError("prompt_token_ids is empty; a prompt has at least one token", "prompt_token_ids")
    num_tokens = num_prompt + placement.output_token_ids.size
    if num_tokens >= limits.max_model_len:
        sentence = f"{num_tokens} tokens leave no room for output in a context of {limits.max_model_len}"
        return InvalidFieldError(sentence, "prompt_token_ids")
    for field, token_ids in (
        ("prompt_token_ids", placement.prompt_token_ids),
        ("output_token_ids", placement.output_token_ids),
    ):
        if _outside(token_ids, limits.vocab_size):
            return InvalidFieldError(f"{field} holds ids outside 0 to {limits.vocab_size - 1}", field)
    return None


def _limits(placement: NewRequest, limits: RowLimits) -> RequestError | None:
    num_output = placement.output_token_ids.size
    if placement.max_tokens <= num_output:
        sentence = f"max_tokens is {placement.max_tokens} and there are {num_output} output tokens already"
        return InvalidFieldError(sentence, "max_tokens")
    if len(placement.end_token_ids) > MAX_END_TOKENS:
        return InvalidFieldError(f"more than {MAX_END_TOKENS} end_token_ids", "end_token_ids")
    if _outside(np.asarray(placement.end_token_ids, dtype=np.int64), limits.vocab_size):
        return InvalidFieldError(f"end_token_ids holds ids outside 0 to {limits.vocab_size - 1}", "end_token_ids")
    if len(placement.context) > MAX_CONTEXT_BYTES:
        return InvalidFieldError(f"context is larger than {MAX_CONTEXT_BYTES} bytes", "context")
    return None


def _sampling(placement: NewRequest, limits: RowLimits) -> RequestError | None:
    sampling = placement.sampling
    num_logprobs, num_prompt_logprobs = placement.num_logprobs, placement.num_prompt_logprobs
    biases = Range(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    logprobs = Range(0, MAX_LOGPROBS)
    ranges = (
        *((f"sampling.{name}", getattr(sampling, name) in wanted, wanted) for name, wanted in SAMPLING_RANGES.items()),
        ("sampling.top_k", 0 <= sampling.top_k <= limits.vocab_size, f"1 to {limits.vocab_size}, or unset"),
        ("sampling.logit_bias", all(bias in biases for _, bias in sampling.logit_bias), biases),
        ("num_logprobs", num_logprobs is None or num_logprobs in logprobs, f"{logprobs}, or unset"),
        (
            "num_prompt_logprobs",
            num_prompt_logprobs is None or num_prompt_logprobs in logprobs,
            f"{logprobs}, or unset",
        ),
        ("num_cached_tokens", num_prompt_logprobs is None or not placement.num_cached_tokens, "0 with prompt_logprobs"),
    )
    for field, is_inside, wanted in ranges:
        if not is_inside:
            return InvalidFieldError(f"{field} is out of range, must be {wanted}", field)
    return None


def _lists(placement: NewRequest, limits: RowLimits) -> RequestError | None:
    sampling = placement.sampling
    words = placement.bad_word_token_ids
    bad_word_ids = [token_id for word in words for token_id in word]
    lists = (
        ("sampling.logit_bias", [token_id for token_id, _ in sampling.logit_bias], MAX_LOGIT_BIASES),
        ("sampling.allowed_token_ids", sampling.allowed_token_ids, MAX_ALLOWED_TOKENS),
        ("ignored_end_token_ids", placement.ignored_end_token_ids, MAX_END_TOKENS),
        ("bad_word_token_ids", bad_word_ids, MAX_BAD_WORD_TOKENS),
    )
    for field, token_ids, at_most in lists:
        if len(token_ids) > at_most:
            return InvalidFieldError(f"{field} has {len(token_ids)} tokens, at most {at_most} are taken", field)
        if _outside(np.asarray(token_ids, dtype=np.int64), limits.vocab_size):
            return InvalidFieldError(f"{field} holds ids outside 0 to {limits.vocab_size - 1}", field)
    if len(words) > MAX_BAD_WORDS or not all(words):
        sentence = f"bad_word_token_ids must have at most {MAX_BAD_WORDS} words, each of at least one token"
        return InvalidFieldError(sentence, "bad_word_token_ids")
    return None


def _outside(token_ids: Int32Array | np.ndarray[tuple[int], np.dtype[np.int64]], vocab_size: int) -> bool:
    return bool(token_ids.size) and (int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size)


_CHECKS: tuple[_Check, ...] = (_unsupported, _tokens, _limits, _sampling, _lists)

"""What rules make of a row of logits, for CPUs: masks, biases and penalties, in the order of the package's docstring.

Knows lists of tokens. It refuses to know how a token is drawn, and why one is masked.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.arguments import check_tensor
from paceline_kernels.compiler import jit
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.sampling.columns import LogitRules, TokenMasks

_Float32Array = npt.NDArray[np.float32]
_Int32Array = npt.NDArray[np.int32]

_MASKED = np.float32(-np.inf)
_DONE = np.int32(-1)


class RuleArrays(NamedTuple):
    """The columns of LogitRules as compiled code takes them."""

    cu_allowed: _Int32Array
    allowed: _Int32Array
    cu_forbidden: _Int32Array
    forbidden: _Int32Array
    cu_biased: _Int32Array
    biased: _Int32Array
    biases: _Float32Array
    presence_penalty: _Float32Array
    frequency_penalty: _Float32Array
    repetition_penalty: _Float32Array
    cu_prompt: _Int32Array
    prompt: _Int32Array
    cu_output: _Int32Array
    output: _Int32Array
    mask_words: _Int32Array
    masks: _Int32Array  # by row, below 0 none


def rule_arrays(rules: LogitRules | None, masks: TokenMasks | None, num_rows: int, vocab_size: int) -> RuleArrays:
    """The columns, not copied. Raises KernelArgumentError for lists and masks that do not fit or name no token."""
    num_words = -(-vocab_size // 32)
    if masks is None:
        words, of_rows = np.empty((0, num_words), np.int32), np.full(num_rows, -1, np.int32)
    else:
        check_tensor("sample", "masks.words", masks.words, torch.int32, (None, num_words))
        words, of_rows = masks.words.numpy(), masks.of_draws.numpy()
    if rules is None:
        none, off = (np.zeros(num_rows + 1, np.int32), np.empty(0, np.int32)), np.zeros(num_rows, np.float32)
        no_biases, penalties = off[:0], (off, off, np.ones(num_rows, np.float32))
        return RuleArrays(*none, *none, *none, no_biases, *penalties, *none, *none, words, of_rows)
    lists = {}
    for name, columns in rules.lists():
        cu_lens, token_ids = columns.cu_lens.numpy(), columns.token_ids.numpy()
        if cu_lens[0] != 0 or cu_lens[-1] != len(token_ids) or (cu_lens[1:] < cu_lens[:-1]).any():
            raise KernelArgumentError("sample", f"{name}.cu_lens must ascend from 0 to the number of token_ids")
        check_token_ids("sample", f"{name}.token_ids", token_ids, vocab_size)
        lists[name] = (cu_lens, token_ids)
    return RuleArrays(
        *lists["allowed"],
        *lists["forbidden"],
        *lists["biased"],
        rules.biases.numpy(),
        rules.presence_penalty.numpy(),
        rules.frequency_penalty.numpy(),
        rules.repetition_penalty.numpy(),
        *lists["prompt"],
        *lists["output"],
        words,
        of_rows,
    )


def check_token_ids(op: str, name: str, token_ids: _Int32Array, vocab_size: int) -> None:
    """Raise KernelArgumentError for ids outside the vocabulary: compiled code checks no index."""
    if len(token_ids) and not (token_ids.min() >= 0 and token_ids.max() < vocab_size):
        raise KernelArgumentError(op, f"{name} must be 0 to {vocab_size - 1}")


@jit.compiled
def ruled(logits: _Float32Array, start: int, row: np.int64, rules: RuleArrays) -> _Float32Array:
    """A copy of one row's logits with mask and rules applied; the logits, where it has neither. logits: of the tokens
    from `start` on.
    """
    if not _is_ruled(rules, row):
        return logits
    allowed = rules.allowed[rules.cu_allowed[row] : rules.cu_allowed[row + 1]]
    given, left = logits, np.empty_like(logits)
    if len(allowed):
        left[:] = _MASKED
        for token in allowed:
            if start <= token < start + len(left):
                left[token - start] = logits[token - start]
        given = left
    if 0 <= rules.masks[row] < len(rules.mask_words):
        _mask(given, left, start, rules.mask_words[rules.masks[row]])
    elif not len(allowed):
        left[:] = logits
    for token in rules.forbidden[rules.cu_forbidden[row] : rules.cu_forbidden[row + 1]]:
        if start <= token < start + len(left):
            left[token - start] = _MASKED
    for i in range(rules.cu_biased[row], rules.cu_biased[row + 1]):
        if start <= rules.biased[i] < start + len(left):
            left[rules.biased[i] - start] += rules.biases[i]
    presence, frequency = rules.presence_penalty[row], rules.frequency_penalty[row]
    repetition = rules.repetition_penalty[row]
    if _has_penalties(rules, row):
        prompt = rules.prompt[rules.cu_prompt[row] : rules.cu_prompt[row + 1]]
        output = rules.output[rules.cu_output[row] : rules.cu_output[row + 1]]
        _penalize(left, start, prompt, output, presence, frequency, repetition)
    return left


@jit.compiled
def _is_ruled(rules: RuleArrays, row: np.int64) -> bool:
    num_listed = rules.cu_allowed[row + 1] - rules.cu_allowed[row]
    num_listed += rules.cu_forbidden[row + 1] - rules.cu_forbidden[row]
    num_listed += rules.cu_biased[row + 1] - rules.cu_biased[row]
    return num_listed > 0 or rules.masks[row] >= 0 or _has_penalties(rules, row)


@jit.compiled
def _has_penalties(rules: RuleArrays, row: np.int64) -> bool:
    has_counts = rules.presence_penalty[row] != 0 or rules.frequency_penalty[row] != 0
    return bool(has_counts or rules.repetition_penalty[row] != 1)


@jit.compiled
def _mask(given: _Float32Array, left: _Float32Array, start: int, words: _Int32Array) -> None:
    """Without a branch for each bit, for vector code. given: may be `left`."""
    stop = start + len(left)
    for word in range(start // 32, (stop + 31) // 32):
        first = max(start, 32 * word)
        bits = words[word] >> np.int32(first - 32 * word)
        tokens = slice(first - start, min(stop, 32 * word + 32) - start)
        those_given, those_left = given[tokens], left[tokens]
        for i in range(len(those_left)):
            those_left[i] = those_given[i] if (bits >> np.int32(i)) & 1 else _MASKED


@jit.compiled
def _penalize(
    left: _Float32Array,
    start: int,
    prompt: _Int32Array,
    output: _Int32Array,
    presence: jit.Float32,
    frequency: jit.Float32,
    repetition: jit.Float32,
) -> None:
    """Change the logits of tokens in prompt and output, each once."""
    counts = np.zeros(len(left), dtype=np.int32)
    for token in output:
        if start <= token < start + len(left):
            counts[token - start] += 1
    for token in output:
        place = token - start
        if 0 <= place < len(left) and counts[place] != _DONE:
            logit = _repeated(left[place], repetition)
            left[place] = logit - frequency * np.float32(counts[place]) - presence
            counts[place] = _DONE
    if repetition != 1:
        for token in prompt:
            place = token - start
            if 0 <= place < len(left) and counts[place] != _DONE:
                counts[place] = _DONE
                left[place] = _repeated(left[place], repetition)


@jit.compiled
def _repeated(logit: jit.Float32, penalty: jit.Float32) -> jit.Float32:
    return logit / penalty if logit > 0 else logit * penalty

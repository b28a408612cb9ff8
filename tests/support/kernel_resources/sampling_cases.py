"""sampling of a large vocabulary, with rules of both kinds and without.

Knows which kernels differ: by the number of segments those with a program per row, by the type of logits those
that read them, by whether there are rules those that read rules.
"""

from collections.abc import Iterator
from functools import partial

import torch

from kernel_resources.case import Case, meta
from paceline_kernels.sampling import PENALTIES, DrawRules, LogitRules, RowRules, SamplingParameters, TokenLists, sample

_ROWS = 8


def cases() -> Iterator[Case]:
    """The draw alone, and all that may surround it."""
    yield Case("sample 128256", partial(_call, 128_256, None, -1))
    yield Case("sample 128256 everything", partial(_call, 128_256, _rules_of_draws(), 20))
    yield Case("sample 128256 rules as lists", partial(_call, 128_256, _rules(), -1))
    narrow = torch.bfloat16
    yield Case("sample 128256 bfloat16", partial(_call, 128_256, None, -1, narrow))
    yield Case("sample 128256 bfloat16 everything", partial(_call, 128_256, _rules_of_draws(), 20, narrow))


def _column(dtype: torch.dtype) -> torch.Tensor:
    return meta(_ROWS, dtype=dtype)


def _rules() -> LogitRules:
    lists = TokenLists(meta(_ROWS + 1, dtype=torch.int32), meta(100, dtype=torch.int32))
    return LogitRules(
        allowed=lists,
        forbidden=lists,
        biased=lists,
        biases=meta(100, dtype=torch.float32),
        prompt=lists,
        output=lists,
        **dict.fromkeys(PENALTIES, _column(torch.float32)),
    )


def _rules_of_draws() -> DrawRules:
    lists = _rules()
    of_rows = RowRules(
        allowed=lists.allowed,
        biased=lists.biased,
        biases=lists.biases,
        min_tokens=_column(torch.int32),
        withheld=lists.forbidden,
        words=lists.forbidden,
        cu_words=lists.forbidden.cu_lens,
        **{name: getattr(lists, name) for name in PENALTIES},
    )
    return DrawRules(of_rows, _column(torch.int32), meta(_ROWS, 131_072, dtype=torch.int32), _column(torch.int32))


def _call(
    vocab: int, rules: LogitRules | DrawRules | None, max_logprobs: int, dtype: torch.dtype = torch.float32
) -> None:
    parameters = SamplingParameters(
        temperature=_column(torch.float32),
        top_k=_column(torch.int32),
        top_p=_column(torch.float32),
        min_p=_column(torch.float32),
        seeds=_column(torch.int64),
        offsets=_column(torch.int32),
        num_logprobs=_column(torch.int32),
    )
    sample(meta(_ROWS, vocab, dtype=dtype), parameters, rules, max_logprobs=max_logprobs)

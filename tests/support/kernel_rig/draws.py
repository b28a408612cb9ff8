"""Rows of draws: parameters and rules by what each row names, and any of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from paceline_kernels.sampling import LogitRules, SamplingParameters, TokenLists, TokenMasks

Row = Mapping[str, Any]
_LISTS = ("allowed", "forbidden", "biased", "prompt", "output")
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3}


def parameters(rows: Sequence[Row], num_logprobs: int = -1) -> SamplingParameters:
    """A row each, with what it names; offsets count up."""
    rows = [{**OFF, **row} for row in rows]
    return SamplingParameters(
        temperature=torch.tensor([row["temperature"] for row in rows]),
        top_k=torch.tensor([row["top_k"] for row in rows], dtype=torch.int32),
        top_p=torch.tensor([row["top_p"] for row in rows]),
        min_p=torch.tensor([row["min_p"] for row in rows]),
        seeds=torch.tensor([row["seed"] for row in rows], dtype=torch.int64),
        offsets=torch.arange(len(rows), dtype=torch.int32),
        num_logprobs=torch.full((len(rows),), num_logprobs, dtype=torch.int32),
    )


def rules(*rows: Row) -> LogitRules:
    """The rules of rows, each with the lists and penalties that it names; biases are 1, 2 and so on if not named."""

    def lists(name: str) -> TokenLists:
        tokens = [row.get(name, []) for row in rows]
        ends = torch.tensor([0, *map(len, tokens)]).cumsum(0).int()
        return TokenLists(ends, torch.tensor([token for row in tokens for token in row], dtype=torch.int32))

    def penalty(name: str, off: float) -> torch.Tensor:
        return torch.tensor([row.get(name, off) for row in rows], dtype=torch.float32)

    biases = [row.get("biases", [i + 1.0 for i in range(len(row.get("biased", [])))]) for row in rows]
    return LogitRules(
        **{name: lists(name) for name in _LISTS},
        biases=torch.tensor([bias for row in biases for bias in row], dtype=torch.float32),
        presence_penalty=penalty("presence", 0.0),
        frequency_penalty=penalty("frequency", 0.0),
        repetition_penalty=penalty("repetition", 1.0),
    )


def masks(vocab_size: int, *rows: Iterable[int] | None) -> TokenMasks:
    """Of rows that may draw these tokens alone, or any; masks lie in the order of their rows, reversed."""
    masked = [row for row in reversed(rows) if row is not None]
    words = torch.zeros(len(masked), -(-vocab_size // 32), dtype=torch.int64)
    for mask, tokens in enumerate(masked):
        for token in set(tokens):
            words[mask, token // 32] |= 1 << token % 32
    number, of_draws = len(masked), []
    for row in rows:
        number -= row is not None
        of_draws.append(-1 if row is None else number)
    words = words.where(words < 2**31, words - 2**32)
    return TokenMasks(words.int(), torch.tensor(of_draws, dtype=torch.int32))


ANY_FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 0.2, 1.0, 3.0]),
        "top_k": st.sampled_from([0, 1, 2, 5, 40, 97, 1000]),
        "top_p": st.sampled_from([1e-4, 0.3, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        "seed": st.integers(-(2**63), 2**63 - 1),
    }
)
FOUR_ROWS = st.lists(ANY_FILTERS, min_size=4, max_size=4)

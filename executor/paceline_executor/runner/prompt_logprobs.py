"""Log-probabilities of prompts: cut out of a batch in pieces, so that their logits never fill the memory.

Logits of a whole prompt are num_tokens times vocabulary floats, 1 GiB for a chunk of 2,048 tokens and 131,072 words. So
the tokens of which they are wanted are computed in forward passes of their own, at most `MAX_PIECE_TOKENS` each (32 MiB
of logits there), and then the rest of the batch. Refuses to know models and kernels.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline_executor.runner.interface import Int32Array, PromptTargets, RowProblem, StepLogprobs

MAX_PIECE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` to `stop` of those that a batch row computes; each predicts the target at the same place."""

    row: int
    start: int
    stop: int
    target_token_ids: Int32Array  # [stop - start]
    num_top: int


def pieces_of(targets: PromptTargets | None) -> Sequence[Piece]:
    """They run in this order, before what they leave of the batch."""
    if targets is None:
        return ()
    pieces: list[Piece] = []
    first = 0
    for row, num_tokens, num_top in zip(targets.rows, targets.num_tokens, targets.num_top, strict=True):
        target_ids = targets.token_ids[first : first + num_tokens]
        for start in range(0, int(num_tokens), MAX_PIECE_TOKENS):
            stop = min(start + MAX_PIECE_TOKENS, int(num_tokens))
            pieces.append(Piece(int(row), start, stop, target_ids[start:stop], int(num_top)))
        first += num_tokens
    return pieces


def by_row(
    parts: Iterable[tuple[int, StepLogprobs]],
) -> tuple[dict[int, StepLogprobs], dict[int, RowProblem]]:
    """Parts of a row come in order. A row with a logit that is no number is a problem instead."""
    taken: dict[int, list[StepLogprobs]] = {}
    for row, part in parts:
        taken.setdefault(row, []).append(part)
    whole = {row: _joined(of_row) for row, of_row in taken.items()}
    problems = {row: RowProblem.NOT_FINITE for row, values in whole.items() if not np.isfinite(values.logprobs).all()}
    return {row: values for row, values in whole.items() if row not in problems}, problems


def _joined(parts: Sequence[StepLogprobs]) -> StepLogprobs:
    return StepLogprobs(
        logprobs=np.concatenate([part.logprobs for part in parts]),
        top_token_ids=np.concatenate([part.top_token_ids for part in parts]),
        top_logprobs=np.concatenate([part.top_logprobs for part in parts]),
    )

"""Log-probabilities of prompts: cut out of a batch in pieces, so that their logits never fill the memory.

Logits of a whole prompt are num_tokens times vocabulary floats, 1 GiB for a chunk of 2,048 tokens and 131,072 words. So
the tokens of which they are wanted are computed in forward passes of their own, at most `MAX_PIECE_TOKENS` each (32 MiB
of logits there), and then the rest of the batch. Refuses to know models and kernels.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline_executor.runner.interface import NOTHING_SAMPLED, Int32Array, RowProblem, StepBatch, StepLogprobs

MAX_PIECE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """Each token predicts the target at the same place."""

    row: int  # of the batch it was cut out of
    batch: StepBatch  # one row, nothing sampled
    target_token_ids: Int32Array  # [num_tokens]
    num_top: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Pieces run in this order, the rest runs last."""

    pieces: tuple[Piece, ...]
    rest: StepBatch
    rest_rows: Int32Array  # [num_rows of the rest]: rows of the batch


def cut(batch: StepBatch) -> Cut:
    """Sampled tokens stay in the rest, in the same order."""
    num_rows = batch.context_lens.size
    targets = batch.prompt_targets
    if targets is None:
        return Cut((), batch, np.arange(num_rows, dtype=np.int32))
    pieces: list[Piece] = []
    num_cut = np.zeros(num_rows, dtype=np.int32)
    num_cut[targets.rows] = targets.num_tokens
    first_target = 0
    for row, num_tokens, num_top in zip(targets.rows, targets.num_tokens, targets.num_top, strict=True):
        target_ids = targets.token_ids[first_target : first_target + num_tokens]
        for start in range(0, int(num_tokens), MAX_PIECE_TOKENS):
            stop = min(start + MAX_PIECE_TOKENS, int(num_tokens))
            piece = _part(batch, int(row), start, stop)
            pieces.append(Piece(int(row), piece, target_ids[start:stop], int(num_top)))
        first_target += num_tokens
    return Cut(tuple(pieces), *_rest(batch, num_cut))


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


def _part(batch: StepBatch, row: int, start: int, stop: int) -> StepBatch:
    first = int(batch.cu_seqlens[row])
    tokens = slice(first + start, first + stop)
    return StepBatch(
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens],
        cu_seqlens=np.array([0, stop - start], dtype=np.int32),
        context_lens=batch.positions[first + stop - 1 : first + stop] + 1,
        block_tables=batch.block_tables[row : row + 1],
        sampled=np.zeros(0, dtype=np.int32),
        sampling=NOTHING_SAMPLED,
    )


def _rest(batch: StepBatch, num_cut: Int32Array) -> tuple[StepBatch, Int32Array]:
    """Lacks the first `num_cut` tokens of each row. Also returns which rows have tokens left."""
    lengths = np.diff(batch.cu_seqlens)
    places = np.arange(batch.token_ids.size) - np.repeat(batch.cu_seqlens[:-1], lengths)
    stays = places >= np.repeat(num_cut, lengths)
    rows = np.flatnonzero(lengths > num_cut).astype(np.int32)
    rest = replace(
        batch,
        token_ids=batch.token_ids[stays],
        positions=batch.positions[stays],
        cu_seqlens=np.concatenate(([0], np.cumsum((lengths - num_cut)[rows]))).astype(np.int32),
        context_lens=batch.context_lens[rows],
        block_tables=batch.block_tables[rows],
        sampled=np.searchsorted(rows, batch.sampled).astype(np.int32),
        prompt_targets=None,
    )
    return rest, rows

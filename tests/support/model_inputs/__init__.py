"""What a model's forward pass is given, made of rows as a test has them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline_executor.models.interface import ForwardInputs


@dataclass(frozen=True)
class Row:
    """Computes these tokens, from position `start` on, in these blocks."""

    token_ids: Sequence[int]
    blocks: Sequence[int]
    start: int = 0


def inputs_of(*rows: Row, block_size: int, only_last: bool = False) -> ForwardInputs:
    """Rows with equally many blocks. The logits of all tokens are wanted, or of the last one of each row."""
    positions = [torch.arange(row.start, row.start + len(row.token_ids)) for row in rows]
    tables = torch.tensor([list(row.blocks) for row in rows], dtype=torch.int32)
    places = [
        table[at // block_size].long() * block_size + at % block_size
        for table, at in zip(tables, positions, strict=True)
    ]
    ends = torch.tensor([0, *map(len, positions)], dtype=torch.int32).cumsum(0).int()
    return ForwardInputs(
        token_ids=torch.tensor([token_id for row in rows for token_id in row.token_ids], dtype=torch.int32),
        positions=torch.cat(positions).int(),
        slot_mapping=torch.cat(places),
        cu_seqlens=ends,
        context_lens=torch.tensor([row.start + len(row.token_ids) for row in rows], dtype=torch.int32),
        block_tables=tables,
        logit_tokens=ends[1:] - 1 if only_last else torch.arange(int(ends[-1]), dtype=torch.int32),
    )

"""What the model of a CPU, in float32, makes of a text: logits of every next token.

Knows how a model is driven for a whole text at once, which the executor never does. It refuses to know what they are
for.
"""

from collections.abc import Sequence

import torch

from paceline_executor.models.interface import ForwardInputs
from paceline_executor.models.registry import build_model
from paceline_executor.numerics import FLOAT32_NUMERICS
from paceline_executor.runner.kv_cache import allocate_kv_cache, kv_geometry
from paceline_executor.weights import Checkpoint

_BLOCK_SIZE = 16


class Predictor:
    """A checkpoint with a KV cache for one text of up to `max_tokens`."""

    def __init__(self, checkpoint: Checkpoint, max_tokens: int) -> None:
        geometry = kv_geometry(checkpoint.config, -(-max_tokens // _BLOCK_SIZE), _BLOCK_SIZE, FLOAT32_NUMERICS)
        self._model = build_model(checkpoint, max_tokens, FLOAT32_NUMERICS.matrices)
        self._kv_cache = allocate_kv_cache(geometry, FLOAT32_NUMERICS.kv)

    def logits(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """What the model expects at the places `start` and on of the text, each given all tokens before it.

        start: from 1, below the number of tokens. Returns [len(token_ids) - start, vocab], float32; the next call
        overwrites it.
        """
        return self._model.forward(_inputs(token_ids, start), self._kv_cache)


def _inputs(token_ids: Sequence[int], start: int) -> ForwardInputs:
    """A batch of one row, whose tokens lie in the cache one after another; each tells of the one behind it."""
    num_tokens = len(token_ids)
    positions = torch.arange(num_tokens, dtype=torch.int32)
    return ForwardInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int32),
        positions=positions,
        slot_mapping=positions.to(torch.int64),
        cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables=torch.arange(-(-num_tokens // _BLOCK_SIZE), dtype=torch.int32)[None],
        logit_tokens=positions[start - 1 : -1].contiguous(),
    )

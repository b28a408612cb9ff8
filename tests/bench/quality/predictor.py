"""What a model of the executor makes of a window of text: logits and log-probabilities of every next token.

Knows how a model is driven for a whole window at once, which the executor never does. It refuses to know what they are
for.
"""

from collections.abc import Sequence

import torch

from paceline_executor.models.interface import ForwardInputs, KvCache, LanguageModel
from paceline_executor.models.registry import build_model
from paceline_executor.numerics import MatrixKind, Numerics
from paceline_executor.runner.kv_cache import allocate_kv_cache, kv_geometry
from paceline_executor.weights import Checkpoint

BLOCK_SIZE = 16


class Predictor:
    """One kind of numbers of a checkpoint, with a KV cache for one window."""

    def __init__(self, model: LanguageModel, kv_cache: KvCache) -> None:
        self._model = model
        self._kv_cache = kv_cache

    def logits(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """What the model expects at the places `start` and on of the window, each given all tokens before it.

        start: from 1, below the number of tokens. Returns [len(token_ids) - start, vocab], float32; the next call
        overwrites it.
        """
        return self._model.forward(_inputs(token_ids, start), self._kv_cache)

    def logprobs(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """The same as natural logarithms of probabilities, in memory of their own."""
        return torch.log_softmax(self.logits(token_ids, start), dim=-1)


def predictors(checkpoint: Checkpoint, kinds: Sequence[Numerics], max_window: int) -> list[Predictor]:
    """A predictor for each kind of numbers, for windows up to `max_window` tokens. Equal weights are read once."""
    models: dict[MatrixKind, LanguageModel] = {}
    for numerics in kinds:
        if numerics.matrices not in models:
            models[numerics.matrices] = build_model(checkpoint, max_window, numerics.matrices)
    num_blocks = -(-max_window // BLOCK_SIZE)

    def new_cache(numerics: Numerics) -> KvCache:
        return allocate_kv_cache(kv_geometry(checkpoint.config, num_blocks, BLOCK_SIZE, numerics), numerics.kv)

    return [Predictor(models[numerics.matrices], new_cache(numerics)) for numerics in kinds]


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
        block_tables=torch.arange(-(-num_tokens // BLOCK_SIZE), dtype=torch.int32)[None],
        logit_tokens=positions[start - 1 : -1].contiguous(),
    )

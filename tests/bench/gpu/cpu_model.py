"""The CPU's side of a comparison: float32 logits of whole texts, and what may be drawn from them but for rounding.

Knows models and the definition of a draw. It refuses to know devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.plan.values import RowLogprobs, SamplingParams
from paceline_executor.models.interface import ForwardInputs
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.numerics import FLOAT32_NUMERICS
from paceline_executor.runner.kv_cache import allocate_kv_cache, kv_geometry
from paceline_executor.testing.models import RandomCheckpoint
from paceline_executor.weights.checkpoint import Float32Array, ModelConfig
from paceline_kernels.sampling.reference import gumbel_noise

_BLOCK_SIZE = 16


class RoundedCheckpoint(RandomCheckpoint):
    """Random weights that a device's type can hold, so that both sides compute with the same ones."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(config)
        self._dtype = dtype

    def tensor(self, name: str) -> Float32Array:
        """See `Checkpoint.tensor`."""
        rounded: Float32Array = torch.from_numpy(super().tensor(name)).to(self._dtype).float().numpy()
        return rounded


class CpuModel:
    """A checkpoint in float32."""

    def __init__(self, checkpoint: RandomCheckpoint, max_model_len: int) -> None:
        self._model = LlamaModel(HostWeights(checkpoint), max_model_len)
        num_blocks = -(-max_model_len // _BLOCK_SIZE)
        geometry = kv_geometry(checkpoint.config, num_blocks, _BLOCK_SIZE, FLOAT32_NUMERICS)
        self._cache = allocate_kv_cache(geometry, FLOAT32_NUMERICS.kv)

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Behind every token: [num_tokens, vocab]."""
        num_tokens = len(token_ids)
        places = torch.arange(num_tokens, dtype=torch.int32)
        blocks = torch.arange(-(-num_tokens // _BLOCK_SIZE), dtype=torch.int32)
        inputs = ForwardInputs(
            token_ids=torch.tensor(token_ids, dtype=torch.int32),
            positions=places,
            slot_mapping=places.long(),
            cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32),
            context_lens=torch.tensor([num_tokens], dtype=torch.int32),
            block_tables=blocks[None],
            logit_tokens=places,
        )
        logits: npt.NDArray[np.float32] = self._model.forward(inputs, self._cache).numpy().copy()
        return logits


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a device's tokens compare with what the CPU's logits say at the same places."""

    num_tokens: int
    num_best: int  # that are the CPU's choice, too
    worst: float  # of the others: how far below the best, in steps of the device's type at the size of the logits


def agreement(
    model: CpuModel,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: SamplingParams,
    dtype: torch.dtype,
) -> Agreement:
    """Compare a row's output with the CPU's logits behind the same tokens, greedy or at a temperature without filters.

    A distance is in multiples of the spacing of `dtype` at the row's largest logit: a device whose two best logits are
    each rounded to the next number of that type may be 1 off.
    """
    logits = model.logits([*prompt, *output])[len(prompt) - 1 : -1]
    worst, num_best = 0.0, 0
    for offset, (row, token) in enumerate(zip(logits, output, strict=True)):
        size = float(np.abs(row).max())
        scores = row
        if sampling.temperature > 0:
            temperature = np.float32(sampling.temperature)
            scores = (row / temperature + gumbel_noise(row.size, sampling.seed, offset)) * temperature
        spacing = torch.finfo(dtype).eps * 2.0 ** np.floor(np.log2(size))
        num_best += int(scores.argmax()) == token
        worst = max(worst, float(scores.max() - scores[token]) / spacing)
    return Agreement(len(output), num_best, worst)


def errors_of(
    model: CpuModel, prompt: Sequence[int], output: Sequence[int], told: Sequence[RowLogprobs], dtype: torch.dtype
) -> npt.NDArray[np.float64]:
    """How far a device's log-probabilities of its likeliest tokens are from the CPU's, in the same multiples.

    told: of the output's tokens, in order.
    """
    tokens, found = (
        np.concatenate([getattr(one.columns, name) for one in told]) for name in ("top_token_ids", "top_logprobs")
    )
    logits = model.logits([*prompt, *output])[len(prompt) - 1 : -1]
    spacings = torch.finfo(dtype).eps * 2.0 ** np.floor(np.log2(np.abs(logits).max(axis=1, keepdims=True)))
    expected = torch.from_numpy(logits).log_softmax(1).numpy()
    errors: npt.NDArray[np.float64] = ((found - np.take_along_axis(expected, tokens, 1)) / spacings).astype(np.float64)
    return errors


def joined(parts: Sequence[Agreement]) -> Agreement:
    """Of several rows."""
    return Agreement(
        sum(one.num_tokens for one in parts), sum(one.num_best for one in parts), max(one.worst for one in parts)
    )

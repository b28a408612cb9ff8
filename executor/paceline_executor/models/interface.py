"""What a runner asks of a model: logits for one flat batch, over a paged KV cache.

Apart from the models, so that a runner knows none of them. Knows tensors; refuses to know requests and sampling.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from paceline_kernels.attention import Splits
from paceline_kernels.decoder import AuxHidden, DecoderBatch


@dataclass(frozen=True, slots=True)
class ForwardInputs(DecoderBatch):
    """One varlen batch, and what the host knows of it that a GPU's launches depend on; the CPU looks at none of that.

    A captured graph serves all batches of its sizes, so it is captured with the most that any of them has.
    """

    splits: Splits = Splits.EVEN  # FIXED: a token's bits do not depend on its batch mates on a GPU either
    short_tokens: int = 1  # rows of up to so many tokens are divided among the GPU as `splits` says; 1 + drafts
    max_query_len: int | None = None  # no row has more tokens; None if the host does not know


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of all layers: [num_layers, num_blocks, num_kv_heads, block_size, slot] each.

    On a CPU, float32 and float16: slot is head_dim. int8: head_dim + 4, because every slot has a scale, a float32; how
    the bytes of a block lie is `paceline_kernels.attention.int8`'s.

    On a GPU slot is head_dim. What stored numbers are multiplied with is beside them: a number per head of
    float8_e4m3fn, [num_layers, num_kv_heads] float32, or per slot and head of int8, [num_layers, num_blocks,
    num_kv_heads, block_size] float32; none of the type that is computed with.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    def layer(self, index: int) -> "KvCache":
        """That of one layer, its tensors without their first dimension."""
        if self.key_scales is None or self.value_scales is None:
            return KvCache(self.keys[index], self.values[index])
        return KvCache(self.keys[index], self.values[index], self.key_scales[index], self.value_scales[index])


class Model(Protocol):
    """A decoder-only transformer with its weights on one device."""

    def forward(self, inputs: ForwardInputs, kv_cache: KvCache, aux: AuxHidden | None = None) -> torch.Tensor:
        """Write the batch's keys and values to their slots; returns the logits [num_logits, vocab].

        aux: hidden states that a drafter wants are written there.

        They are valid until the next call, and of the type that the device computes with: `sample` widens those of 16
        bits as it reads them. Padding has no logits: NaN, where the batch asks for those of the token -1.
        Raises KernelArgumentError for a batch that names tokens, positions or blocks that do not exist; of a GPU, for
        shapes and types alone.
        """
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The embeddings of tokens, [count] int32, as they are stored: [count, hidden] float32, new."""
        ...


class DeviceModel(Protocol):
    """A model whose steps are captured in two parts: its forward pass, and the draws."""

    def hidden(self, inputs: ForwardInputs, kv_cache: KvCache) -> torch.Tensor:
        """Write the batch's keys and values to their slots; returns [num_logits, hidden], normalised, for `logits`.

        A place of -1 among logit_tokens is padding, and NaN.
        """
        ...

    def logits(self, hidden: torch.Tensor, splits: Splits) -> torch.Tensor:
        """hidden: as `hidden` returns it. Returns [num_logits, vocab]."""
        ...

"""What a runner asks of a model: logits for one flat batch, over a paged KV cache.

Apart from the models, so that a runner knows none of them. Refuses to know requests and sampling.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from paceline_kernels.attention import Splits
from paceline_kernels.decoder import AuxHidden, DecoderBatch, PhaseTime
from paceline_kernels.sampling import VocabularySlice


@dataclass(frozen=True, slots=True)
class ForwardInputs(DecoderBatch):
    """A GPU's launches depend on what is added here; the CPU looks at none of it.

    A captured graph serves all batches of its sizes, so it is captured with the most that any of them has.
    """

    splits: Splits = Splits.EVEN  # FIXED: a token's bits do not depend on its batch mates on a GPU either
    short_tokens: int = 1  # rows of up to so many tokens are short: see `paged_attention`; 1 + drafts
    max_query_len: int | None = None  # None if the host does not know


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of all layers: [num_layers, num_blocks, num_kv_heads, block_size, slot] each.

    On a CPU, float32 and float16: slot is head_dim. int8: head_dim + 4, because every slot has a scale, a float32;
    `paceline_kernels.attention.int8` lays out the bytes of a block.

    On a GPU slot is head_dim. The scales are beside: per head of float8_e4m3fn, [num_layers, num_kv_heads] float32, or
    per slot and head of int8, [num_layers, num_blocks, num_kv_heads, block_size] float32; none of the type that is
    computed with.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def of_blocks(self) -> tuple[torch.Tensor, ...]:
        """Those whose second dimension is blocks: a scale per head of a layer belongs to none."""
        scales = (self.key_scales, self.value_scales)
        return (self.keys, self.values, *(one for one in scales if one is not None and one.ndim > 2))

    def layer(self, index: int) -> "KvCache":
        """Its tensors lack their first dimension."""
        if self.key_scales is None or self.value_scales is None:
            return KvCache(self.keys[index], self.values[index])
        return KvCache(self.keys[index], self.values[index], self.key_scales[index], self.value_scales[index])


class LanguageModel(Protocol):
    @property
    def vocabulary(self) -> VocabularySlice | None:
        """What the logits of one of several ranks are of; None for all tokens."""
        ...

    def forward(
        self,
        inputs: ForwardInputs,
        kv_cache: KvCache,
        *,
        aux: AuxHidden | None = None,
        times: list[PhaseTime] | None = None,
    ) -> torch.Tensor:
        """Write the batch's keys and values to their slots; returns the logits [num_logits, vocab] of `vocabulary`.

        They are valid until the next call, and of the type that the device computes with. Where the batch asks for
        those of the token -1 they are NaN. aux: hidden states that a drafter wants are written there. times: gets the
        phases whose times are known. Raises KernelArgumentError for a batch that names tokens, positions or blocks that
        do not exist; of a GPU, for shapes and types alone.
        """
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The embeddings of tokens, [count] int32, as they are stored: [count, hidden] float32, new."""
        ...


class DeviceModel(Protocol):
    """Its steps are captured in two parts: its forward pass, and the draws."""

    @property
    def vocabulary(self) -> VocabularySlice | None:
        """As of a LanguageModel."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Of all matrices that a step multiplies with."""
        ...

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How many positions a token sees in each layer; None for all."""
        ...

    def hidden(self, inputs: ForwardInputs, kv_cache: KvCache, aux: AuxHidden | None = None) -> torch.Tensor:
        """Write the batch's keys and values to their slots; returns [num_logits, hidden], normalised, for `logits`.

        aux: of the type that is computed with. A place of -1 among logit_tokens is padding, and NaN.
        """
        ...

    def logits(self, hidden: torch.Tensor, splits: Splits) -> torch.Tensor:
        """Takes what `hidden` returns. Returns [num_logits, vocab] of `vocabulary`."""
        ...

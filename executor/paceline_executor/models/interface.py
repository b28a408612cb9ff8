"""What a runner asks of a model: logits for one flat batch, over a paged KV cache.

Apart from the models, so that a runner knows none of them. Knows tensors; refuses to know requests and sampling.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from paceline_kernels.decoder import DecoderBatch


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of all layers: [num_layers, num_blocks, num_kv_heads, block_size, slot] each.

    float32 and float16: slot is head_dim. int8: head_dim + 4, because every slot has a scale, a float32; how the bytes
    of a block lie is `paceline_kernels.attention.int8`'s.
    """

    keys: torch.Tensor
    values: torch.Tensor


class Model(Protocol):
    """A decoder-only transformer with its weights on one device."""

    def forward(self, inputs: DecoderBatch, kv_cache: KvCache) -> torch.Tensor:
        """Write the batch's keys and values to their slots; returns the logits [num_logits, vocab] float32.

        They are valid until the next call.
        Raises KernelArgumentError for a batch that names tokens, positions or blocks that do not exist.
        """
        ...

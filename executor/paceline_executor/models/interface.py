"""What a runner asks of a model: logits for one flat batch, over a paged KV cache.

Knows tensors. It refuses to know requests and sampling.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of all layers: [num_layers, num_blocks, num_kv_heads, block_size, slot] each.

    float32 and float16: slot is head_dim. int8: head_dim + 4, because every slot has a scale, a float32; how the bytes
    of a block lie is `paceline_kernels.attention.int8`'s.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """One varlen batch on the model's device, batch row after batch row; see `runner.interface.StepBatch`."""

    token_ids: torch.Tensor  # [num_tokens] int32
    positions: torch.Tensor  # [num_tokens] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64: block * block_size + slot of each token, no two alike
    cu_seqlens: torch.Tensor  # [num_rows + 1] int32
    context_lens: torch.Tensor  # [num_rows] int32
    block_tables: torch.Tensor  # [num_rows, max_blocks_per_row] int32
    logit_tokens: torch.Tensor  # [num_logits] int32: the tokens, as places in the batch, whose logits are wanted


class Model(Protocol):
    """A decoder-only transformer with its weights on one device."""

    def forward(self, inputs: ForwardInputs, kv_cache: KvCache) -> torch.Tensor:
        """Write the batch's keys and values to their slots; returns the logits [num_logits, vocab] float32.

        They are valid until the next call.
        Raises KernelArgumentError for a batch that names tokens, positions or blocks that do not exist.
        """
        ...

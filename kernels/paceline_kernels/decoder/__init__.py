"""decoder: a whole step of a decoder-only transformer with packed weights, from token ids to logits, in one call.

Knows layers of grouped-query attention and gated feed-forward networks, of which tokens choose some where there is a
mixture; not requests, nor how weights were read.
Made of the same arithmetic as the operations around it, fused where a call, a pass over memory or a wait is saved.
"""

import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.arguments import check_tensor
from paceline_kernels.decoder.times import PhaseTime
from paceline_kernels.decoder.weights import (
    AuxHidden,
    DecoderBatch,
    DecoderLayer,
    DecoderWeights,
    Experts,
    HeadNormWeights,
    InputOrders,
    PostNorms,
)
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError

__all__ = [
    "AuxHidden",
    "Decoder",
    "DecoderBatch",
    "DecoderLayer",
    "DecoderWeights",
    "Experts",
    "HeadNormWeights",
    "InputOrders",
    "PhaseTime",
    "PostNorms",
]

# Behind the values of an int8 slot stands their scale, a float32.
INT8_SCALE_BYTES = 4


class Decoder:
    """Weights on one device, ready to compute steps. One thread at a time."""

    def __init__(self, weights: DecoderWeights) -> None:
        device = weights.embedding.data.device
        if device.type != "cpu":
            raise UnsupportedDeviceError("decoder", device)
        from paceline_kernels.decoder import cpu

        self._weights = weights
        self._decoder = cpu.CpuDecoder(weights)

    def forward(
        self,
        batch: DecoderBatch,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        aux: AuxHidden | None = None,
        times: list[PhaseTime] | None = None,
    ) -> torch.Tensor:
        """Write the batch's keys and values to their slots; returns the logits [num_logits, vocab] float32.

        The next call may overwrite them. times: its phases are put behind what it has.

        keys, values: [num_layers, num_blocks, num_kv_heads, block_size, slot] of one type: float16 with slot =
        head_dim, or int8 with slot = head_dim + 4 for blocks of 16, 32, … 256 slots and heads of at most 512; how the
        bytes of a block lie is said by `paceline_kernels.attention.int8`.
        Keys and values are rounded, to even, when they are written: to float16, or to multiples of the largest
        magnitude of the slot / 127. Over int8, queries and the weights of values are rounded to 16 bits as well.
        aux: what flows between layers is written there, of every token.
        Batch-invariant: the logits of a token depend, bit for bit, on the token ids up to it alone, as long as those
        before it were computed by the same weights into the same type of cache. So do its hidden states.
        Raises KernelArgumentError for shapes, types and indices that do not fit.
        """
        op, num_tokens, num_rows = "decoder", batch.token_ids.shape[0], batch.context_lens.shape[0]
        check_tensor(op, "token_ids", batch.token_ids, torch.int32, (None,))
        check_tensor(op, "positions", batch.positions, torch.int32, (num_tokens,))
        check_tensor(op, "slot_mapping", batch.slot_mapping, torch.int64, (num_tokens,))
        check_tensor(op, "cu_seqlens", batch.cu_seqlens, torch.int32, (num_rows + 1,))
        check_tensor(op, "context_lens", batch.context_lens, torch.int32, (num_rows,))
        check_tensor(op, "block_tables", batch.block_tables, torch.int32, (num_rows, None))
        check_tensor(op, "logit_tokens", batch.logit_tokens, torch.int32, (None,))
        if keys.dtype not in (torch.float16, torch.int8):
            raise KernelArgumentError(op, f"keys must be float16 or int8, not {keys.dtype}")
        from paceline_kernels.attention import int8

        weights = self._weights
        slot = weights.head_dim + (INT8_SCALE_BYTES if keys.dtype == torch.int8 else 0)
        shape = (len(weights.layers), None, weights.num_kv_heads, None, slot)
        check_tensor(op, "keys", keys, keys.dtype, shape)
        check_tensor(op, "values", values, keys.dtype, tuple(keys.shape))
        if keys.dtype == torch.int8 and not int8.is_supported(keys.shape[3], weights.head_dim):
            raise KernelArgumentError(
                op, f"int8 blocks of {keys.shape[3]} slots of {weights.head_dim} are not supported"
            )
        if aux is not None:
            _check_aux(aux, num_tokens, weights)
        return self._decoder.forward(batch, keys, values, aux, times)

    def tokens_of_experts(self, layer: int, num_tokens: int) -> npt.NDArray[np.int64]:
        """[num_experts]: how many tokens of the last step, of `num_tokens` in all, each expert of a layer got, new.

        Those of the last layer are the tokens whose logits were wanted. The layer has experts.
        """
        return self._decoder.tokens_of_experts(layer, num_tokens)


def _check_aux(aux: AuxHidden, num_tokens: int, weights: DecoderWeights) -> None:
    hidden, num_layers = weights.embedding.num_inputs, len(weights.layers)
    check_tensor("decoder", "aux.states", aux.states, torch.float32, (num_tokens, len(aux.layers), hidden))
    if len(set(aux.layers)) < len(aux.layers) or not all(1 <= layer < num_layers for layer in aux.layers):
        raise KernelArgumentError("decoder", f"aux.layers must be 1 to {num_layers - 1}, each once")

"""When the phases of a step ended, in words: which of them, of which layer, and what it cannot do without reading.

Knows the order of phases as `cpu` has it. It refuses to know who asked.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.decoder.weights import DecoderBatch, DecoderLayer, DecoderWeights


class PhaseTime(NamedTuple):
    """A phase of a step, on the monotonic clock. num_bytes: of weights, or of keys and values, each once."""

    phase: str
    layer: int
    start_ns: int
    end_ns: int
    num_bytes: int


def phase_times(
    times: npt.NDArray[np.int64],
    weights: DecoderWeights,
    batch: DecoderBatch,
    keys: torch.Tensor,
    num_read: npt.NDArray[np.int64] | None,
) -> Iterator[PhaseTime]:
    """times: [phases + 1, 2] seconds and nanoseconds, when the first began and each ended. num_read: [num_layers] how
    many experts were read, of a mixture.
    """
    ends_ns = (times[:, 0] * 1_000_000_000 + times[:, 1]).tolist()
    phases = [
        ("embed", 0, 0),
        *(
            (name, index, count)
            for index, layer in enumerate(weights.layers)
            for name, count in _of(layer, batch, keys, 0 if num_read is None else int(num_read[index]))
        ),
        ("logits", len(weights.layers) - 1, weights.lm_head.num_bytes),
    ]
    start_ns = ends_ns[0]
    for end_ns, (name, layer_index, num_bytes) in zip(ends_ns[1:], phases, strict=True):
        if (name != "reorder" or weights.has_orders) and (name != "route" or num_read is not None):
            yield PhaseTime(name, layer_index, start_ns, end_ns, num_bytes)
            start_ns = end_ns


def _of(layer: DecoderLayer, batch: DecoderBatch, keys: torch.Tensor, num_read: int) -> tuple[tuple[str, int], ...]:
    """keys: of all layers, as the decoder takes them."""
    gate_up, down = (0 if matrix is None else matrix.num_bytes for matrix in (layer.gate_up, layer.down))
    experts, router = layer.experts, 0
    if experts is not None:
        gate_up += experts.gate_up.num_bytes * num_read // experts.routing.num_experts
        down += experts.down.num_bytes * num_read // experts.routing.num_experts
        router = experts.router.nbytes
    return (
        ("qkv", layer.qkv.num_bytes),
        ("attention", _context_bytes(layer, batch, keys)),
        ("reorder", 0),
        ("attention_output", layer.attention_output.num_bytes),
        ("norm", 0),
        ("route", router),
        ("gate_up", gate_up),
        ("down", down),
        ("norm", 0),
    )


def _context_bytes(layer: DecoderLayer, batch: DecoderBatch, keys: torch.Tensor) -> int:
    """Keys and values of all positions that any token of a row sees."""
    lens, num_tokens = batch.context_lens.numpy(), np.diff(batch.cu_seqlens.numpy())
    seen = lens if layer.window is None else np.minimum(lens, num_tokens + layer.window - 1)
    slot_bytes = keys.shape[2] * keys.shape[4] * keys.element_size()
    return 2 * slot_bytes * int(seen.sum())

"""From a checkpoint's rotary embedding to tables of angles: all ways to scale frequencies beyond the trained context.

Knows the formulas, in float32 as Hugging Face has them. Refuses to know files, and how heads are rotated.

A table serves contexts of up to `max_model_len` tokens and stays as it is whatever the length of a request: the keys of
a shared prefix must fit every request. So dynamic scaling raises theta as for that length, and leaves a model as
trained where it is within the trained context; LongRoPE takes the short factors there, and else the long ones.
"""

import math

import numpy as np
import numpy.typing as npt
import torch

from paceline_executor.weights.checkpoint import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    ModelConfig,
    Rope,
    RopeScaling,
    YarnScaling,
)
from paceline_kernels.rope import rope_frequencies, rope_table


def rope_tables(config: ModelConfig, max_model_len: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return tables [num_tables, max_model_len, head_dim] float32, and for every layer which of them it uses."""
    ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
    tables = [_table(rope, config.head_dim, max_model_len).numpy() for rope in ropes]
    used = tuple(int(len(ropes) > 1 and config.is_sliding(layer)) for layer in range(config.num_layers))
    return torch.from_numpy(np.stack(tables)), used


def rotation_bytes(config: ModelConfig, max_model_len: int) -> int:
    return (1 if config.local_rope is None else 2) * max_model_len * config.head_dim * 4


def _table(rope: Rope, head_dim: int, max_model_len: int) -> torch.Tensor:
    frequencies = scaled_frequencies(rope, rope.rotary_dim or head_dim, max_model_len)
    unmoved = head_dim // 2 - len(frequencies)
    frequencies = torch.nn.functional.pad(frequencies, (0, unmoved))
    return rope_table(max_model_len, frequencies, _attention_factor(rope.scaling))


def head_order(config: ModelConfig) -> npt.NDArray[np.intp] | None:
    """Which dimension of a query's or key's head goes where, so that those that are rotated together lie half a head
    apart, and after these the ones that stay: [head_dim]. None where a checkpoint has them so.
    """
    rotary_dim, head_dim = config.rope.rotary_dim, config.head_dim
    if rotary_dim is None:
        return None
    parts = np.arange(rotary_dim).reshape(2, -1), np.arange(rotary_dim, head_dim).reshape(2, -1)
    order: npt.NDArray[np.intp] = np.concatenate(parts, axis=1).reshape(-1)
    return order


def scaled_frequencies(rope: Rope, head_dim: int, max_model_len: int) -> torch.Tensor:
    """Angle per position of every pair of dimensions: [head_dim / 2] float32."""
    match rope.scaling:
        case LinearScaling(factor):
            return rope_frequencies(head_dim, rope.theta) / factor
        case DynamicScaling():
            return rope_frequencies(head_dim, _dynamic_theta(rope.theta, rope.scaling, head_dim, max_model_len))
        case YarnScaling():
            return _yarn_frequencies(rope.theta, rope.scaling, head_dim)
        case Llama3Scaling():
            return _llama3_frequencies(rope_frequencies(head_dim, rope.theta), rope.scaling)
        case LongropeScaling(short_factors, long_factors, original_max_len):
            factors = torch.tensor(long_factors if max_model_len > original_max_len else short_factors)
            return rope_frequencies(head_dim, rope.theta) / factors
        case None:
            return rope_frequencies(head_dim, rope.theta)


def _attention_factor(scaling: RopeScaling | None) -> float:
    return scaling.attention_factor if isinstance(scaling, YarnScaling | LongropeScaling) else 1.0


def _dynamic_theta(theta: float, scaling: DynamicScaling, head_dim: int, max_model_len: int) -> float:
    """Spreads the trained rotations of the slowest pair over max_model_len positions ("NTK-aware")."""
    ratio = max(max_model_len, scaling.original_max_len) / scaling.original_max_len
    stretch = scaling.factor * ratio - (scaling.factor - 1)
    return float(theta * stretch ** (head_dim / (head_dim - 2)))


def _yarn_frequencies(theta: float, scaling: YarnScaling, head_dim: int) -> torch.Tensor:
    kept = rope_frequencies(head_dim, theta)

    def pair_with(rotations: float) -> float:
        """The pair, as a fraction, that rotates so often in the trained context."""
        return head_dim * math.log(scaling.original_max_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    divided_share = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return kept / scaling.factor * divided_share + kept * (1 - divided_share)


def _llama3_frequencies(kept: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    rotations = scaling.original_max_len * kept / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - kept_share) * kept / scaling.factor + kept_share * kept

"""A mixture of experts as the metadata of a GGUF file states it.

Knows GGUF's keys, and what llama.cpp knows of an architecture without the file. Refuses to know how tensors are stored.
"""

from dataclasses import dataclass

import numpy as np

from paceline_executor.weights.checkpoint import MAX_EXPERTS_IN_ALL, Mixture
from paceline_executor.weights.gguf.header import GgufHeader
from paceline_executor.weights.refusals import shown, unsupported, wrong
from paceline_kernels.routing import Routing, Score

_MAX_SIZE = 1 << 24
_KINDS = ("expert", "moe", "swiglu")  # of keys that change what is computed
_READ = {
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "expert_weights_norm",
    "expert_weights_scale",
    "expert_gating_func",
    "expert_group_count",
    "expert_group_used_count",
}
_GATING_FUNCTIONS = {Score.SOFTMAX: 1, Score.SIGMOID: 2}


@dataclass(frozen=True, slots=True)
class MixtureKeys:
    """Sigmoid scores come with a bias, and shared experts without a gate."""

    renormalises: bool  # where a file does not say
    score: Score = Score.SOFTMAX
    has_shared_gate: bool = False


def read_mixture(header: GgufHeader, name: str, family: MixtureKeys, num_layers: int) -> Mixture | None:
    """name: of the architecture. Returns None for one without experts, as many a Llama is.

    Raises ModelCorruptError naming the key, or UnsupportedModelError naming the feature.
    """

    def number(suffix: str, least: int, most: int, default: int | None = None) -> int:
        value = header.integer(f"{name}.{suffix}", default)
        if not least <= value <= most:
            raise wrong(header.path, f"{name}.{suffix} is {value}, outside {least} to {most}")
        return value

    if header.integer(f"{name}.expert_count", 0) == 0:
        return None
    num_experts = number("expert_count", 2, MAX_EXPERTS_IN_ALL // num_layers)
    _check_keys(header, name, family)
    size = number("expert_feed_forward_length", 1, _MAX_SIZE, header.integer(f"{name}.feed_forward_length"))
    # The format writes 0 for one group.
    num_groups = number("expert_group_count", 0, num_experts // 2, 1) or 1
    routing = Routing(
        num_experts=num_experts,
        top_k=number("expert_used_count", 1, num_experts),
        score=family.score,
        renormalises=header.flag(f"{name}.expert_weights_norm", family.renormalises),
        scaling=_scaling(header, f"{name}.expert_weights_scale"),
        has_bias=family.score is Score.SIGMOID,
        num_groups=num_groups,
        top_groups=number("expert_group_used_count", 0, num_groups, 1) or 1,
    )
    if num_experts % num_groups or routing.top_groups * num_experts // num_groups < routing.top_k:
        groups = f"{routing.top_groups} of {num_groups} groups of {num_experts} experts"
        raise wrong(header.path, f"{name}.expert_group_used_count: {groups} do not have {routing.top_k} of equal size")
    shared_size = size * number("expert_shared_count", 0, num_experts if family.score is Score.SIGMOID else 0, 0)
    if family.has_shared_gate:
        default = header.integer(f"{name}.feed_forward_length")
        shared_size = number("expert_shared_feed_forward_length", 1, _MAX_SIZE, default)
    sparse_layers = tuple(f"blk.{layer}.ffn_gate_inp.weight" in header.tensors for layer in range(num_layers))
    num_dense = header.integer(
        f"{name}.leading_dense_block_count", sparse_layers.index(True) if any(sparse_layers) else 0
    )
    if sparse_layers[:num_dense].count(True) or not all(sparse_layers[num_dense : num_dense + 1]):
        raise wrong(header.path, f"{name}.leading_dense_block_count is {num_dense}, and its tensors say otherwise")
    return Mixture(routing, size, sparse_layers, shared_size, family.has_shared_gate)


def _check_keys(header: GgufHeader, name: str, family: MixtureKeys) -> None:
    """Refuses what is not computed, instead of leaving it out."""
    for key, stored in header.metadata.items():
        suffix, value = key.removeprefix(f"{name}."), stored.tolist() if isinstance(stored, np.ndarray) else stored
        is_known = suffix in _READ or not any(kind in suffix for kind in _KINDS) or value in (0, False)
        if suffix == "expert_gating_func":
            is_known = value in (0, _GATING_FUNCTIONS[family.score])
        if suffix != key and not is_known:
            raise unsupported(header.path, f"it sets {key} to {shown(str(value))}, which is not computed")


def _scaling(header: GgufHeader, key: str) -> float:
    """The format writes 0 for none."""
    scaling = header.number(key, 1.0) or 1.0
    if scaling < 0:
        raise wrong(header.path, f"{key} is {scaling}, which should be above 0")
    return scaling

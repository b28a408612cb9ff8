"""A mixture of experts as a Hugging Face config.json states it.

Knows what its fields mean. Refuses to know the rest of the configuration, and tensors.
"""

import re
from dataclasses import dataclass, replace

from paceline_executor.weights.checkpoint import MAX_EXPERTS_IN_ALL, Mixture
from paceline_executor.weights.hf.json_fields import JsonFields
from paceline_executor.weights.refusals import shown, unsupported
from paceline_kernels.routing import Routing, Score

_MAX_SIZE, _MAX_LAYERS = 1 << 24, 1 << 12
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Fields that may change what is computed: how experts are chosen, or how far their gates reach.
_GATING = re.compile("clamp|clip|gating|limit|n_group|routed|router|scor|swiglu|topk")
_OF_TRAINING = {"output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "router_z_loss_coef"}
_READ = _OF_TRAINING | {"n_routed_experts", "norm_topk_prob"}
_READ_WITH_GROUPS = _READ | {"n_group", "topk_group", "routed_scaling_factor"}
_METHODS = {"topk_method": "noaux_tc"}  # what a file may state of sigmoid scores beside


@dataclass(frozen=True, slots=True)
class MixtureFields:
    """How transformers reads those of one family. Sigmoid scores come with a bias, groups, and dense layers first."""

    num_experts: int  # where a file does not say
    size_field: str = "moe_intermediate_size"
    score: Score = Score.SOFTMAX
    renormalises: bool | None = None  # None: `norm_topk_prob` says so
    has_shared_gate: bool = False


def read_mixture(config: JsonFields, family: MixtureFields, num_layers: int) -> Mixture:
    """Raises ModelCorruptError naming the field, or UnsupportedModelError naming the feature."""
    _check_gating(config, family.score)
    stated = next((name for name in _COUNTS if config.get(name) is not None), _COUNTS[0])
    most = MAX_EXPERTS_IN_ALL // num_layers
    num_experts = config.positive_integer(stated, most, family.num_experts)
    if num_experts == 1:
        raise config.fault(stated, "1, and a mixture has several experts")
    for name in _COUNTS:
        if config.positive_integer(name, most, num_experts) != num_experts:
            raise config.fault(name, f"{config.get(name)}, and {stated} is {num_experts}")
    norms = bool(config.flag("norm_topk_prob")) if family.renormalises is None else family.renormalises
    routing = Routing(num_experts, config.positive_integer("num_experts_per_tok", num_experts), family.score, norms)
    size, sparse_layers = config.positive_integer(family.size_field, _MAX_SIZE), _sparse_layers(config, num_layers)
    if family.score is Score.SIGMOID:
        routing = _in_groups(config, routing)
        num_dense = config.whole_number("first_k_dense_replace", _MAX_LAYERS, 1)
        sparse_layers = tuple(layer >= num_dense for layer in range(num_layers))
        return Mixture(routing, size, sparse_layers, size * config.whole_number("n_shared_experts", most, 1))
    if family.has_shared_gate:
        shared_size = config.positive_integer("shared_expert_intermediate_size", _MAX_SIZE)
        return Mixture(routing, size, sparse_layers, shared_size, has_shared_gate=True)
    return Mixture(routing, size, sparse_layers)


def _check_gating(config: JsonFields, score: Score) -> None:
    """Refuses what is not computed, such as clamped gates, instead of leaving it out."""
    has_groups = score is Score.SIGMOID
    read, allowed = (_READ_WITH_GROUPS, _METHODS) if has_groups else (_READ, {})
    for name, value in config.stated():
        is_known = name in read or value in (False, {"scoring_func": score.value, **allowed}.get(name))
        if _GATING.search(name) and not is_known:
            raise unsupported(config.path, f"it sets {config.name(name)} to {shown(str(value))}, which is not computed")


def _in_groups(config: JsonFields, routing: Routing) -> Routing:
    num_experts = routing.num_experts
    num_groups = config.positive_integer("n_group", num_experts, 1)
    top_groups = config.positive_integer("topk_group", num_groups, 1)
    size, rest = divmod(num_experts, num_groups)
    if rest or size < 2:
        raise config.fault("n_group", f"{num_groups}, and groups of {num_experts} experts are of one size, 2 or more")
    if top_groups * size < routing.top_k:
        raise config.fault("topk_group", f"{top_groups}: so many groups of {size} have no {routing.top_k} experts")
    return replace(
        routing,
        scaling=config.positive_number("routed_scaling_factor", 1.0),
        has_bias=True,
        num_groups=num_groups,
        top_groups=top_groups,
    )


def _sparse_layers(config: JsonFields, num_layers: int) -> tuple[bool, ...]:
    """Of Qwen's fields; the other families' files have none of them."""
    step, dense = config.positive_integer("decoder_sparse_step", _MAX_LAYERS, 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise config.fault("mlp_only_layers", "not a list of layers")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))

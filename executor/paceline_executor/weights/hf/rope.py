"""Rotary position embedding as a Hugging Face config.json states it.

Knows `rope_parameters`, which holds all, and the older `rope_theta` beside `rope_scaling`, and transformers' defaults.
Refuses to know families of models, and how rotations are computed.
"""

import math
from dataclasses import replace

from paceline_executor.weights.checkpoint import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)
from paceline_executor.weights.hf.json_fields import JsonFields
from paceline_executor.weights.refusals import shown, unsupported

MAX_CONTEXT_LENGTH = 1 << 24
_ORIGINAL, _PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"


def read_rope(
    config: JsonFields, head_dim: int, max_len: int, default_theta: float, *, may_be_partial: bool = False
) -> Rope:
    """Reads that of all layers. max_len: max_position_embeddings, in tokens. may_be_partial: of a head.

    Raises ModelCorruptError or UnsupportedModelError, naming the field.
    """
    if not may_be_partial:
        _check_whole(config)
    objects = (config.object(name) for name in ("rope_scaling", "rope_parameters") if config.get(name) != {})
    fields = next((each for each in objects if each is not None), config.empty())
    theta = config.positive_number("rope_theta", default_theta)
    if not may_be_partial:
        return read_rope_object(config, fields, head_dim, max_len, theta)
    rotary_dim = _rotary_dim(config, fields, head_dim)
    rope = read_rope_object(config, fields.without({_PARTIAL}), head_dim, max_len, theta)
    if rope.scaling is not None and rotary_dim is not None:
        raise unsupported(config.path, f"it scales rotations of a part of each head ({fields.name('rope_type')})")
    return replace(rope, rotary_dim=rotary_dim)


def read_rope_object(config: JsonFields, fields: JsonFields, head_dim: int, max_len: int, default_theta: float) -> Rope:
    _check_whole(fields)
    theta = fields.positive_number("rope_theta", default_theta)
    if theta <= 1:
        raise fields.fault("rope_theta", f"{theta}, which should be above 1")
    return Rope(theta, _read_scaling(config, fields, head_dim, max_len))


def scaled_length(scaling: RopeScaling | None, max_len: int) -> int:
    """In tokens; `max_len` is what the model's file calls so.

    As vLLM has it: files with linear, dynamic and yarn scaling state the context before it, the others that after it.
    """
    match scaling:
        case LinearScaling(factor=factor) | DynamicScaling(factor=factor):
            length = int(max_len * factor)
        case YarnScaling(factor=factor, original_max_len=original):
            length = int(original * factor)
        case _:
            length = max_len
    return min(length, MAX_CONTEXT_LENGTH)


def _rotary_dim(config: JsonFields, fields: JsonFields, head_dim: int) -> int | None:
    share = fields.positive_number(_PARTIAL, config.positive_number(_PARTIAL, 1.0))
    rotary_dim = int(head_dim * share)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise config.fault(_PARTIAL, f"{share}, of heads of {head_dim} dimensions no even number")
    return rotary_dim if rotary_dim < head_dim else None


def _check_whole(fields: JsonFields) -> None:
    if fields.positive_number(_PARTIAL, 1.0) != 1:
        name = fields.name(_PARTIAL)
        raise unsupported(fields.path, f"it rotates a part of each head only ({name} is not 1)")


def _read_scaling(config: JsonFields, fields: JsonFields, head_dim: int, max_len: int) -> RopeScaling | None:
    kind = fields.text("rope_type") or fields.text("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(fields.positive_number("factor"))
    if kind == "dynamic":
        return DynamicScaling(fields.positive_number("factor"), max_len)
    original = fields.positive_integer(_ORIGINAL, MAX_CONTEXT_LENGTH, max_len)
    original = config.positive_integer(_ORIGINAL, MAX_CONTEXT_LENGTH, original)
    if kind == "llama3":
        return _llama3(fields, original)
    if kind == "yarn":
        return _yarn(fields, original, max_len)
    if kind in ("longrope", "su"):
        return _longrope(fields, head_dim, original, max_len)
    raise unsupported(fields.path, f"{fields.name('rope_type')} {shown(kind)} is not known")


def _llama3(fields: JsonFields, original: int) -> Llama3Scaling:
    low, high = fields.positive_number("low_freq_factor"), fields.positive_number("high_freq_factor")
    if high <= low:
        raise fields.fault("high_freq_factor", f"{high}, which should be above low_freq_factor, {low}")
    return Llama3Scaling(fields.positive_number("factor"), low, high, original)


def _yarn(fields: JsonFields, original: int, max_len: int) -> YarnScaling:
    factor = fields.positive_number("factor", max_len / original)
    truncate = fields.flag("truncate")
    return YarnScaling(
        factor=factor,
        original_max_len=original,
        beta_fast=fields.positive_number("beta_fast", 32.0),
        beta_slow=fields.positive_number("beta_slow", 1.0),
        attention_factor=fields.positive_number("attention_factor", _yarn_attention_factor(fields, factor)),
        truncate=True if truncate is None else truncate,
    )


def _yarn_attention_factor(fields: JsonFields, factor: float) -> float:
    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1

    mscale, mscale_all_dim = fields.number("mscale"), fields.number("mscale_all_dim")
    return grown(mscale) / grown(mscale_all_dim) if mscale and mscale_all_dim else grown(1.0)


def _longrope(fields: JsonFields, head_dim: int, original: int, max_len: int) -> LongropeScaling:
    factor = fields.positive_number("factor", max_len / original)
    default = 1.0 if factor <= 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongropeScaling(
        short_factors=fields.positive_numbers("short_factor", head_dim // 2),
        long_factors=fields.positive_numbers("long_factor", head_dim // 2),
        original_max_len=original,
        attention_factor=fields.positive_number("attention_factor", default),
    )

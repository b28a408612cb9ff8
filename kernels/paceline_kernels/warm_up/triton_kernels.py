"""All kernels for GPUs, by module and name, as `triton_launches` names them.

Apart from it, because importing them takes Triton a second. Knows their names and keys.
"""

from collections.abc import Mapping
from typing import Any

from paceline_kernels.activation import triton as activation
from paceline_kernels.attention.triton import chunks, splits
from paceline_kernels.block_copy import triton as block_copy
from paceline_kernels.clock import triton as clock
from paceline_kernels.draws import triton as draws
from paceline_kernels.experts.triton.combining import combine_slots
from paceline_kernels.experts.triton.few_slots import multiply_few_slots
from paceline_kernels.experts.triton.grouping import group_slots
from paceline_kernels.experts.triton.groups import multiply_expert_groups
from paceline_kernels.experts.triton.router import route_rows
from paceline_kernels.experts.triton.tiles import multiply_expert_tiles
from paceline_kernels.grouped_linear.triton import few_rows as few_groups
from paceline_kernels.grouped_linear.triton import tiles as group_tiles
from paceline_kernels.grouped_linear.triton import widening
from paceline_kernels.linear.triton import few_rows, tiles
from paceline_kernels.plan_ring import triton as plan_ring
from paceline_kernels.prompt_lookup import triton as prompt_lookup
from paceline_kernels.result_ring import triton as result_ring
from paceline_kernels.rms_norm import triton as rms_norm
from paceline_kernels.rope import triton as rope
from paceline_kernels.sampling.triton import draw, logprobs, rules, survey
from paceline_kernels.scaled_linear import triton as scaled_linear
from paceline_kernels.step_inputs import triton as step_inputs
from paceline_kernels.take_rows import triton as take_rows

_KERNELS: tuple[Any, ...] = (
    activation.gate_and_multiply_kernel,
    activation.gate_and_round_kernel,
    activation.softcap_kernel,
    chunks.attend_chunks,
    splits.attend_splits,
    splits.fold_partials,
    block_copy.block_copy_kernel,
    clock.stamp_kernel,
    draws.draw_inputs_kernel,
    draws.advance_rows_kernel,
    combine_slots,
    multiply_few_slots,
    group_slots,
    route_rows,
    multiply_expert_tiles,
    multiply_expert_groups,
    few_groups.multiply_few_groups,
    group_tiles.multiply_group_tiles,
    widening.widen_groups,
    few_rows.multiply_few_rows,
    tiles.multiply_tiles,
    plan_ring.read_plan_kernel,
    plan_ring.write_words_kernel,
    prompt_lookup.lookup_drafts_kernel,
    result_ring.write_results_kernel,
    rms_norm.rms_norm_kernel,
    rms_norm.rms_norm_heads_kernel,
    rope.rope_and_write_kv_kernel,
    draw.draw_kernel,
    logprobs.take_logprobs_kernel,
    rules.copy_ruled_kernel,
    rules.apply_rules_kernel,
    survey.survey_draws,
    survey.survey_logprobs,
    scaled_linear.round_rows_kernel,
    step_inputs.step_inputs_kernel,
    take_rows.take_rows_kernel,
)
KERNELS: Mapping[str, Any] = {f"{kernel.fn.__module__}.{kernel.fn.__qualname__}": kernel for kernel in _KERNELS}


def settle_keys() -> None:
    """Have every kernel's key in Triton's cache made now, in one order, before any is launched.

    Functions of Triton's own library call each other in circles, and where a circle is entered first becomes part of
    the key (3.6.0). So processes that launch in different orders would not find each other's code.
    """
    for kernel in KERNELS.values():
        assert kernel.cache_key

"""Every way in which kernels are launched: each entry of each launch table, with the types that matter.

Knows the operations and sizes of real models. Compiling is slow, so no case repeats another's code.
"""

from collections.abc import Iterator
from functools import partial

import torch

from kernel_resources import attention_cases, draws_cases, linear_cases, sampling_cases
from kernel_resources.case import Case, meta, type_name
from paceline_kernels.activation import Gate, gate_and_multiply, softcap
from paceline_kernels.block_copy import block_copy
from paceline_kernels.gpu.architecture import Architecture, table_of
from paceline_kernels.rms_norm import rms_norm, rms_norm_heads
from paceline_kernels.rms_norm.triton import NUM_WARPS
from paceline_kernels.rope import HeadNorms, rope_and_write_kv
from paceline_kernels.step_inputs import PlanColumns, RowState, step_inputs
from paceline_kernels.take_rows import take_rows

_FIRST_WITH_FP8 = 89


def cases(capability: int) -> Iterator[Case]:
    """All cases of a GPU, by its compute capability times ten."""
    architecture, has_fp8 = table_of(capability), capability >= _FIRST_WITH_FP8
    yield from _norms(architecture)
    yield from _rope(has_fp8=has_fp8)
    yield from _rows()
    for num_planned in (1, 1024):
        yield Case(f"step inputs {num_planned}", partial(_call_step_inputs, num_planned))
    yield from draws_cases.cases()
    yield from attention_cases.cases(has_fp8=has_fp8)
    yield from linear_cases.cases(architecture, has_fp8=has_fp8)
    yield from sampling_cases.cases()


def _norms(architecture: Architecture) -> Iterator[Case]:
    for width in NUM_WARPS[architecture]:
        dtype = torch.float16 if width == min(NUM_WARPS[architecture]) else torch.bfloat16
        x, weight, name = meta(8, width, dtype=dtype), meta(width, dtype=dtype), f"norm {width} {type_name(dtype)}"
        yield Case(name, partial(rms_norm, x, weight, 1e-5))
        yield Case(f"add {name}", partial(rms_norm, x, weight, 1e-5, residual=x))
    yield Case("head norm 128", partial(rms_norm_heads, meta(8, 48, 128), meta(128), meta(128), 8, 1e-6))


def _rope(*, has_fp8: bool) -> Iterator[Case]:
    types = [torch.bfloat16, torch.int8]
    if has_fp8:
        types.append(torch.float8_e4m3fn)
    for head_dim, dtype in ((64, torch.float16), (128, torch.bfloat16), (256, torch.bfloat16)):
        call = partial(_call_rope, head_dim, dtype, dtype, with_norms=True)
        yield Case(f"rope {head_dim} norms {type_name(dtype)}", call)
    for cache_type in types:
        yield Case(f"rope 128 {type_name(cache_type)}", partial(_call_rope, 128, torch.bfloat16, cache_type))


def _call_rope(head_dim: int, dtype: torch.dtype, cache_type: torch.dtype, *, with_norms: bool = False) -> None:
    cache = meta(1000, 8, 16, head_dim, dtype=cache_type)
    weight = meta(head_dim, dtype=dtype)
    scales = {
        dtype: None,
        torch.int8: meta(1000, 8, 16, dtype=torch.float32),
        torch.float8_e4m3fn: meta(8, dtype=torch.float32),
    }[cache_type]
    rope_and_write_kv(
        meta(8, 48, head_dim, dtype=dtype),
        meta(4096, head_dim, dtype=torch.float32),
        meta(8, dtype=torch.int32),
        meta(8, dtype=torch.int64),
        cache,
        cache,
        norms=HeadNorms(weight, weight, 1e-6) if with_norms else None,
        key_scales=scales,
        value_scales=scales,
    )


def _rows() -> Iterator[Case]:
    for gate, dtype in ((Gate.SILU, torch.bfloat16), (Gate.GELU_TANH, torch.float16)):
        x = meta(8, 2 * 14336, dtype=dtype)
        yield Case(f"gate {gate.name} {type_name(dtype)}", partial(gate_and_multiply, x, gate))
    yield Case("softcap", partial(softcap, meta(8, 256_000), 30.0))
    yield Case("take rows", partial(take_rows, meta(128_256, 4096), meta(8, dtype=torch.int32)))
    blocks = meta(2, dtype=torch.int32)
    yield Case("block copy", partial(block_copy, meta(32, 1000, 8, 16, 128), blocks, blocks))


def _call_step_inputs(num_planned: int) -> None:
    column = meta(1024, dtype=torch.int32)
    state = RowState(
        token_ids=meta(1024, 131_072, dtype=torch.int32),
        num_held=column,
        num_computed=column,
        finish=meta(1024, dtype=torch.int32),
        block_table=meta(1024, 8192, dtype=torch.int32),
    )
    planned = meta(num_planned, dtype=torch.int32)
    step_inputs(state, PlanColumns(planned, planned), 2048, 16)

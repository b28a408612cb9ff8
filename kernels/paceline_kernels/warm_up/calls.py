"""One small call of every operation's CPU code, by name; later calls, of any size, find it compiled.

Knows one small call per operation. It refuses to know the sizes of models, and when and where code is compiled.
"""

import functools
from collections.abc import Callable, Mapping

import numpy as np
import torch

from paceline_kernels.activation import Gate, gate_and_multiply, softcap
from paceline_kernels.attention import paged_attention
from paceline_kernels.clock import new_clock
from paceline_kernels.decoder import INT8_SCALE_BYTES, Decoder, DecoderBatch, DecoderLayer, DecoderWeights, Experts
from paceline_kernels.draws import RowDraws, advance_rows, draw_inputs
from paceline_kernels.experts import Routes, gated_experts
from paceline_kernels.linear import linear
from paceline_kernels.prompt_lookup.cpu import look_up
from paceline_kernels.quantized_linear import quantized_linear, unpack_rows
from paceline_kernels.quantized_linear.packing import GROUP, PackedWeight, pack_int4
from paceline_kernels.result_ring import new_ring, write_results
from paceline_kernels.rms_norm import rms_norm, rms_norm_heads
from paceline_kernels.rope import rope_and_write_kv, rope_frequencies, rope_table
from paceline_kernels.routing import Routing
from paceline_kernels.sampling import LogitRules, SamplingParameters, sample
from paceline_kernels.step_inputs import PlanColumns, RowBuffers, step_inputs

_BLOCK_SIZE = 16


def _rope() -> None:
    cache = torch.zeros(2, 1, 1, 1, 8)
    index = torch.zeros(1, dtype=torch.int32)
    table = rope_table(1, rope_frequencies(8, 10_000.0))
    rope_and_write_kv(torch.ones(1, 3, 8), table, index, index.long(), cache[0], cache[1])


def _attention() -> None:
    cache = torch.ones(2, 1, 1, 1, 8)
    one = torch.ones(1, dtype=torch.int32)
    cu_seqlens = torch.tensor([0, 1], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    paged_attention(torch.ones(1, 1, 8), cache[0], cache[1], table, cu_seqlens, one, 1.0)


def _sample() -> None:
    sample(torch.ones(1, 8), _parameters())


def _sample_by_rules() -> None:
    sample(torch.ones(1, 8), _parameters(), LogitRules.none(1, torch.device("cpu")))


def _parameters() -> SamplingParameters:
    one, one_float = torch.ones(1, dtype=torch.int32), torch.ones(1)
    return SamplingParameters(one_float, one, one_float / 2, one_float, one.long(), one, one)


def _row_operations() -> None:
    """A row of one token, which draws another one."""
    one, zero, real = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.ones(1)
    state = RowBuffers(torch.zeros(1, 8, dtype=torch.int32), one, zero, zero.clone(), zero[None])
    rows = RowDraws(one, one.clone(), one + 1, one[None], real, one, real, real, one.long(), zero)
    plan, clock = PlanColumns(zero, one), new_clock(torch.device("cpu"))
    batch = step_inputs(state, plan, 1, _BLOCK_SIZE)
    draws = draw_inputs(state, rows, plan, batch, 1, 0)
    samples = sample(torch.ones(1, 8), draws.parameters)
    advanced = advance_rows(state, rows, plan, batch, draws, samples, 0)
    write_results(new_ring(1, 1, 1, pinned=False), zero.long(), advanced, draws, samples, clock, with_logprobs=False)
    look_up(state.token_ids.numpy()[0], 4, 1, 0.0)


def _decode(kv_dtype: torch.dtype, *, has_experts: bool = False) -> None:
    """A decoder of one layer, one head and one group of weights, all zero."""
    norm = torch.ones(GROUP)
    experts = Experts(Routing(2, 1), torch.zeros(2, GROUP), _zeros(4 * GROUP), _zeros(2 * GROUP))
    layer = DecoderLayer(
        *(norm, _zeros(3 * GROUP), _zeros(GROUP), norm, _zeros(2 * GROUP), _zeros(GROUP)),
        experts=experts if has_experts else None,
    )
    table = rope_table(1, rope_frequencies(GROUP, 10_000.0))[None]
    weights = DecoderWeights(_zeros(GROUP), (layer,), norm, _zeros(GROUP), table, 1, 1, GROUP, 1e-5)
    zero, one = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    batch = DecoderBatch(zero, zero, zero.long(), torch.cat((zero, one)), one, zero[None], zero)
    slot = GROUP + (INT8_SCALE_BYTES if kv_dtype == torch.int8 else 0)
    keys, values = torch.zeros(2, 1, 1, 1, _BLOCK_SIZE, slot, dtype=kv_dtype)
    Decoder(weights).forward(batch, keys, values)


def _gated_experts() -> None:
    x, routes = torch.ones(1, 8), Routes(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    gated_experts(x, routes, torch.ones(1, 16, 8), torch.ones(1, 8, 8), Gate.SILU)


def _unpack() -> None:
    unpack_rows(_zeros(GROUP), torch.zeros(1, dtype=torch.int32))


def _zeros(num_outputs: int) -> PackedWeight:
    scales = np.zeros((num_outputs, 1), dtype=np.float32)
    return pack_int4(np.zeros((num_outputs, GROUP), dtype=np.uint8), scales, scales)


# The calls enter parallel regions, so they belong into the thread that will run the operations.
CPU_CALLS: Mapping[str, Callable[[], object]] = {
    "linear": lambda: [linear(torch.ones(1, 8), torch.ones(3, 8), slices=slices) for slices in (1, 2)],
    "rms_norm": lambda: rms_norm(torch.ones(1, 8), torch.ones(8), 1e-5),
    "add_rms_norm": lambda: rms_norm(torch.ones(1, 8), torch.ones(8), 1e-5, residual=torch.ones(1, 8)),
    "rms_norm_heads": lambda: rms_norm_heads(torch.ones(1, 3, 8), torch.ones(8), torch.ones(8), 1, 1e-5),
    "gated_experts": _gated_experts,
    "gate_and_multiply": lambda: gate_and_multiply(torch.ones(1, 16), Gate.SILU),
    "softcap": lambda: softcap(torch.ones(1, 8), 1.0),
    "rope_and_write_kv": _rope,
    "paged_attention": _attention,
    "decoder over int8": functools.partial(_decode, torch.int8),
    "decoder over float16": functools.partial(_decode, torch.float16),
    "decoder of experts over int8": functools.partial(_decode, torch.int8, has_experts=True),
    "decoder of experts over float16": functools.partial(_decode, torch.float16, has_experts=True),
    "quantized_linear": lambda: quantized_linear(torch.ones(1, GROUP), _zeros(GROUP)),
    "unpack_rows": _unpack,
    "row_operations": _row_operations,
    "sample": _sample,
    "sample by rules": _sample_by_rules,
}

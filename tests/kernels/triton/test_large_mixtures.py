"""Mixtures of more numbers than 32 bits count: what lies behind them is found and written like anything else.

131,072 tokens of 8 experts and 2,048 outputs are such. Here they are addresses of which few have memory, and of the
programs that would be launched only the last ones run.
"""

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from kernel_rig.tensors import int32, normal, spread
from paceline_kernels.experts.triton.combining import combine_slots
from paceline_kernels.experts.triton.few_slots import multiply_few_slots
from paceline_kernels.experts.triton.router import route_rows
from paceline_kernels.experts.triton.tiles import multiply_expert_tiles

_WIDTH, _SLOTS = 64, 4
_MANY = 2**31 // _WIDTH + _SLOTS  # rows, of which the last lie behind 2**31 numbers
_NUM_EXPERTS = _MANY // (2 * _WIDTH) + 2  # matrices, the same of them


@pytest.fixture(autouse=True)
def _needs_the_interpreter(gpu, device):
    if device.type != "cpu":
        pytest.skip("on a GPU this would be memory")


@pytest.fixture
def begin_at(monkeypatch):
    """Sets the number that the first program of a launch has along its first axis."""
    number_of = InterpreterBuilder.create_get_program_id

    def begin(first):
        def shifted(builder, axis):
            handle = number_of(builder, axis)
            handle.data = handle.data + (first if axis == 0 else 0)
            return handle

        monkeypatch.setattr(InterpreterBuilder, "create_get_program_id", shifted)

    return begin


def last(num_rows, values):
    """So many rows: zeros but for the last ones."""
    rows = spread((num_rows, *values.shape[1:]), values.dtype)
    rows[-len(values) :] = values
    return rows


def rows_of_x(num_rows):
    """And rows that nothing was written to."""
    return last(num_rows, normal(_SLOTS, _WIDTH).half()), spread((num_rows, _WIDTH), torch.float16)


def last_expert(num_experts, num_outputs):
    """Matrices, of which one holds numbers."""
    return last(num_experts, normal(1, num_outputs, _WIDTH, seed=1).half() / 8)


def routes(num_rows, expert):
    return last(num_rows, torch.full((_SLOTS,), expert, dtype=torch.int32)), last(num_rows, normal(_SLOTS, seed=2))


def of_tiles(num_rows, num_experts):
    x, out = rows_of_x(num_rows)
    slots = int32(*range(num_rows - _SLOTS, num_rows), *[num_rows] * (16 - _SLOTS))
    tiles, gate_up = (slots, int32(num_experts - 1), int32(1)), last_expert(num_experts, 2 * _WIDTH)
    sizes = num_rows, _WIDTH, _WIDTH, _WIDTH
    multiply_expert_tiles[(1,)](out, x, gate_up, None, *tiles, *sizes, 1, "SILU", 32, _WIDTH, 16, 1)
    return out[-_SLOTS:]


def one_by_one(num_rows, num_experts):
    x, out = rows_of_x(num_rows)
    gate_up, (experts, _) = last_expert(num_experts, 2 * _WIDTH), routes(num_rows, num_experts - 1)
    sizes = 0, num_experts, _WIDTH, _WIDTH
    multiply_few_slots[(_SLOTS, 1)](out, x, gate_up, None, experts, *sizes, 1, "SILU", _WIDTH, 32)
    return out[-_SLOTS:]


def combined(num_rows, num_experts):
    products, out = rows_of_x(num_rows)
    chosen = routes(num_rows, num_experts - 1)
    combine_slots[(_SLOTS // 2, 1)](
        out, products, *chosen, 0, num_experts, num_rows, _WIDTH, TOP_K=2, SLICES=1, GROUPS=1, BLOCK=_WIDTH
    )
    return out[num_rows // 2 - _SLOTS // 2 : num_rows // 2]


def routed(num_rows, _):
    logits, _ = rows_of_x(num_rows)
    experts, weights = (spread((num_rows, 2), dtype) for dtype in (torch.int32, torch.float32))
    route_rows[(_SLOTS,)](experts, weights, logits, None, 1.0, "SOFTMAX", True, 1, 1, _WIDTH, 2, 1, _WIDTH, 2)
    return torch.cat((experts[-_SLOTS:], weights[-_SLOTS:]), dim=1)


@pytest.mark.parametrize(
    ("compute", "first_program"),
    [
        (of_tiles, 0),
        (one_by_one, _MANY - _SLOTS),
        (combined, (_MANY - _SLOTS) // 2),
        (routed, _MANY - _SLOTS),
    ],
)
def test_rows_and_experts_behind_2_to_the_31_numbers_are_computed_with(begin_at, compute, first_program):
    expected = compute(_SLOTS, 1)
    begin_at(first_program)
    assert expected.any(dim=1).all()
    assert torch.equal(compute(_MANY, _NUM_EXPERTS), expected)

"""Caches of more numbers than 32 bits count: what lies behind them is found, written and copied like anything else.

A GPU of 141 GB has them: two layers of a model in 100 GiB are enough. Here they are addresses of which few have memory.
"""

import pytest
import torch

from kernel_rig.tensors import spread
from paceline_kernels.attention import Splits
from paceline_kernels.attention import triton as attention
from paceline_kernels.block_copy import triton as block_copy
from paceline_kernels.rope import rope_frequencies, rope_table
from paceline_kernels.rope import triton as rope

_HEADS, _BLOCK_SIZE, _DIM = 2, 16, 64
_BLOCK_NUMBERS = _HEADS * _BLOCK_SIZE * _DIM
_MANY = 2**31 // _BLOCK_NUMBERS + 4  # the last blocks lie behind 2**31 numbers
_FEW = 4  # blocks of the caches that are compared with


@pytest.fixture(autouse=True)
def _needs_the_interpreter(gpu, device):
    if device.type != "cpu":
        pytest.skip("on a GPU this would be memory")


def caches(num_blocks, dtype):
    """Keys and values, and scales of their slots if they need some."""
    made = [spread((num_blocks, _HEADS, _BLOCK_SIZE, _DIM), dtype) for _ in "kv"]
    has_scales = dtype == torch.int8
    return made, [spread((num_blocks, _HEADS, _BLOCK_SIZE), torch.float32) if has_scales else None for _ in "kv"]


def attended(num_blocks, dtype, splits):
    """A chunk and a decode, written to the last three blocks and attended to there."""
    (keys, values), (key_scales, value_scales) = caches(num_blocks, dtype)
    lens = torch.tensor([20, 9], dtype=torch.int32)
    tables = torch.tensor([[num_blocks - 1, num_blocks - 3], [num_blocks - 2, -1]], dtype=torch.int32)
    qkv = torch.randn(29, 3 * _HEADS, _DIM, generator=torch.Generator().manual_seed(0)).half()
    positions = torch.cat([torch.arange(length) for length in lens.tolist()]).int()
    blocks = torch.cat([tables[row, torch.arange(length) // _BLOCK_SIZE] for row, length in enumerate(lens.tolist())])
    slots = blocks.long() * _BLOCK_SIZE + positions % _BLOCK_SIZE
    table = rope_table(32, rope_frequencies(_DIM, 10_000.0))
    rope.rope_and_write_kv(qkv, table, positions, slots, keys, values, None, key_scales, value_scales)
    query = torch.cat((qkv[:20, :_HEADS], qkv[28:, :_HEADS]))  # the second row's last token alone
    cu_seqlens = torch.tensor([0, 20, 21], dtype=torch.int32)
    rows = (tables, cu_seqlens, lens, 0.125, None, None)
    return attention.paged_attention(query, keys, values, *rows, key_scales, value_scales, splits, 1, 20)


@pytest.mark.parametrize(
    ("cache_type", "splits"),
    [(torch.float16, Splits.EVEN), pytest.param(torch.int8, Splits.FIXED, marks=pytest.mark.slow)],
    ids=str,
)
def test_slots_behind_2_to_the_31_numbers_are_written_and_attended_to(cache_type, splits):
    assert torch.equal(attended(_MANY, cache_type, splits), attended(_FEW, cache_type, splits))


def test_blocks_behind_2_to_the_31_words_are_copied():
    """Words of 4 bytes, in the second of two layers."""
    cache = spread((2, _MANY, _HEADS, _BLOCK_SIZE, _DIM), torch.float32)
    last, layers = _MANY - 1, torch.arange(1.0, 3.0)
    cache[:, last] = layers[:, None, None, None]
    ids = [torch.tensor([block], dtype=torch.int32) for block in (last, last - 1)]
    block_copy.block_copy(cache, *ids)
    assert torch.equal(cache[:, last - 1], cache[:, last])
    assert torch.equal(cache[:, last, 0, 0, 0], layers)

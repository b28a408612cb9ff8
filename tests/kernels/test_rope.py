"""rope_and_write_kv: queries rotated in place, keys and values in their slots, and nothing else touched."""

import pytest
import torch

from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.rms_norm import rms_norm_heads
from paceline_kernels.rope import HeadNorms, reference, rope_and_write_kv, rope_frequencies, rope_table


def call_arguments(num_tokens, num_heads, num_kv_heads, head_dim, block_size, num_blocks):
    """Random tokens at random positions in distinct random slots of an unwritten cache."""
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return {
        "qkv": torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator),
        "table": rope_table(64, rope_frequencies(head_dim, 10_000.0)),
        "positions": torch.randint(0, 64, (num_tokens,), generator=generator, dtype=torch.int32),
        "slot_mapping": torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].contiguous(),
        "key_cache": torch.full(shape, float("nan")),
        "value_cache": torch.full(shape, float("nan")),
    }


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(1, 1, 1, 2, 1), (5, 3, 1, 6, 4), (31, 9, 3, 64, 16), (40, 4, 4, 10, 5)],
)
def test_rope_and_write_kv_equals_the_reference(num_tokens, num_heads, num_kv_heads, head_dim, block_size):
    ours = call_arguments(num_tokens, num_heads, num_kv_heads, head_dim, block_size, num_blocks=12)
    expected = {name: value.clone() for name, value in ours.items()}
    reference.rope_and_write_kv(**expected)
    rope_and_write_kv(**ours)
    torch.testing.assert_close(ours["qkv"], expected["qkv"], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours["key_cache"], expected["key_cache"], rtol=0, atol=1e-6, equal_nan=True)
    assert torch.equal(ours["value_cache"].nan_to_num(7.0), expected["value_cache"].nan_to_num(7.0))


def test_keys_and_values_in_the_input_are_left_as_they_are():
    """Only the queries are rotated in place."""
    arguments = call_arguments(3, 2, 1, 8, 4, num_blocks=2)
    before = arguments["qkv"].clone()
    rope_and_write_kv(**arguments)
    assert torch.equal(arguments["qkv"][:, 2:], before[:, 2:])
    assert not torch.equal(arguments["qkv"][:, :2], before[:, :2])


def test_position_zero_is_not_rotated():
    arguments = call_arguments(2, 2, 1, 8, 4, num_blocks=2) | {"positions": torch.zeros(2, dtype=torch.int32)}
    before = arguments["qkv"].clone()
    rope_and_write_kv(**arguments)
    assert torch.equal(arguments["qkv"], before)


def test_with_norms_heads_are_normalised_before_they_are_rotated():
    fused = call_arguments(3, 2, 1, 8, 4, num_blocks=2)
    apart = {name: value.clone() for name, value in fused.items()}
    weights = torch.linspace(0.5, 2, 8), torch.linspace(-1, 1, 8)
    rope_and_write_kv(**fused, norms=HeadNorms(*weights, 1e-6))
    rms_norm_heads(apart["qkv"], *weights, 1, 1e-6)
    rope_and_write_kv(**apart)
    assert torch.equal(fused["qkv"][:, :2], apart["qkv"][:, :2])
    assert torch.equal(fused["key_cache"].nan_to_num(7.0), apart["key_cache"].nan_to_num(7.0))


def test_padding_is_written_nowhere():
    for num_tokens in (2, 40):
        arguments = call_arguments(num_tokens, 3, 1, 16, 4, num_blocks=12)
        padded = {name: value.clone() for name, value in arguments.items()}
        padding = torch.arange(num_tokens) % 2 == 1
        slots = arguments["slot_mapping"]
        padded["slot_mapping"][padding] = -1
        rope_and_write_kv(**arguments)
        rope_and_write_kv(**padded)
        for name in ("key_cache", "value_cache"):
            ours, all_written = padded[name], arguments[name]
            all_written[slots[padding] // 4, :, slots[padding] % 4] = float("nan")
            assert torch.equal(ours.nan_to_num(7.0), all_written.nan_to_num(7.0))
        assert torch.equal(padded["qkv"][:, :3], arguments["qkv"][:, :3])


def test_a_token_has_the_same_bits_in_any_batch():
    """Alone, and among 39 others."""
    together = call_arguments(40, 3, 1, 16, 4, num_blocks=12)
    alone = {name: value.clone() for name, value in together.items()}
    rope_and_write_kv(**together)
    rows = [alone["qkv"][i : i + 1].clone() for i in range(40)]
    for i, row in enumerate(rows):
        part = slice(i, i + 1)
        rope_and_write_kv(
            row,
            alone["table"],
            alone["positions"][part].clone(),
            alone["slot_mapping"][part].clone(),
            alone["key_cache"],
            alone["value_cache"],
        )
    assert torch.equal(torch.cat(rows), together["qkv"])
    assert torch.equal(alone["key_cache"].nan_to_num(7.0), together["key_cache"].nan_to_num(7.0))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"positions": torch.tensor([0, 64], dtype=torch.int32)}, "positions must be 0 to 63"),
        ({"positions": torch.tensor([0, -1], dtype=torch.int32)}, "positions must be 0 to 63"),
        ({"slot_mapping": torch.tensor([0, 8])}, "slots must be 0 to 7"),
        ({"slot_mapping": torch.tensor([-2, 0])}, "slots must be 0 to 7"),
        ({"table": torch.zeros(64, 6)}, "table must have shape"),
        ({"qkv": torch.zeros(2, 2, 8)}, "does not fit 1 KV heads"),
        ({"qkv": torch.zeros(2, 4, 8, dtype=torch.float16)}, "qkv must be torch.float32, not torch.float16"),
        ({"value_cache": torch.zeros(2, 1, 3, 8)}, "value_cache must have shape"),
        ({"key_scales": torch.ones(1)}, "key_scales belong to caches of float8_e4m3fn and int8"),
    ],
)
def test_what_would_write_out_of_bounds_is_refused(changes, problem):
    arguments = call_arguments(2, 2, 1, 8, 4, num_blocks=2) | changes
    with pytest.raises(KernelArgumentError, match=problem):
        rope_and_write_kv(**arguments)
    assert arguments["key_cache"].isnan().all()


def test_a_table_holds_cosines_and_sines_times_the_factor():
    table = rope_table(3, torch.tensor([1.0, 0.5]), factor=2.0)
    angles = torch.tensor([[0, 0], [1, 0.5], [2, 1]])
    torch.testing.assert_close(table, 2 * torch.cat((angles.cos(), angles.sin()), dim=1))

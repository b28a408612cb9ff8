"""rope_and_write_kv for GPUs: norms, rotation, every type of cache, odd sizes, and nothing else touched."""

import math

import pytest
import torch

from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.gpu import architecture
from paceline_kernels.rms_norm import reference as rms_norm_reference
from paceline_kernels.rope import HeadNorms, reference, rope_frequencies, rope_table
from paceline_kernels.rope import triton as rope

NUM_BLOCKS = 3
# Half a unit in the last place of each type, with a little for float32's own operations.
ROUNDING = {torch.float16: 6e-4, torch.bfloat16: 5e-3, torch.float32: 3e-6}


def call_arguments(dtype, num_tokens, num_heads, num_kv_heads, head_dim, block_size):
    """Random tokens at random positions in distinct random slots of an unwritten cache of the same type."""
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (NUM_BLOCKS, num_kv_heads, block_size, head_dim)
    return {
        "qkv": torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype),
        "table": rope_table(64, rope_frequencies(head_dim, 10_000.0)),
        "positions": torch.randint(0, 64, (num_tokens,), generator=generator, dtype=torch.int32),
        "slot_mapping": torch.randperm(NUM_BLOCKS * block_size, generator=generator)[:num_tokens],
        "key_cache": torch.full(shape, float("nan"), dtype=dtype),
        "value_cache": torch.full(shape, float("nan"), dtype=dtype),
    }


def run(place, arguments, norms=None, key_scales=None, value_scales=None):
    """The same arguments on the device, after the call, back on the CPU; and both scales."""
    ours = {name: place(tensor) for name, tensor in arguments.items()}
    if norms is not None:
        norms = HeadNorms(place(norms.query_weight), place(norms.key_weight), norms.eps)
    scales = [None if given is None else place(given) for given in (key_scales, value_scales)]
    rope.rope_and_write_kv(*ours.values(), norms, *scales)
    return {name: tensor.cpu() for name, tensor in ours.items()}, [s if s is None else s.cpu() for s in scales]


def expected_of(arguments, norms=None):
    """What the reference makes of them, in float32."""
    expected = {name: t.float() if t.is_floating_point() else t for name, t in arguments.items()}
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    if norms is not None:
        weights = norms.query_weight.float(), norms.key_weight.float()
        num_kv_heads = arguments["key_cache"].shape[1]
        expected["qkv"] = rms_norm_reference.rms_norm_heads(expected["qkv"], *weights, num_kv_heads, norms.eps)
    reference.rope_and_write_kv(**expected)
    return expected


def norms_of(head_dim, dtype):
    """Random weights."""
    weights = torch.randn(2, head_dim, generator=torch.Generator().manual_seed(7)).to(dtype)
    return HeadNorms(weights[0], weights[1], 0.1)


def assert_close(ours, expected, bound):
    """Equal but for the rounding; NaN where NaN is expected."""
    torch.testing.assert_close(ours.float(), expected.float(), rtol=bound, atol=bound, equal_nan=True)


SHAPES = [
    (1, 1, 1, 2, 1),
    (3, 3, 1, 6, 4),
    (2, 17, 3, 64, 16),
    (3, 4, 4, 100, 5),
    (2, 2, 1, 126, 63),
    (1, 20, 20, 2, 1),
]


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_heads", "num_kv_heads", "head_dim", "block_size"), SHAPES)
def test_rope_and_write_kv_equals_the_reference(
    place, dtype, num_tokens, num_heads, num_kv_heads, head_dim, block_size, with_norms
):
    arguments = call_arguments(dtype, num_tokens, num_heads, num_kv_heads, head_dim, block_size)
    norms = norms_of(head_dim, dtype) if with_norms else None
    ours, _ = run(place, arguments, norms)
    expected = expected_of(arguments, norms)
    assert_close(ours["qkv"][:, :num_heads], expected["qkv"][:, :num_heads], ROUNDING[dtype])
    assert_close(ours["key_cache"], expected["key_cache"], ROUNDING[dtype])
    assert_close(ours["value_cache"], expected["value_cache"], 0.0)
    assert torch.equal(ours["qkv"][:, num_heads:], arguments["qkv"][:, num_heads:])


@pytest.mark.parametrize(("num_tokens", "num_heads", "num_kv_heads", "head_dim", "block_size"), SHAPES[1:4])
def test_int8_slots_are_the_nearest_integers_at_the_scale_of_their_largest_number(
    place, dtype, num_tokens, num_heads, num_kv_heads, head_dim, block_size
):
    """A scale per slot and head, 127 for its largest number, and no other slot touched."""
    arguments = call_arguments(dtype, num_tokens, num_heads, num_kv_heads, head_dim, block_size)
    expected = expected_of(arguments)
    for name in ("key_cache", "value_cache"):
        arguments[name] = torch.full(arguments[name].shape, 99, dtype=torch.int8)
    scales = torch.full(arguments["key_cache"].shape[:3], float("nan"))
    ours, written = run(place, arguments, None, scales, scales)
    for name, scale in zip(("key_cache", "value_cache"), written, strict=True):
        exact, stored = expected[name], ours[name]
        empty = exact.isnan().all(-1)
        assert torch.equal(scale.isnan(), empty)
        assert (stored[empty] == 99).all()
        torch.testing.assert_close(scale[~empty], exact[~empty].abs().amax(-1) / 127, rtol=1e-5, atol=0)
        error = (stored[~empty].float() * scale[~empty][:, None] - exact[~empty]).abs()
        assert (error <= scale[~empty][:, None] * 0.501).all()
        assert (stored[~empty].abs().amax(-1) == 127).all()


def test_a_head_of_zeros_and_one_with_nan_are_what_they_were(place, dtype):
    """Zeros have the scale 0; a NaN is seen in the scale, because an integer cannot show it."""
    arguments = call_arguments(dtype, 2, 1, 1, 6, 4)
    arguments["qkv"][0] = 0
    arguments["qkv"][1, :, 3] = float("nan")
    for name in ("key_cache", "value_cache"):
        arguments[name] = torch.zeros(arguments[name].shape, dtype=torch.int8)
    ours, scales = run(place, arguments, None, *[torch.ones(NUM_BLOCKS, 1, 4)] * 2)
    for scale in scales:
        first, second = scale.flatten()[arguments["slot_mapping"]].tolist()
        assert first == 0
        assert math.isnan(second)
    assert (ours["key_cache"].flatten(0, 2)[arguments["slot_mapping"][0]] == 0).all()


def test_fp8_slots_are_divided_by_their_heads_scale_and_cut_off_at_the_largest_number(place, device):
    """Wide bounds in the interpreter, which rounds 1.99 to 1: its conversions forget to carry into the exponent."""
    arguments = call_arguments(torch.float16, 3, 2, 2, 16, 4)
    arguments["qkv"][0, -1, 0] = 5000.0
    expected = expected_of(arguments)["value_cache"]
    for name in ("key_cache", "value_cache"):
        arguments[name] = torch.zeros(arguments[name].shape, dtype=torch.float8_e4m3fn)
    scales = torch.tensor([0.5, 2.0])
    ours, _ = run(place, arguments, None, scales, scales)
    stored = ours["value_cache"].float() * scales[None, :, None, None]
    wanted = expected.nan_to_num(0.0).clamp(max=448.0 * 2)
    rounding = 0.55 if device.type == "cpu" else 0.0625
    torch.testing.assert_close(stored, wanted, rtol=rounding, atol=0.004)


def test_a_padding_token_is_written_nowhere_and_a_position_too_far_gives_nan(place, dtype):
    """A captured graph has more tokens than a step; finding a mistake would mean waiting for the device."""
    arguments = call_arguments(dtype, 3, 2, 1, 8, 4)
    arguments["slot_mapping"][:2] = torch.tensor([-1, NUM_BLOCKS * 4])
    arguments["positions"][2] = 64
    ours, _ = run(place, arguments)
    written = ~ours["value_cache"].isnan().all(-1).flatten()
    assert written.nonzero().flatten().tolist() == [int(arguments["slot_mapping"][2])]
    assert ours["key_cache"].isnan().all()
    assert ours["qkv"][2, :2].isnan().all()


def test_a_token_has_the_same_bits_alone(place, dtype):
    arguments = call_arguments(dtype, 3, 3, 1, 18, 4)
    together, _ = run(place, arguments, norms_of(18, dtype))
    one = slice(1, 2)
    alone, _ = run(
        place,
        arguments | {name: arguments[name][one] for name in ("qkv", "positions", "slot_mapping")},
        norms_of(18, dtype),
    )
    slot = int(arguments["slot_mapping"][1])
    assert torch.equal(alone["qkv"][:, :3], together["qkv"][one, :3])
    assert torch.equal(alone["key_cache"].flatten(0, 2)[slot], together["key_cache"].flatten(0, 2)[slot])


def test_fp8_is_refused_by_name_where_a_gpu_has_no_such_numbers(place, monkeypatch):
    """An A100, say."""
    monkeypatch.setattr(architecture, "_current_capability", lambda: 80)
    arguments = call_arguments(torch.float16, 1, 1, 1, 8, 4)
    for name in ("key_cache", "value_cache"):
        arguments[name] = torch.zeros(arguments[name].shape, dtype=torch.float8_e4m3fn)
    with pytest.raises(KernelArgumentError, match=r"float8_e4m3fn needs compute capability 8.9 or later.*use int8"):
        run(place, arguments, None, torch.ones(1), torch.ones(1))

"""rope_and_write_kv: queries rotated in place, keys and values in their slots, and nothing else touched."""

import math

import pytest
import torch

from kernel_rig.tensors import int32
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.gpu import architecture
from paceline_kernels.rms_norm import reference as rms_norm_reference
from paceline_kernels.rms_norm import rms_norm_heads
from paceline_kernels.rope import HeadNorms, reference, rope_and_write_kv, rope_frequencies, rope_table

slow = pytest.mark.slow
CACHES = ("key_cache", "value_cache")
# Half a unit in the last place of each type, with a little for float32's own operations.
ROUNDING = {torch.float16: 6e-4, torch.bfloat16: 5e-3, torch.float32: 3e-6}
# (num_tokens, num_heads, num_kv_heads, head_dim, block_size): one head and several programs of heads, one block and
# several, halves of one pair, of a power of two and of others.
SHAPES = [
    (1, 1, 1, 2, 1),
    (3, 3, 1, 6, 4),
    (2, 17, 3, 64, 16),
    pytest.param((5, 3, 1, 6, 4), marks=slow),
    pytest.param((3, 4, 4, 100, 5), marks=slow),
    pytest.param((2, 2, 1, 126, 63), marks=slow),
    pytest.param((1, 20, 20, 2, 1), marks=slow),
    pytest.param((40, 4, 4, 10, 5), marks=slow),
    pytest.param((31, 9, 3, 64, 16), marks=slow),
]


def call_arguments(dtype, num_tokens, num_heads, num_kv_heads, head_dim, block_size, num_blocks=3):
    """Random tokens at random positions in distinct random slots of an unwritten cache of the same type."""
    generator = torch.Generator().manual_seed(num_tokens)
    num_blocks = max(num_blocks, -(-num_tokens // block_size))
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return {
        "qkv": torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype),
        "table": rope_table(64, rope_frequencies(head_dim, 10_000.0)),
        "positions": torch.randint(0, 64, (num_tokens,), generator=generator, dtype=torch.int32),
        "slot_mapping": torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].contiguous(),
        "key_cache": torch.full(shape, float("nan"), dtype=dtype),
        "value_cache": torch.full(shape, float("nan"), dtype=dtype),
    }


def with_caches_of(arguments, dtype, value):
    """The same arguments with caches of another type that hold one value."""
    return arguments | {name: torch.full(arguments[name].shape, value, dtype=dtype) for name in CACHES}


def run(place, arguments, norms=None, key_scales=None, value_scales=None):
    """The arguments after the call, back on the CPU; and both scales."""
    ours, scales = ({name: place(tensor) for name, tensor in given.items()} for given in (arguments, {}))
    for name, given in (("key_scales", key_scales), ("value_scales", value_scales)):
        scales[name] = None if given is None else place(given)
    if norms is not None:
        norms = HeadNorms(place(norms.query_weight), place(norms.key_weight), norms.eps)
    rope_and_write_kv(**ours, norms=norms, **scales)
    return {name: tensor.cpu() for name, tensor in ours.items()}, [s if s is None else s.cpu() for s in scales.values()]


def expected_of(arguments, norms=None):
    """What the reference makes of them, in float32."""
    expected = {name: (t.float() if t.is_floating_point() else t).clone() for name, t in arguments.items()}
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


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_and_write_kv_equals_the_reference(place, dtype, shape, with_norms):
    """The queries are rotated in place; keys and values in the input are left as they are, but for normalised keys."""
    num_heads, num_kv_heads, head_dim = shape[1:4]
    arguments, norms = call_arguments(dtype, *shape), norms_of(head_dim, dtype) if with_norms else None
    ours, _ = run(place, arguments, norms)
    expected = expected_of(arguments, norms)
    assert_close(ours["qkv"][:, :num_heads], expected["qkv"][:, :num_heads], ROUNDING[dtype])
    assert_close(ours["key_cache"], expected["key_cache"], ROUNDING[dtype])
    assert_close(ours["value_cache"], expected["value_cache"], 0.0)
    kept = num_heads + num_kv_heads if with_norms else num_heads
    assert torch.equal(ours["qkv"][:, kept:], arguments["qkv"][:, kept:])


def test_position_zero_is_not_rotated(place, exact):
    arguments = call_arguments(exact, 2, 2, 1, 8, 4) | {"positions": int32(0, 0)}
    ours, _ = run(place, arguments)
    assert torch.equal(ours["qkv"], arguments["qkv"])


def test_on_a_cpu_norms_have_the_bits_of_heads_normalised_before(threads):
    fused = call_arguments(torch.float32, 3, 2, 1, 8, 4)
    apart = {name: value.clone() for name, value in fused.items()}
    weights = torch.linspace(0.5, 2, 8), torch.linspace(-1, 1, 8)
    rope_and_write_kv(**fused, norms=HeadNorms(*weights, 1e-6))
    rms_norm_heads(apart["qkv"], *weights, 1, 1e-6)
    rope_and_write_kv(**apart)
    assert torch.equal(fused["qkv"][:, :2], apart["qkv"][:, :2])
    assert_close(fused["key_cache"], apart["key_cache"], 0.0)


def few_and_many(backend):
    """Numbers of tokens: for many a CPU has another loop; a GPU has a program for each, and few show what many do."""
    return (3,) if backend.is_gpu else (3, 40)


def test_padding_is_written_nowhere(place, backend):
    """And changes nothing of others. A captured graph has more tokens than a step."""
    for num_tokens in few_and_many(backend):
        assert_padding_is_written_nowhere(place, call_arguments(backend.dtype, num_tokens, 3, 1, 16, 4))


def assert_padding_is_written_nowhere(place, arguments):
    """Every other token is padding."""
    num_tokens = len(arguments["positions"])
    is_padding, slots = torch.arange(num_tokens) % 2 == 1, arguments["slot_mapping"].clone()
    written, _ = run(place, arguments)
    padded, _ = run(place, arguments | {"slot_mapping": slots.masked_fill(is_padding, -1)})
    for name in CACHES:
        written[name][slots[is_padding] // 4, :, slots[is_padding] % 4] = float("nan")
        assert_close(padded[name], written[name], 0.0)
    assert torch.equal(padded["qkv"], written["qkv"])


def test_on_a_gpu_a_slot_too_far_is_written_nowhere_and_a_position_too_far_gives_nan(gpu, place, dtype):
    """Finding a mistake would mean waiting for the device."""
    arguments = call_arguments(dtype, 3, 2, 1, 8, 4)
    arguments["slot_mapping"][:2] = torch.tensor([-1, 3 * 4])
    arguments["positions"][2] = 64
    ours, _ = run(place, arguments)
    written = ~ours["value_cache"].isnan().all(-1).flatten()
    assert written.nonzero().flatten().tolist() == [int(arguments["slot_mapping"][2])]
    assert ours["key_cache"].isnan().all()
    assert ours["qkv"][2, :2].isnan().all()


def test_a_token_has_the_same_bits_in_any_batch(place, backend, dtype):
    """Alone, and among others."""
    num_tokens = few_and_many(backend)[-1]
    arguments, norms = call_arguments(dtype, num_tokens, 3, 1, 18, 4), norms_of(18, dtype)
    together, _ = run(place, arguments, norms)
    for i in range(num_tokens)[:: num_tokens // 3]:
        mine = {name: arguments[name][i : i + 1] for name in ("qkv", "positions", "slot_mapping")}
        alone, _ = run(place, arguments | mine, norms)
        slot = int(mine["slot_mapping"])
        assert torch.equal(alone["qkv"][0, :3], together["qkv"][i, :3])
        for name in CACHES:
            assert torch.equal(alone[name].flatten(0, 2)[slot], together[name].flatten(0, 2)[slot])


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[2], SHAPES[4]], ids=str)
def test_int8_slots_are_the_nearest_integers_at_the_scale_of_their_largest_number(gpu, place, dtype, shape):
    """A scale per slot and head, 127 for its largest number, and no other slot touched."""
    arguments = call_arguments(dtype, *shape)
    expected = expected_of(arguments)
    scales = torch.full(arguments["key_cache"].shape[:3], float("nan"))
    ours, written = run(place, with_caches_of(arguments, torch.int8, 99), None, scales, scales)
    for name, scale in zip(CACHES, written, strict=True):
        exact, stored = expected[name], ours[name]
        empty = exact.isnan().all(-1)
        assert torch.equal(scale.isnan(), empty)
        assert (stored[empty] == 99).all()
        torch.testing.assert_close(scale[~empty], exact[~empty].abs().amax(-1) / 127, rtol=1e-5, atol=0)
        error = (stored[~empty].float() * scale[~empty][:, None] - exact[~empty]).abs()
        assert (error <= scale[~empty][:, None] * 0.501).all()
        assert (stored[~empty].abs().amax(-1) == 127).all()


def test_a_head_of_zeros_and_one_with_nan_are_what_they_were(gpu, place, dtype):
    """Zeros have the scale 0; a NaN is seen in the scale, because an integer cannot show it."""
    arguments = with_caches_of(call_arguments(dtype, 2, 1, 1, 6, 4), torch.int8, 0)
    arguments["qkv"][0] = 0
    arguments["qkv"][1, :, 3] = float("nan")
    ours, scales = run(place, arguments, None, *[torch.ones(3, 1, 4)] * 2)
    for scale in scales:
        first, second = scale.flatten()[arguments["slot_mapping"]].tolist()
        assert first == 0
        assert math.isnan(second)
    assert (ours["key_cache"].flatten(0, 2)[arguments["slot_mapping"][0]] == 0).all()


def test_fp8_slots_are_divided_by_their_heads_scale_and_cut_off_at_the_largest_number(gpu, place, device):
    """Wide bounds in the interpreter, which rounds 1.99 to 1: its conversions forget to carry into the exponent."""
    arguments = call_arguments(torch.float16, 3, 2, 2, 16, 4)
    arguments["qkv"][0, -1, 0] = 5000.0
    expected, scales = expected_of(arguments)["value_cache"], torch.tensor([0.5, 2.0])
    ours, _ = run(place, with_caches_of(arguments, torch.float8_e4m3fn, 0), None, scales, scales)
    stored = ours["value_cache"].float() * scales[None, :, None, None]
    wanted = expected.nan_to_num(0.0).clamp(max=448.0 * 2)
    rounding = 0.55 if device.type == "cpu" else 0.0625
    torch.testing.assert_close(stored, wanted, rtol=rounding, atol=0.004)


def test_fp8_is_refused_by_name_where_a_gpu_has_no_such_numbers(gpu, place, monkeypatch):
    """An A100, say."""
    monkeypatch.setattr(architecture, "_current_capability", lambda: 80)
    arguments = with_caches_of(call_arguments(torch.float16, 1, 1, 1, 8, 4), torch.float8_e4m3fn, 0)
    with pytest.raises(KernelArgumentError, match=r"float8_e4m3fn needs compute capability 8.9 or later.*use int8"):
        run(place, arguments, None, torch.ones(1), torch.ones(1))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"positions": int32(0, 64)}, "positions must be 0 to 63"),
        ({"positions": int32(0, -1)}, "positions must be 0 to 63"),
        ({"slot_mapping": torch.tensor([0, 12])}, "slots must be 0 to 11"),
        ({"slot_mapping": torch.tensor([-2, 0])}, "slots must be 0 to 11"),
        ({"table": torch.zeros(64, 6)}, "table must have shape"),
        ({"qkv": torch.zeros(2, 2, 8)}, "does not fit 1 KV heads"),
        ({"qkv": torch.zeros(2, 4, 8, dtype=torch.float16)}, "qkv must be torch.float32, not torch.float16"),
        ({"value_cache": torch.zeros(3, 1, 3, 8)}, "value_cache must have shape"),
        ({"key_scales": torch.ones(1)}, "key_scales belong to caches of float8_e4m3fn and int8"),
    ],
)
def test_what_would_write_out_of_bounds_is_refused_on_a_cpu(changes, problem):
    arguments = call_arguments(torch.float32, 2, 2, 1, 8, 4) | changes
    with pytest.raises(KernelArgumentError, match=problem):
        rope_and_write_kv(**arguments)
    assert arguments["key_cache"].isnan().all()


def test_a_table_holds_cosines_and_sines_times_the_factor():
    table = rope_table(3, torch.tensor([1.0, 0.5]), factor=2.0)
    angles = torch.tensor([[0, 0], [1, 0.5], [2, 1]])
    torch.testing.assert_close(table, 2 * torch.cat((angles.cos(), angles.sin()), dim=1))

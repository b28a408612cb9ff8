"""The KV cache of a device: sizes as they are planned, scales where they belong, and what is measured fits.

With headroom, whatever a model makes of tokens.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.registry import twin_model
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, MatrixKind, Numerics
from paceline_executor.runner.device.kv_scales import measured_scales, scales_of_maxima
from paceline_executor.runner.kv_cache import allocate_on_device, kv_geometry, set_scales
from paceline_executor.weights.checkpoint import KvScales
from paceline_executor.weights.stored_tensor import FloatType
from random_models import TINY_CONFIG, RandomCheckpoint

CPU = torch.device("cpu")
LAYERS, HEADS, HEAD_DIM = TINY_CONFIG.num_layers, TINY_CONFIG.num_kv_heads, TINY_CONFIG.head_dim


def geometry(kv):
    """Three blocks of 16."""
    return kv_geometry(TINY_CONFIG, 3, 16, Numerics(MatrixKind.DENSE, kv, FloatType.BFLOAT16))


def scales(key, value):
    """The same for all heads."""
    return KvScales(*(np.full((LAYERS, HEADS), number, np.float32) for number in (key, value)))


@pytest.mark.parametrize("kv", KvDtype)
def test_a_cache_takes_what_was_planned_for_it(kv):
    shape = geometry(kv)
    cache = allocate_on_device(shape, kv, CPU)
    tensors = [
        tensor for tensor in (cache.keys, cache.values, cache.key_scales, cache.value_scales) if tensor is not None
    ]
    of_heads = 2 * LAYERS * HEADS * 4 if kv is KvDtype.FP8_E4M3 else 0

    assert sum(tensor.nbytes for tensor in tensors) == shape.num_blocks * shape.bytes_per_block + of_heads
    assert cache.keys.shape == cache.values.shape == (LAYERS, 3, HEADS, 16, HEAD_DIM)
    assert not cache.keys.float().any()


def test_a_layers_part_has_its_own_scales():
    shape = geometry(KvDtype.INT8)
    assert allocate_on_device(shape, KvDtype.INT8, CPU).layer(1).key_scales.shape == (3, HEADS, 16)
    assert allocate_on_device(geometry(KvDtype.FP8_E4M3), KvDtype.FP8_E4M3, CPU).layer(1).key_scales.shape == (HEADS,)
    assert allocate_on_device(geometry(KvDtype.BFLOAT16), KvDtype.BFLOAT16, CPU).layer(1).key_scales is None


def test_scales_are_one_until_others_are_known():
    shape = geometry(KvDtype.FP8_E4M3)
    assert torch.equal(allocate_on_device(shape, KvDtype.FP8_E4M3, CPU).key_scales, torch.ones(LAYERS, HEADS))
    cache = allocate_on_device(shape, KvDtype.FP8_E4M3, CPU, scales(0.5, 0.25))
    addresses = (cache.key_scales.data_ptr(), cache.value_scales.data_ptr())
    assert (cache.key_scales.max(), cache.value_scales.min()) == (0.5, 0.25)
    set_scales(cache, scales(2.0, 4.0))
    assert (cache.key_scales.max(), cache.value_scales.min()) == (2.0, 4.0)
    assert addresses == (cache.key_scales.data_ptr(), cache.value_scales.data_ptr())  # captured steps go on with them


@pytest.mark.parametrize("kv", [KvDtype.INT8, KvDtype.BFLOAT16])
def test_scales_of_heads_are_for_float8_only(kv):
    """int8 measures every slot anew."""
    with pytest.raises(TypeError, match="no scales of heads"):
        set_scales(allocate_on_device(geometry(kv), kv, CPU), scales(1.0, 1.0))


numbers = st.floats(0, width=32) | st.sampled_from([np.nan, np.inf])
maxima = arrays(np.float32, (3, 2), elements=numbers)


@given(maxima)
def test_what_was_seen_fits_with_headroom(seen):
    """Four times as much is still a finite float8, and is stored to three bits; nothing seen is a scale of 1."""
    found = scales_of_maxima(seen)
    assert (found.dtype, found.shape) == (np.float32, (3, 2))
    assert np.isfinite(found).all()
    assert (found > 0).all()
    is_nothing = ~np.isfinite(seen) | (seen == 0)
    assert (found[is_nothing] == 1).all()
    ordinary = ~is_nothing & (seen > 1e-30) & (seen < 1e30)
    for times in (1.0, 4.0):
        numbers = torch.from_numpy(seen[ordinary].astype(np.float64) * times * (1 - 1e-6))
        factors = torch.from_numpy(found[ordinary]).double()
        kept = (numbers / factors).to(torch.float8_e4m3fn).double() * factors
        assert torch.allclose(kept, numbers, rtol=1 / 16, atol=0)


class LouderValues(HostWeights):
    """Weights whose first layer makes values of the last KV head a thousand times larger."""

    def linear(self, names, bias=None):
        """Values are behind queries and keys."""
        layer = super().linear(names, bias)
        if "layers.0.self_attn.v_proj" in names[-1]:
            layer.weight[-HEAD_DIM:] *= 1000
        return layer


def measured(model, max_len=256):
    """The scales of keys and values, in float32."""
    return measured_scales(model, TINY_CONFIG, FLOAT32_NUMERICS, CPU, 16, max_len)


@pytest.mark.parametrize("max_len", [256, 17])
def test_every_head_of_every_layer_has_a_scale_of_what_it_makes(max_len):
    quiet = measured(twin_model(RandomCheckpoint(), 256), max_len)
    again = measured(twin_model(RandomCheckpoint(), 256), max_len)
    loud = measured(LlamaModel(LouderValues(RandomCheckpoint()), 256), max_len)

    assert np.array_equal(quiet.keys, again.keys)
    assert np.array_equal(quiet.values, again.values)
    assert quiet.keys.shape == quiet.values.shape == (LAYERS, HEADS)
    assert (quiet.keys != 1).all()
    np.testing.assert_allclose(loud.values[0, 1], 1000 * quiet.values[0, 1], rtol=1e-5)
    assert loud.values[0, 0] == quiet.values[0, 0]
    assert np.array_equal(loud.keys[0], quiet.keys[0])

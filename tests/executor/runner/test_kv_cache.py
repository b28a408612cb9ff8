"""The KV cache of a device: sizes as they are planned, scales where they belong, and what is measured fits."""

import numpy as np
import pytest
import torch

from paceline_executor.device_numerics import DeviceNumerics
from paceline_executor.numerics import KvDtype
from paceline_executor.runner.kv_cache import allocate_on_device, kv_geometry, set_scales
from paceline_executor.testing.models import TINY_CONFIG
from paceline_executor.upload.matrices import MatrixKind
from paceline_executor.weights.checkpoint import KvScales

CPU = torch.device("cpu")
LAYERS, HEADS, HEAD_DIM = TINY_CONFIG.num_layers, TINY_CONFIG.num_kv_heads, TINY_CONFIG.head_dim


def geometry(kv):
    """Three blocks of 16."""
    return kv_geometry(TINY_CONFIG, 3, 16, DeviceNumerics(torch.bfloat16, MatrixKind.DENSE, kv))


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

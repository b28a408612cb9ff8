"""Scales of float8 keys and values: what a model makes of tokens fits, with headroom."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paceline_executor.device_numerics import TWIN_NUMERICS
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.registry import twin_model
from paceline_executor.runner.device.kv_scales import measured_scales, scales_of_maxima
from paceline_executor.testing.models import TINY_CONFIG, RandomCheckpoint

CPU = torch.device("cpu")


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
            layer.weight[-TINY_CONFIG.head_dim :] *= 1000
        return layer


def measured(model, max_len=256):
    """The scales of keys and values, in float32."""
    return measured_scales(model, TINY_CONFIG, TWIN_NUMERICS, CPU, 16, max_len)


@pytest.mark.parametrize("max_len", [256, 17])
def test_every_head_of_every_layer_has_a_scale_of_what_it_makes(max_len):
    quiet = measured(twin_model(RandomCheckpoint(), 256), max_len)
    again = measured(twin_model(RandomCheckpoint(), 256), max_len)
    loud = measured(LlamaModel(LouderValues(RandomCheckpoint()), 256), max_len)

    assert np.array_equal(quiet.keys, again.keys)
    assert np.array_equal(quiet.values, again.values)
    assert quiet.keys.shape == quiet.values.shape == (TINY_CONFIG.num_layers, TINY_CONFIG.num_kv_heads)
    assert (quiet.keys != 1).all()
    np.testing.assert_allclose(loud.values[0, 1], 1000 * quiet.values[0, 1], rtol=1e-5)
    assert loud.values[0, 0] == quiet.values[0, 0]
    assert np.array_equal(loud.keys[0], quiet.keys[0])

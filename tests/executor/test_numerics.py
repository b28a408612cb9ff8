"""In which numbers a model is computed: what the options come to, what they refuse, and what the numbers cost."""

from dataclasses import replace

import pytest

from paceline_executor.config import parse_config
from paceline_executor.errors import LimitError
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, Numerics, Quantization, WeightKind, choose_numerics
from paceline_executor.testing.models import TINY_CONFIG

# Sizes that groups of 32 divide, as those of all common models; the tiny one's heads have 16 dimensions.
WIDE_CONFIG = replace(TINY_CONFIG, head_dim=32)
PACKED_FLOAT16 = Numerics(WeightKind.PACKED, KvDtype.FLOAT16)
PACKED_INT8 = Numerics(WeightKind.PACKED, KvDtype.INT8)


@pytest.mark.parametrize(
    ("quantization", "kv_dtype", "numerics"),
    [
        (Quantization.AUTO, None, PACKED_INT8),
        (Quantization.AUTO, KvDtype.FLOAT16, PACKED_FLOAT16),
        (Quantization.AUTO, KvDtype.INT8, PACKED_INT8),
        (Quantization.NONE, None, FLOAT32_NUMERICS),
        (Quantization.NONE, KvDtype.FLOAT32, FLOAT32_NUMERICS),
    ],
)
def test_options_that_go_together_are_followed(quantization, kv_dtype, numerics):
    """Packed weights and int8 keys and values, unless something else is asked for."""
    assert choose_numerics(quantization, kv_dtype, WIDE_CONFIG, 16) == numerics


@pytest.mark.parametrize(("block_size", "head_dim"), [(8, 32), (24, 32), (1, 32), (16, 544)])
def test_keys_and_values_are_float16_where_blocks_or_heads_do_not_allow_int8(block_size, head_dim):
    """Asked for int8, the sentence says what that needs."""
    model = replace(WIDE_CONFIG, head_dim=head_dim)
    assert choose_numerics(Quantization.AUTO, None, model, block_size) == PACKED_FLOAT16
    with pytest.raises(LimitError, match=f"--block-size that 16 divides .* not {block_size} and {head_dim}"):
        choose_numerics(Quantization.AUTO, KvDtype.INT8, model, block_size)


@pytest.mark.parametrize("size", ["hidden_size", "intermediate_size", "head_dim"])
@pytest.mark.parametrize("kv_dtype", [None, KvDtype.FLOAT32])
def test_a_model_whose_sizes_groups_do_not_divide_is_computed_in_float32(size, kv_dtype):
    """Groups have 32 inputs."""
    odd = replace(WIDE_CONFIG, **{size: 80})
    assert choose_numerics(Quantization.AUTO, kv_dtype, odd, 16) == FLOAT32_NUMERICS


@pytest.mark.parametrize("kv_dtype", [KvDtype.FLOAT16, KvDtype.INT8])
def test_small_keys_beside_float32_weights_are_refused(kv_dtype):
    """The sentence names what leads to float32, the option or the model's sizes, and what to leave out."""
    with pytest.raises(LimitError, match=f"--quantization none .* leave --kv-cache-dtype {kv_dtype.value} out"):
        choose_numerics(Quantization.NONE, kv_dtype, WIDE_CONFIG, 16)
    with pytest.raises(LimitError, match=rf"sizes \(64, 96, 16\) .* leave --kv-cache-dtype {kv_dtype.value} out"):
        choose_numerics(Quantization.AUTO, kv_dtype, TINY_CONFIG, 16)


def test_float32_keys_beside_packed_weights_are_refused():
    with pytest.raises(LimitError, match="--kv-cache-dtype float32 needs --quantization none"):
        choose_numerics(Quantization.AUTO, KvDtype.FLOAT32, WIDE_CONFIG, 16)


@pytest.mark.parametrize(
    ("numerics", "bytes_per_token"),
    [(FLOAT32_NUMERICS, 2 * 2 * 2 * 128), (PACKED_FLOAT16, 2 * 2 * 2 * 64), (PACKED_INT8, 2 * 2 * 2 * 36)],
)
def test_a_token_takes_its_keys_and_values_in_all_layers(numerics, bytes_per_token):
    """Two layers, two KV heads, 32 dimensions; an int8 slot has a scale of four bytes."""
    assert numerics.bytes_per_token(WIDE_CONFIG) == bytes_per_token


def test_a_weight_takes_four_bytes_or_one_and_its_part_of_a_scale():
    """Groups of 32 share a float16."""
    assert FLOAT32_NUMERICS.max_bytes_per_weight() == 4
    assert PACKED_INT8.max_bytes_per_weight() * 32 == 34


@pytest.mark.parametrize(
    ("arguments", "quantization", "kv_dtype"),
    [
        ([], Quantization.AUTO, None),
        (["--quantization", "none", "--kv-cache-dtype", "auto"], Quantization.NONE, None),
        (["--quantization", "auto", "--kv-cache-dtype", "int8"], Quantization.AUTO, KvDtype.INT8),
        (["--kv-cache-dtype", "float16"], Quantization.AUTO, KvDtype.FLOAT16),
        (["--kv-cache-dtype", "float32"], Quantization.AUTO, KvDtype.FLOAT32),
    ],
)
def test_options_are_read_as_written(arguments, quantization, kv_dtype):
    config = parse_config(arguments)
    assert (config.quantization, config.kv_cache_dtype) == (quantization, kv_dtype)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--quantization", "int4"], "'int4' is not one of auto, none"),
        (["--kv-cache-dtype", "fp8"], "float32, float16, int8"),
    ],
)
def test_an_option_that_means_nothing_is_refused_with_what_there_is(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_config(arguments)
    assert exit_info.value.code == 2
    assert sentence in capsys.readouterr().err

"""decoder: what misfits is refused, with its name, before anything is written."""

import dataclasses

import pytest
import torch

from paceline_kernels.decoder import AuxHidden, Decoder, DecoderBatch
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.quantized_linear import WeightFormat
from paceline_kernels.testing.decoders import (
    HEAD_DIM,
    HIDDEN,
    NUM_KV_HEADS,
    NUM_LAYERS,
    NUM_POSITIONS,
    VOCAB,
    llama_weights,
)
from paceline_kernels.testing.packed import random_packed_weight
from paceline_kernels.testing.tensors import int32

NUM_BLOCKS, BLOCK_SIZE = 64, 16
WEIGHTS = llama_weights()
LAYER = WEIGHTS.layers[0]


SOUND = {
    "token_ids": int32(5, 6),
    "positions": int32(0, 1),
    "slot_mapping": torch.tensor([48, 49]),
    "cu_seqlens": int32(0, 2),
    "context_lens": int32(2),
    "block_tables": int32(3)[None],
    "logit_tokens": int32(1),
}


def refused(match, keys=None, values=None, weights=WEIGHTS, aux=None, **changes):
    """The sound batch with these changes is refused, and nothing is written."""
    shape = (NUM_LAYERS, NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    fresh = [torch.full(shape, float("nan"), dtype=torch.float16) for _ in range(2)]
    caches = [fresh[0] if keys is None else keys, fresh[1] if values is None else values]
    with pytest.raises(KernelArgumentError, match=match):
        Decoder(weights).forward(DecoderBatch(**(SOUND | changes)), *caches, aux=aux)
    assert all(cache.isnan().all() for cache in fresh)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("token_ids", int32(5, VOCAB), "token ids must be 0 to 99"),
        ("token_ids", int32(-1, 5), "token ids must be 0 to 99"),
        ("positions", int32(0, NUM_POSITIONS), "positions must be 0 to 599"),
        ("positions", int32(-1, 0), "positions must be 0 to 599"),
        ("slot_mapping", torch.tensor([0, NUM_BLOCKS * BLOCK_SIZE]), "slots must be 0 to 1023"),
        ("slot_mapping", torch.tensor([-1, 0]), "slots must be 0 to 1023"),
        ("logit_tokens", int32(2), "must be 0 to 1"),
        ("logit_tokens", int32(-1), "must be 0 to 1"),
        ("block_tables", int32(NUM_BLOCKS)[None], "row 0"),
        ("block_tables", int32(-1)[None], "row 0"),
        ("context_lens", int32(17), "row 0"),  # more than its blocks hold
        ("context_lens", int32(1), "row 0"),  # less than it computes
        ("cu_seqlens", int32(0, 1), "must run from 0 to 2"),
        ("cu_seqlens", int32(0, 0), "row 0"),
    ],
)
def test_an_index_that_names_nothing_is_refused(name, value, problem):
    """Compiled code never sees it."""
    refused(problem, **{name: value})


@pytest.mark.parametrize(
    ("layers", "states", "problem"),
    [
        ((0,), torch.zeros(2, 1, HIDDEN), "aux.layers must be 1 to 1, each once"),  # nothing flows between layers there
        ((NUM_LAYERS,), torch.zeros(2, 1, HIDDEN), "aux.layers must be 1 to 1"),
        ((1, 1), torch.zeros(2, 2, HIDDEN), "each once"),
        ((1,), torch.zeros(3, 1, HIDDEN), "aux.states must have shape"),
        ((1,), torch.zeros(2, 2, HIDDEN), "aux.states must have shape"),
        ((1,), torch.zeros(2, 1, HIDDEN).double(), "aux.states must be torch.float32"),
    ],
)
def test_hidden_states_without_a_place_are_refused(layers, states, problem):
    refused(problem, aux=AuxHidden(layers, states))


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("token_ids", torch.tensor([5, 6]), "token_ids must be torch.int32"),
        ("token_ids", int32(5, 0, 6, 0)[::2], "token_ids must be contiguous"),
        ("positions", int32(0), "positions must have shape"),
        ("slot_mapping", int32(48, 49), "slot_mapping must be torch.int64"),
        ("cu_seqlens", int32(0, 1, 2), "cu_seqlens must have shape"),
        ("context_lens", torch.tensor([2]), "context_lens must be torch.int32"),
        ("block_tables", int32(3), "block_tables must have shape"),
        ("logit_tokens", int32(1)[None], "logit_tokens must have shape"),
        ("keys", torch.zeros(2, 64, 1, 16, 32), "keys must be float16 or int8, not torch.float32"),
        ("keys", torch.zeros(2, 64, 1, 16, 36, dtype=torch.int8), "values must be torch.int8"),
        ("keys", torch.zeros(2, 64, 1, 16, 32, dtype=torch.int8), "keys must have shape"),  # no room for scales
        ("keys", torch.zeros(3, 64, 1, 16, 32, dtype=torch.float16), "keys must have shape"),
        ("keys", torch.zeros(2, 64, 2, 16, 32, dtype=torch.float16), "keys must have shape"),
        ("values", torch.zeros(2, 63, 1, 16, 32, dtype=torch.float16), "values must have shape"),
        ("values", torch.zeros(2, 64, 1, 32, 16, dtype=torch.float16).transpose(3, 4), "values must be contiguous"),
    ],
)
def test_a_tensor_of_another_kind_is_refused(name, value, problem):
    refused(problem, **{name: value})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layers": (dataclasses.replace(LAYER, qkv=LAYER.down),)}, r"qkv has shape \[96, 64\]"),
        ({"layers": (dataclasses.replace(LAYER, attention_output=LAYER.qkv),)}, "attention_output has shape"),
        ({"layers": (dataclasses.replace(LAYER, gate_up=LAYER.qkv),)}, "gate_up has shape"),
        ({"layers": (LAYER, dataclasses.replace(LAYER, down=LAYER.attention_output))}, "down has shape"),
        ({"lm_head": LAYER.qkv}, "lm_head has shape"),
        ({"final_norm": torch.ones(95)}, "final_norm must be 96 float32 numbers"),
        ({"layers": (dataclasses.replace(LAYER, attention_norm=torch.ones(95)),)}, "attention_norm must be 96"),
        ({"layers": (dataclasses.replace(LAYER, qkv_bias=torch.ones(96)),)}, "qkv_bias must be 160 float32"),
        ({"layers": (dataclasses.replace(LAYER, down_bias=torch.ones(96).double()),)}, "down_bias must be 96 float32"),
        ({"layers": (LAYER, dataclasses.replace(LAYER, down_bias=torch.ones(96)))}, "not all layers have the same"),
        ({"layers": (dataclasses.replace(LAYER, rope_table=1),)}, "there is no rotary table 1"),
        ({"layers": (dataclasses.replace(LAYER, window=0),)}, "a window of 0 positions shows nothing"),
        ({"rope_tables": torch.ones(1, 600, 30)}, "rotary tables do not fit"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(changes, problem):
    with pytest.raises(KernelArgumentError, match=problem):
        dataclasses.replace(WEIGHTS, **changes)


def test_int8_blocks_that_no_tile_fits_are_refused():
    caches = [torch.zeros(2, 64, 1, 8, 36, dtype=torch.int8) for _ in range(2)]
    refused("int8 blocks of 8 slots of 32 are not supported", *caches)


def test_heads_of_a_size_that_groups_do_not_divide_are_refused():
    """48 is no multiple of 32: the inputs of a group would belong to two heads."""
    with pytest.raises(KernelArgumentError, match="must be multiples of 32"):
        dataclasses.replace(
            WEIGHTS,
            layers=(dataclasses.replace(LAYER, qkv=random_packed_weight(4 * 48, 96, WeightFormat.INT4, 1)),),
            num_heads=2,
            head_dim=48,
            rope_tables=torch.ones(1, 600, 48),
        )


def test_weights_on_another_device_are_refused():
    elsewhere = dataclasses.replace(WEIGHTS.embedding, data=WEIGHTS.embedding.data.to("meta"))
    with pytest.raises(UnsupportedDeviceError, match="decoder has no implementation for device 'meta'"):
        Decoder(dataclasses.replace(WEIGHTS, embedding=elsewhere))

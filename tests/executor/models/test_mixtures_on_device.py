"""Mixtures of experts on a device: its kernels, interpreted, give the logits that the CPU has in float32.

In `make test` each part of one is in one case: Qwen 2 MoE has a shared expert with a gate, GLM-4.5 scores by sigmoids
and heads that are rotated in part, OLMoE norms over all heads.
"""

import importlib.util
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from structlog.testing import capture_logs

from interpreted_models import (
    DEVICE,
    MAX_MODEL_LEN,
    all_steps,
    assert_close,
    average,
    batch,
    computed_in,
    config_of,
    errors,
    logits_of,
    on_cpu,
    on_device,
    two_steps,
)
from joined_ranks import JoinedCollectives
from kernel_rig.turns import Turns
from paceline_executor.models.registry import upload_model
from paceline_executor.numerics import MatrixKind
from paceline_executor.weights import load_checkpoint
from paceline_executor.weights.checkpoint import Mixture
from paceline_executor.weights.hf.config import read_hf_config
from paceline_executor.weights.sharded import ShardedCheckpoint
from paceline_kernels.devices import cpu_stands_for_gpu
from paceline_kernels.grouped_linear import GroupedWeight
from paceline_kernels.linear import Splits
from paceline_kernels.routing import Routing
from paceline_kernels.scaled_linear import ScaledWeight
from quantised_files import VARIANTS, written
from random_models import MIXTURE_CONFIGS, RandomCheckpoint, gguf_mixture

if importlib.util.find_spec("triton") is None:  # it is for Linux
    pytest.skip("needs Triton", allow_module_level=True)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.usefixtures("ieee_arithmetic"),
]

slow = pytest.mark.slow
FLOAT32, FLOAT16, AS_STORED = torch.float32, torch.float16, MatrixKind.AS_STORED
# A layer, as config.json says it; sizes that groups of 32 divide.
QWEN3_MOE = {"model_type": "qwen3_moe", "vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
QWEN3_MOE |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4}
QWEN3_MOE |= {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "max_position_embeddings": 512}


def families_of(*chosen):
    """Those of `make test`, and the others."""
    return [pytest.param(name, marks=[] if name in chosen else [slow]) for name in MIXTURE_CONFIGS]


def one_layer(experts, **more):
    return replace(MIXTURE_CONFIGS["mixtral"], num_layers=1, experts=experts, sliding_window=None, **more)


def assert_as_on_a_cpu(checkpoint, kind=AS_STORED):
    """In float32."""
    found = on_device(checkpoint, FLOAT32, two_steps(), kind)
    assert_close(found, on_cpu(checkpoint, two_steps()), FLOAT32)


@pytest.mark.parametrize("family", families_of("qwen2moe", "glm4moe", "olmoe"))
def test_logits_are_those_of_the_cpu(family):
    checkpoint, batches = RandomCheckpoint(config_of(family)), all_steps()
    assert_close(on_device(checkpoint, FLOAT32, batches), on_cpu(checkpoint, batches), FLOAT32)


@pytest.mark.parametrize("family", families_of("qwen2moe", "glm4moe"))
def test_in_16_bits_logits_are_near_those_of_the_cpu(family):
    """Off by what rounding costs: routers, whose logits stay float32, choose the same experts."""
    checkpoint, batches = RandomCheckpoint(config_of(family)), two_steps()
    assert_close(on_device(checkpoint, FLOAT16, batches), on_cpu(checkpoint, batches), FLOAT16)


class Chosen(RandomCheckpoint):
    """Of eight experts the bias of the choice leaves these."""

    def __init__(self, *experts):
        super().__init__(config_of("glm4moe"))
        self._bias = np.full(8, -9.0, np.float32)
        self._bias[list(experts)] = 0

    def tensor(self, name):
        return self._bias if name.endswith("e_score_correction_bias") else super().tensor(name)


@pytest.mark.parametrize("experts", [(5, 6), pytest.param((0, 2, 3), marks=slow)])
def test_experts_may_have_all_tokens_or_none(experts):
    assert_as_on_a_cpu(Chosen(*experts))


def test_a_token_alone_goes_another_way_to_the_same_logits():
    """By the kernel of few slots."""
    checkpoint, steps = RandomCheckpoint(config_of("mixtral")), [batch([(0, 1)]), batch([(1, 2)], max_query_len=1)]
    assert_close(on_device(checkpoint, FLOAT32, steps), on_cpu(checkpoint, steps), FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURE_CONFIGS)
def test_float8_costs_what_rounding_does(family):
    """Routers, shared gates and embeddings stay what they are."""
    checkpoint = RandomCheckpoint(config_of(family))
    off = errors(on_device(checkpoint, FLOAT32, two_steps(), MatrixKind.FLOAT8), on_cpu(checkpoint, two_steps()))
    assert 1e-4 < average(off) < 0.3  # where a choice is another one, a token's logits are


def experts_on_device(checkpoint):
    """Gates and ups, and downs, of the first layer, and what was widened."""
    with cpu_stands_for_gpu(), capture_logs() as events:
        model = upload_model(checkpoint, DEVICE, MAX_MODEL_LEN, computed_in(FLOAT32, AS_STORED))
    experts = model._layers[0].feed_forward
    return experts.gate_up, experts.down, [each for each in events if each["event"] == "weights_widened"]


def quantised(folder, name):
    """A mixture as a tool of this name writes it."""
    (folder / "config.json").write_text(json.dumps(QWEN3_MOE))
    return load_checkpoint(written(VARIANTS[name], read_hf_config(folder / "config.json"), QWEN3_MOE).save(folder))


FP8_BLOCKS = "fp8 blocks, bfloat16 scales, some left as they were"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("awq", GroupedWeight),
        ("w8a8", ScaledWeight),
        ("gptq act order", torch.Tensor),
        *(
            pytest.param(name, kind, marks=slow)
            for kind, names in {
                GroupedWeight: ("gptq", "gptq asym", "w4a16", "mxfp4", FP8_BLOCKS, "gptq 8 bits"),
                ScaledWeight: ("fbgemm_fp8", "fp8 of one scale"),
                torch.Tensor: ("nf4",),
            }.items()
            for name in names
        ),
    ],
)
def test_experts_stay_as_a_folder_has_them(tmp_path, name, kind):
    """All but those whose inputs are in orders of their own, or codes places in tables of their own, which the log
    names.
    """
    checkpoint = quantised(tmp_path, name)
    gate_up, down, widened = experts_on_device(checkpoint)
    assert (type(gate_up), type(down)) == (kind, kind)
    assert len(widened) == (2 if kind is torch.Tensor else 0)
    assert_as_on_a_cpu(checkpoint)


Q4_0, Q4_1, Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0


@pytest.mark.parametrize(
    ("kind", "downs", "size", "stays"),
    [
        (Q4_0, Q8_0, 96, True),
        pytest.param(Q4_1, Q4_1, 32, True, marks=slow),
        pytest.param(Q4_0, GGMLQuantizationType.F16, 96, False, marks=slow),
    ],
)
def test_experts_stay_in_the_blocks_of_a_file_if_both_products_do(tmp_path, kind, downs, size, stays):
    config = one_layer(Mixture(Routing(4, 2), size, (True,)))
    parts = gguf_mixture(RandomCheckpoint(config), kind, downs)
    checkpoint = load_checkpoint(parts.write(tmp_path / "mixture.gguf"))
    gate_up, down, _ = experts_on_device(checkpoint)
    expected = GroupedWeight if stays else torch.Tensor
    assert (type(gate_up), type(down)) == (expected, expected)
    assert_as_on_a_cpu(checkpoint)


SLICES = one_layer(Mixture(Routing(4, 2), 1024, (True,)), num_kv_heads=4)
GROUPS = replace(config_of("qwen2moe"), num_layers=1, num_kv_heads=4)
GROUPS = replace(GROUPS, experts=replace(GROUPS.experts, sparse_layers=(True,)))


@pytest.mark.parametrize(
    ("config", "splits"),
    [
        pytest.param(GROUPS, Splits.FIXED, id="experts, fixed"),
        pytest.param(SLICES, Splits.FIXED, id="slices, fixed"),
        pytest.param(GROUPS, Splits.EVEN, id="experts", marks=slow),
        pytest.param(SLICES, Splits.EVEN, id="slices", marks=slow),
    ],
)
def test_two_ranks_have_the_logits_of_one_and_its_bits_with_fixed_splits(config, splits):
    """A rank has some experts, or a slice of each, and its part of a shared one. In 16 bits where it shows that what is
    summed is not rounded before.
    """
    dtype = FLOAT16 if splits is Splits.FIXED else FLOAT32
    checkpoint, batches = RandomCheckpoint(config), two_steps(splits)
    alone = on_device(checkpoint, dtype, batches, MatrixKind.DENSE)
    found = on_two_ranks(checkpoint, dtype, batches, MatrixKind.DENSE)
    assert torch.equal(*found)
    assert_close(found[0], alone, dtype)
    assert splits is Splits.EVEN or torch.equal(found[0], alone)


def on_two_ranks(checkpoint, dtype, batches, kind):
    """The logits of each."""
    turns, numerics = Turns(2), computed_in(dtype, kind)

    def of_rank(rank):
        part, sums = ShardedCheckpoint(checkpoint, rank, 2), JoinedCollectives(turns, rank)
        with turns.turn():
            model = upload_model(part, DEVICE, MAX_MODEL_LEN, numerics, collectives=sums)
            return logits_of(model, part.config, dtype, batches)

    with cpu_stands_for_gpu(), ThreadPoolExecutor(2) as ranks:
        return [logits.float() for logits in ranks.map(of_rank, range(2))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq", "w8a8", FP8_BLOCKS])
def test_two_ranks_have_quantised_experts_as_a_folder_has_them(tmp_path, name):
    checkpoint = quantised(tmp_path, name)
    found = on_two_ranks(checkpoint, FLOAT32, two_steps(), AS_STORED)
    assert torch.equal(*found)
    assert_close(found[0], on_cpu(checkpoint, two_steps()), FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURE_CONFIGS)
def test_with_fixed_splits_a_tokens_bits_do_not_depend_on_its_mates(monkeypatch, family):
    """Nor on how its prompt is cut."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("ik,kj->ij", a, b, dtype=dtype))
    checkpoint = RandomCheckpoint(config_of(family))
    together = on_device(checkpoint, FLOAT16, two_steps(Splits.FIXED))
    chunks = [batch([part], splits=Splits.FIXED) for part in ((0, 5), (5, 6), (6, 13))]
    # Rows lie in other blocks, of which a token's bits know nothing.
    alone = on_device(checkpoint, FLOAT16, chunks)
    assert torch.equal(alone[:12], together[:12])
    assert torch.equal(alone[12], together[16])

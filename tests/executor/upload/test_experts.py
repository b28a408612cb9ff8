"""Experts of a layer arrive in place: one tensor of all, of the size that is planned, and no copy of it."""

import json
from dataclasses import replace

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline_executor.models.layers import bytes_of
from paceline_executor.models.shapes import ShapeWeights
from paceline_executor.models.uploaded import UploadedWeights
from paceline_executor.numerics import KvDtype, MatrixKind, Numerics
from paceline_executor.upload.grouping import put, reordered, stack_of
from paceline_executor.upload.matrices import Uploader
from paceline_executor.upload.staging import HostTransfer, Staging
from paceline_executor.weights import load_checkpoint
from paceline_executor.weights.checkpoint import Mixture
from paceline_executor.weights.hf.config import read_hf_config
from paceline_executor.weights.stored_tensor import FloatType
from paceline_kernels.grouped_linear import Codes, GroupedLayout, new_grouped, pack_grouped, unpack_grouped
from paceline_kernels.routing import Routing
from quantised_files import VARIANTS, written
from random_models import MIXTURE_CONFIGS, RandomCheckpoint, gguf_mixture

slow = pytest.mark.slow
CPU = torch.device("cpu")
SPARSE = replace(MIXTURE_CONFIGS["mixtral"], experts=Mixture(Routing(8, 2), 128, (True, True)), hidden_size=128)
QWEN3_MOE = {"model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 96, "head_dim": 32}
QWEN3_MOE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8}
QWEN3_MOE |= {"num_experts_per_tok": 2, "moe_intermediate_size": 128, "max_position_embeddings": 512}


def checkpoint_of(folder, stored):
    """A mixture that a tool of this name wrote, in blocks of this type, or in floats."""
    if stored in GGMLQuantizationType.__members__:
        parts = gguf_mixture(RandomCheckpoint(SPARSE), GGMLQuantizationType[stored])
        return load_checkpoint(parts.write(folder / "mixture.gguf"))
    if stored == "floats":
        return RandomCheckpoint(SPARSE)
    (folder / "config.json").write_text(json.dumps(QWEN3_MOE))
    return load_checkpoint(written(VARIANTS[stored], read_hf_config(folder / "config.json"), QWEN3_MOE).save(folder))


class Allocations(TorchDispatchMode):
    """The bytes of each storage that came about."""

    def __init__(self):
        super().__init__()
        self._kept, self.sizes = [], {}

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        for tensor in (one for one in tree_leaves(result) if isinstance(one, torch.Tensor)):
            self._kept.append(tensor)  # or another one may come to lie there
            self.sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        ("floats", MatrixKind.DENSE),
        ("floats", MatrixKind.FLOAT8),
        ("awq", MatrixKind.AS_STORED),
        ("Q4_0", MatrixKind.AS_STORED),
        pytest.param("w8a8", MatrixKind.AS_STORED, marks=slow),
        pytest.param("gptq act order", MatrixKind.AS_STORED, marks=slow),
        pytest.param("Q8_0", MatrixKind.AS_STORED, marks=slow),
    ],
)
def test_a_layers_experts_are_there_once_and_of_the_planned_size(tmp_path, stored, kind):
    checkpoint = checkpoint_of(tmp_path, stored)
    config, types = checkpoint.config, checkpoint.stored_types
    with Staging(HostTransfer(), 40_000, num_readers=1) as staging, Allocations() as allocations:
        weights = UploadedWeights(Uploader(checkpoint, CPU, torch.float16, staging), kind)
        experts = weights.experts(1)
    large = [size for size in allocations.sizes.values() if size > max(map(bytes_of, experts)) / 2.5]
    assert len(large) == len(experts)
    shapes = ShapeWeights(config, torch.float16, kind, types).experts(1)
    assert [bytes_of(each) for each in shapes] == [bytes_of(each) for each in experts]
    planned = Numerics(kind, KvDtype.FLOAT16, FloatType.FLOAT16)
    # Half as many in both layers lack as much as one layer has, with its router.
    half = replace(config, experts=replace(config.experts, routing=replace(config.experts.routing, num_experts=4)))
    of_layer = planned.weight_bytes(config, types) - planned.weight_bytes(half, types)
    assert of_layer == sum(map(bytes_of, experts)) + 2 * 8 * config.hidden_size


def random_weight(*, seed, zeros=None, group=32, num_outputs=32):
    """In groups, whose zeros, if any, are all this one."""
    generator = torch.Generator().manual_seed(seed)
    layout = GroupedLayout(num_outputs, 64, group, Codes.INT4, 8)
    weight = new_grouped(layout, CPU, torch.float16, has_zeros=zeros is not None)
    codes = torch.randint(16, (num_outputs, 64), generator=generator).to(torch.uint8)
    of_groups = num_outputs, 64 // group
    scales = torch.rand(of_groups, generator=generator)
    pack_grouped(weight, slice(None), codes, scales, None if zeros is None else torch.full(of_groups, zeros))
    return weight


def numbers_of(weight):
    return unpack_grouped(weight, torch.float32)


@pytest.mark.parametrize("zeros", [(None, None, None), (None, 5, None), (7, None, 3)])
def test_a_stack_has_zeros_once_one_of_its_weights_has(zeros):
    """Where others have none these are the middle."""
    weights = [random_weight(seed=seed, zeros=of_one) for seed, of_one in enumerate(zeros)]
    stack = stack_of(weights[0], 3)
    for place, weight in enumerate(weights):
        stack = put(stack, place, weight)
    assert (stack.zeros is None) == (zeros == (None, None, None))
    assert torch.equal(numbers_of(stack), torch.cat([numbers_of(weight) for weight in weights]))


def test_weights_of_other_groups_are_in_no_stack():
    assert put(stack_of(random_weight(seed=0), 2), 1, random_weight(seed=1, group=64)) is None


@pytest.mark.parametrize("zeros", [None, 5])
def test_outputs_may_come_in_another_order(zeros):
    """Also where the last tile is not full."""
    weight, rows = random_weight(seed=0, zeros=zeros, num_outputs=40), torch.randperm(40)
    assert torch.equal(numbers_of(reordered(weight, rows)), numbers_of(weight)[rows])

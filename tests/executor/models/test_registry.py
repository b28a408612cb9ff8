"""Which model computes a checkpoint: by its architecture and its weights; one we do not compute is named."""

import pytest

from paceline_executor.errors import UnsupportedModelError
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.packed_llama import PackedLlamaModel
from paceline_executor.models.registry import ARCHITECTURES, build_model
from paceline_executor.numerics import WeightKind
from paceline_executor.testing.models import tiny_checkpoint


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("weights", "model"), [(WeightKind.FLOAT32, LlamaModel), (WeightKind.PACKED, PackedLlamaModel)]
)
def test_llama_and_its_relatives_are_computed_by_the_model_of_their_weights(weights, model, architecture):
    checkpoint = tiny_checkpoint(head_dim=32, intermediate_size=96, architecture=architecture)
    assert isinstance(build_model(checkpoint, 256, weights), model)


@pytest.mark.parametrize("weights", WeightKind)
def test_an_unknown_architecture_is_refused_by_name(weights):
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported; this version runs: gemma2, gemma3"):
        build_model(tiny_checkpoint(architecture="mamba"), 256, weights)

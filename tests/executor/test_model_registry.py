"""Which model computes a checkpoint is decided by its architecture, and one we do not compute is named."""

import pytest
import torch

from paceline_executor.errors import UnsupportedModelError
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.registry import build_model
from paceline_executor.testing.tiny import tiny_checkpoint


def test_llama_is_computed_by_the_llama_model():
    """The name in the checkpoint is the key."""
    assert isinstance(build_model(tiny_checkpoint(), torch.device("cpu"), 256), LlamaModel)


def test_an_unknown_architecture_is_refused_by_name():
    """The sentence says what is known."""
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported; this version runs: llama"):
        build_model(tiny_checkpoint(architecture="mamba"), torch.device("cpu"), 256)

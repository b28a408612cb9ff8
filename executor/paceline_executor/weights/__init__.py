"""Models on disk: finding or fetching them, checking them, and reading their weights and tokenizers.

Everything raised is a `paceline_executor.errors.ModelError`.
"""

from paceline.plan.sampling import GenerationDefaults
from paceline_executor.weights.checkpoint import Checkpoint, ModelConfig, RopeScaling
from paceline_executor.weights.fetch.fetch import resolve_model
from paceline_executor.weights.fetch.fetching import FetchOptions, FetchPhase, FetchProgress
from paceline_executor.weights.fetch.known_models import DEFAULT_MODEL, KnownModel, list_known_models
from paceline_executor.weights.loading import load_checkpoint, load_dummy, load_model, load_tokenizer
from paceline_executor.weights.tokenizer import TokenizerBundle

__all__ = [
    "DEFAULT_MODEL",
    "Checkpoint",
    "FetchOptions",
    "FetchPhase",
    "FetchProgress",
    "GenerationDefaults",
    "KnownModel",
    "ModelConfig",
    "RopeScaling",
    "TokenizerBundle",
    "list_known_models",
    "load_checkpoint",
    "load_dummy",
    "load_model",
    "load_tokenizer",
    "resolve_model",
]

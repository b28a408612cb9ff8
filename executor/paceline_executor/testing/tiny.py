"""A tiny random Llama checkpoint, made in memory: the same weights for the same arguments everywhere.

Knows how to shape a configuration. The weights are `models.RandomCheckpoint`'s.
"""

from paceline_executor.testing.models import RandomCheckpoint
from paceline_executor.weights.checkpoint import Checkpoint, ModelConfig, Rope


def tiny_checkpoint(
    *,
    num_layers: int = 2,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 80,
    vocab_size: int = 512,
    max_model_len: int = 1024,
    tie_word_embeddings: bool = True,
    architecture: str = "llama",
    seed: int = 0,
) -> Checkpoint:
    """A checkpoint of `num_layers` layers whose hidden size is num_heads * head_dim; num_kv_heads divides num_heads."""
    config = ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=num_heads * head_dim,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        rms_norm_eps=1e-5,
        rope=Rope(10_000.0),
        tie_word_embeddings=tie_word_embeddings,
    )
    return RandomCheckpoint(config, seed)

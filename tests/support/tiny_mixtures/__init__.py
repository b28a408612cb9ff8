"""Mixtures of experts for tests, as transformers makes them: every router there is, in a few thousand weights."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers

VOCAB = 256
_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 2.0**-17,  # GGUF keeps it in float32: a power of two survives
    "eos_token_id": None,
    "pad_token_id": None,
}
_QWEN: Mapping[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "head_dim": 32}
_QWEN2 = {**_QWEN, "shared_expert_intermediate_size": 80}
_OLMOE: Mapping[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4}
_GLM: Mapping[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "head_dim": 32,
    "num_nextn_predict_layers": 1,
}
CONFIGS: Mapping[str, transformers.PreTrainedConfig] = {
    "mixtral": transformers.MixtralConfig(**_SIZES, head_dim=32, sliding_window=20),
    "mixtral, all experts": transformers.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=4),
    "qwen3_moe": transformers.Qwen3MoeConfig(**_SIZES, **_QWEN, attention_bias=True),
    "qwen3_moe, renormalised, a dense layer": transformers.Qwen3MoeConfig(
        **_SIZES, **_QWEN, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "qwen3_moe, one expert of 16, every other layer": transformers.Qwen3MoeConfig(
        **_SIZES, **{**_QWEN, "num_experts": 16, "num_experts_per_tok": 1}, decoder_sparse_step=2
    ),
    "qwen2_moe": transformers.Qwen2MoeConfig(**_SIZES, **_QWEN2),
    "qwen2_moe, renormalised, a dense layer": transformers.Qwen2MoeConfig(
        **_SIZES, **_QWEN2, norm_topk_prob=True, mlp_only_layers=[0], qkv_bias=False
    ),
    "olmoe": transformers.OlmoeConfig(**_SIZES, **_OLMOE),
    "olmoe, renormalised": transformers.OlmoeConfig(**_SIZES, **_OLMOE, norm_topk_prob=True, attention_bias=True),
    "glm4_moe": transformers.Glm4MoeConfig(
        **_SIZES, **_GLM, n_group=4, topk_group=2, routed_scaling_factor=2.5, use_qk_norm=True, attention_bias=True
    ),
    "glm4_moe, half of the experts unused": transformers.Glm4MoeConfig(
        **_SIZES, **_GLM, norm_topk_prob=False, first_k_dense_replace=2, n_shared_experts=2
    ),
    "glm4_moe, all tokens to one expert": transformers.Glm4MoeConfig(
        **_SIZES, **{**_GLM, "num_experts_per_tok": 1}, first_k_dense_replace=0, partial_rotary_factor=0.25
    ),
}
_CORRECTIONS = {
    "glm4_moe, half of the experts unused": [0.1, -9, -9, 0.2, 0, -9, -9, 0.3],
    "glm4_moe, all tokens to one expert": [0, 0, 0, 0, 0, 9, 0, 0],
}


def random_mixture(name: str) -> transformers.PreTrainedModel:
    """Matrices of unit gain, norms around 1; the same at each call."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    correction = _CORRECTIONS.get(name, torch.linspace(-0.2, 0.2, 8).tolist())
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            else:
                weight.normal_(1, 0.2)
        for tensor_name, buffer in model.named_buffers():
            if tensor_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.tensor(correction))
    return model

"""The model that is timed, for both sides: as a configuration, and as the folder that an executor reads it from.

Apart from `rigs`, which takes any model. Weights are random and made on the device.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpu.cells import FULL, TINY, Shapes
from gpu.drafting_models import DrafterConfig, drafters_of_8b, tiny_drafters
from gpu.rigs import EXPERTS, LLAMA_8B, QWEN3_30B, Place, quantised_fields, stored_types
from paceline_executor.limits import RowLimits
from paceline_executor.weights.checkpoint import ModelConfig
from random_models import MIXTURE_CONFIGS, TINY_CONFIG

_RESERVED_BYTES = 8 << 30  # graphs, activations, libraries
_OPTIONS = {"fp8": ("--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3")}


@dataclass(frozen=True, slots=True)
class Timed:
    """What is timed, and in which sizes."""

    config: ModelConfig
    shapes: Shapes
    block_size: int
    max_tokens: int  # of a step
    drafters: Mapping[str, DrafterConfig]

    def limits(self, place: Place, numbers: str) -> RowLimits:
        """As many blocks as the cells need, or as fit beside weights and graphs."""
        num_blocks = -(-self.shapes.max_slots // self.block_size)
        if place.is_cuda:
            numerics, stored = place.numerics[numbers], stored_types(self.config, numbers)
            free = torch.cuda.mem_get_info()[0] - numerics.weight_bytes(self.config, stored) - _RESERVED_BYTES
            num_blocks = min(num_blocks, free // (numerics.bytes_per_token(self.config) * self.block_size))
        shapes = self.shapes
        return RowLimits(
            shapes.max_rows, shapes.max_len, self.max_tokens, num_blocks, self.block_size, self.config.vocab_size
        )

    def drafted_limits(self) -> RowLimits:
        """For the few rows of steps that verify drafts."""
        shapes, max_rows = self.shapes, max(num_rows for num_rows, _ in self.shapes.drafted)
        most = max(num_drafts for _, num_drafts in shapes.drafted)
        max_len = shapes.drafted_context + (shapes.num_steps + 16) * (1 + most)
        num_blocks = max_rows * -(-max_len // self.block_size)
        max_tokens = min(self.max_tokens, 512)
        return RowLimits(max_rows, max_len, max_tokens, num_blocks, self.block_size, self.config.vocab_size, most)

    def executor_options(self, folder: Path, numbers: str, *, is_twin: bool) -> list[str]:
        """The command line of an executor with the same sizes. folder: gets the model's config.json."""
        return [
            *("--load-format", "dummy"),
            *("--model", str(write_config(self.config, folder, numbers))),
            *("--runner", "twin" if is_twin else "cuda"),
            *("--max-num-seqs", str(self.shapes.max_rows)),
            *("--max-num-batched-tokens", str(self.max_tokens)),
            *("--max-model-len", str(self.shapes.max_len)),
            *("--block-size", str(self.block_size)),
            *(("--num-threads", "1", "--kv-cache-memory", "8MiB") if is_twin else _OPTIONS.get(numbers, ())),
        ]


def timed(*, rehearses: bool, numbers: str | None = None) -> Timed:
    """Llama-3-8B's shape, or that of a mixture, or tiny ones."""
    if rehearses:
        tiny = replace(MIXTURE_CONFIGS["qwen3moe"] if numbers == EXPERTS else TINY_CONFIG, max_model_len=1024)
        return Timed(tiny, TINY, block_size=16, max_tokens=32, drafters=tiny_drafters(tiny))
    if numbers == EXPERTS:
        return Timed(QWEN3_30B, FULL, block_size=64, max_tokens=2048, drafters={})
    return Timed(LLAMA_8B, FULL, block_size=64, max_tokens=2048, drafters=drafters_of_8b())


def write_config(config: ModelConfig, folder: Path, numbers: str = "") -> Path:
    """A folder with a config.json of the shape of this Llama, or of this mixture of Qwen 3."""
    model = folder / f"model-{numbers}"
    model.mkdir(exist_ok=True)
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if config.experts is not None:
        dense = [layer for layer, is_sparse in enumerate(config.experts.sparse_layers) if not is_sparse]
        values |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": config.experts.routing.num_experts,
            "num_experts_per_tok": config.experts.routing.top_k,
            "norm_topk_prob": config.experts.routing.renormalises,
            "moe_intermediate_size": config.experts.intermediate_size,
            "mlp_only_layers": dense,
        }
    values |= quantised_fields(numbers)
    (model / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return model

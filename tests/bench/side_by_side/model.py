"""The default model's shape, and what a step of it costs at least: bytes to read and operations to do.

SmolLM2-135M-Instruct, whose GGUF file all engines load. The bytes of the weights are those in the file, Q4_1 and for
the output layer Q8_0; a slot of the KV cache is 64 bytes and a scale of four, our default. Apart from `rows`, which
know no model.
"""

from side_by_side.results import Limits

_NUM_LAYERS = 30
_LAYER_WEIGHTS = 576 * 576 * 2 + 576 * 192 * 2 + 576 * 1536 * 3
_HEAD_WEIGHTS = 49_152 * 576
_KV_VALUES_PER_TOKEN = 2 * _NUM_LAYERS * 192
_BODY_WEIGHTS = _NUM_LAYERS * _LAYER_WEIGHTS
_ALL_WEIGHTS = _BODY_WEIGHTS + _HEAD_WEIGHTS
# 32 weights are 20 bytes in Q4_1 and 34 in Q8_0.
_WEIGHT_BYTES = _BODY_WEIGHTS * 20 // 32 + _HEAD_WEIGHTS * 34 // 32
_KV_BYTES_PER_TOKEN = _KV_VALUES_PER_TOKEN * 68 // 64


def decode_step_s(limits: Limits, num_rows: int, context: float) -> float:
    """The least time of a step that decodes so many rows of this mean context, in seconds."""
    read = _WEIGHT_BYTES + num_rows * context * _KV_BYTES_PER_TOKEN
    return max(read / (limits.read_gb_per_s * 1e9), operations_s(limits, num_rows))


def operations_s(limits: Limits, num_tokens: int) -> float:
    """The least time to multiply so many tokens with all weights, the output layer's included, in seconds."""
    return 2 * _ALL_WEIGHTS * num_tokens / (limits.int8_gop_per_s * 1e9)


def prefill_s(limits: Limits, num_tokens: int) -> float:
    """The least time to compute so many prompt tokens, in seconds; their attention is left out."""
    return 2 * _BODY_WEIGHTS * num_tokens / (limits.int8_gop_per_s * 1e9)

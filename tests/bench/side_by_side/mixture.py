"""The mixture of experts that engines are measured with: a GGUF file of OLMoE-1B-7B's shape, random weights in Q4_0.

Knows how llama.cpp's converter names things. Of such weights, routers choose all experts about equally often.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from tokenizers.pre_tokenizers import ByteLevel

_NUM_LAYERS, _HIDDEN, _NUM_HEADS, _VOCAB, _CONTEXT_LENGTH = 16, 2048, 16, 50_304, 4096
_NUM_EXPERTS, _TOP_K, _INTERMEDIATE = 64, 8, 1024
_Q4_0 = np.dtype([("scale", np.float16), ("integers", np.uint8, 16)])
_SPREAD = math.sqrt(85 / 4)  # of integers of 4 bits
_END, _MERGE, _CONTROL, _NORMAL, _UNUSED = "<|endoftext|>", "h e", 3, 1, 5

Shape = tuple[int, ...]


def write_mixture(path: Path) -> None:
    """3.9 GB, of which a tensor is in memory at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "olmoe")
    _add_metadata(writer)
    for name, shape in _shapes():
        kind = _kind(name)
        weights_per_block, block_bytes = GGML_QUANT_SIZES[kind]
        num_bytes = math.prod(shape) // weights_per_block * block_bytes
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.float32), num_bytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for name, shape in _shapes():
        writer.write_tensor_data(_values(name, shape, random))
    writer.close()


def _shapes() -> Iterator[tuple[str, Shape]]:
    yield from {"token_embd": (_VOCAB, _HIDDEN), "output_norm": (_HIDDEN,), "output": (_VOCAB, _HIDDEN)}.items()
    of_layer: dict[str, Shape] = {
        **dict.fromkeys(("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"), (_HIDDEN,)),
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (_HIDDEN, _HIDDEN)),
        "ffn_gate_inp": (_NUM_EXPERTS, _HIDDEN),
        **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (_NUM_EXPERTS, _INTERMEDIATE, _HIDDEN)),
        "ffn_down_exps": (_NUM_EXPERTS, _HIDDEN, _INTERMEDIATE),
    }
    for layer in range(_NUM_LAYERS):
        yield from ((f"blk.{layer}.{name}", shape) for name, shape in of_layer.items())


def _kind(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType.F32 if name.endswith(("norm", "gate_inp")) else GGMLQuantizationType.Q4_0


def _values(name: str, shape: Shape, random: np.random.Generator) -> npt.NDArray[np.generic]:
    """Norms of 1 and matrices of unit gain."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    gain = shape[-1] ** -0.5
    if _kind(name) is GGMLQuantizationType.F32:
        return random.standard_normal(shape, np.float32) * np.float32(gain)
    num_blocks = math.prod(shape) // GGML_QUANT_SIZES[GGMLQuantizationType.Q4_0][0]
    blocks = np.frombuffer(bytearray(random.bytes(num_blocks * _Q4_0.itemsize)), _Q4_0)
    blocks["scale"] = gain / _SPREAD
    return blocks


def _add_metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_block_count(_NUM_LAYERS)
    writer.add_context_length(_CONTEXT_LENGTH)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_INTERMEDIATE)
    writer.add_head_count(_NUM_HEADS)
    writer.add_head_count_kv(_NUM_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_expert_count(_NUM_EXPERTS)
    writer.add_expert_used_count(_TOP_K)
    known = [_END, *sorted(ByteLevel.alphabet()), _MERGE.replace(" ", "")]
    unused = [f"<unused {i}>" for i in range(_VOCAB - len(known))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*known, *unused])
    writer.add_token_types([_CONTROL] + [_NORMAL] * (len(known) - 1) + [_UNUSED] * len(unused))
    writer.add_token_merges([_MERGE])
    writer.add_eos_token_id(0)

"""Engines to be checked and timed: a model, its KV cache and rows on a CUDA device, or on the CPU's twin of one.

Knows how a runner is put together, and which numbers there are. It refuses to know what is run on it.
"""

import gc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpu.errors import GpuRunError
from gpu.feed import Feed
from paceline_executor.limits import RowLimits
from paceline_executor.link.engine import Engine
from paceline_executor.models.interface import DeviceModel, KvCache
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.registry import dummy_model, upload_model
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, MatrixKind, Numerics
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.device.buckets import Buckets, buckets_of
from paceline_executor.runner.device.device import CudaDevice, Device
from paceline_executor.runner.device.drafts import MakeDrafting
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.runner.device.twin import TwinDevice
from paceline_executor.runner.kv_cache import allocate_on_device, kv_geometry
from paceline_executor.weights.checkpoint import Checkpoint, Mixture, ModelConfig, Rope
from paceline_executor.weights.dummy import dummy_types
from paceline_executor.weights.hf.json_fields import JsonFields
from paceline_executor.weights.stored_tensor import FloatType, StoredType
from paceline_kernels.attention import Splits
from paceline_kernels.routing import Routing
from paceline_kernels.warm_up.triton_kernels import settle_keys

LLAMA_8B = ModelConfig(
    architecture="llama",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_model_len=131072,
    rms_norm_eps=1e-5,
    rope=Rope(500_000.0),
    tie_word_embeddings=False,
)
# 30B-A3B.
QWEN3_30B = replace(
    LLAMA_8B,
    architecture="qwen3moe",
    num_layers=48,
    hidden_size=2048,
    intermediate_size=6144,
    num_kv_heads=4,
    vocab_size=151_936,
    max_model_len=40_960,
    rms_norm_eps=1e-6,
    rope=Rope(1e6),
    qk_norm=True,
    experts=Mixture(Routing(128, 8), 768, (True,) * 48),
)
_BF16 = Numerics(MatrixKind.DENSE, KvDtype.BFLOAT16, FloatType.BFLOAT16)
_FP8 = Numerics(MatrixKind.FLOAT8, KvDtype.FP8_E4M3, FloatType.BFLOAT16)
_AS_STORED = replace(_BF16, matrices=MatrixKind.AS_STORED)
AWQ, GROUP_SIZE = "awq", 128
EXPERTS = "experts"  # the first numbers there are, of a mixture; timed where it is asked for
_QUANTISED = {
    "int4": {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "sym": True},
    AWQ: {"quant_method": AWQ, "bits": 4, "group_size": GROUP_SIZE, "zero_point": True},
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stage runs, and in which numbers it may."""

    device: Device
    name: str
    numerics: dict[str, Numerics]  # what is timed; the first is what is compared with the CPU

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU; if not, all of it is a rehearsal."""
        return self.device.torch_device.type == "cuda"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


def free_unused_memory() -> None:
    """Give what nothing refers to back to the device; without CUDA there is nothing to give."""
    gc.collect()
    torch.cuda.empty_cache()


def find_place(*, rehearses: bool) -> Place:
    """The current CUDA device, or the twin."""
    if rehearses:
        from paceline_kernels.compiler import jit  # a machine with a GPU need not have a compiler for CPUs

        jit.set_num_threads(1)  # tiny products are done before a second thread wakes up
        return Place(TwinDevice(), "the CPU, as a rehearsal", dict.fromkeys(("float32", EXPERTS), FLOAT32_NUMERICS))
    settle_keys()  # or what executors have compiled is not found
    numerics = {"bf16": _BF16}
    if torch.cuda.get_device_capability() >= (8, 9):
        numerics["fp8"] = _FP8
    numerics |= dict.fromkeys(_QUANTISED, _AS_STORED) | {EXPERTS: _BF16}
    return Place(CudaDevice(), torch.cuda.get_device_name(), numerics)


def timed_numbers(place: Place, only: str | None) -> list[str]:
    """In which numbers models are timed. Raises GpuRunError for a type that the device has not."""
    names = [name for name in place.numerics if name == only or (only is None and name != EXPERTS)]
    if not names:
        raise GpuRunError(f"{place.name} has no {only}: there is {', '.join(place.numerics)}")
    return names


def uploaded(place: Place, checkpoint: Checkpoint, max_model_len: int) -> DeviceModel:
    """A checkpoint's model in the numbers that are compared with the CPU."""
    numerics = next(iter(place.numerics.values()))
    return upload_model(checkpoint, place.device.torch_device, max_model_len, numerics)


def quantised_fields(numbers: str) -> dict[str, object]:
    """Those of a config.json, besides a shape."""
    return {"quantization_config": _QUANTISED[numbers]} if numbers in _QUANTISED else {}


def stored_types(config: ModelConfig, numbers: str) -> Mapping[str, StoredType]:
    """As of a checkpoint of such numbers; empty for floats."""
    fields = quantised_fields(numbers)
    return dummy_types(config, JsonFields(Path("config.json"), fields)) if fields else {}


def random_model(place: Place, config: ModelConfig, numbers: str, max_model_len: int) -> LlamaModel:
    stored, device = stored_types(config, numbers), place.device.torch_device
    return dummy_model(config, stored, device, max_model_len, place.numerics[numbers])


def make_feed(
    place: Place,
    model: DeviceModel,
    config: ModelConfig,
    limits: RowLimits,
    numerics: Numerics | None = None,
    *,
    splits: Splits = Splits.EVEN,
    is_captured: bool = True,
    drafting: MakeDrafting | None = None,
) -> Feed:
    """An engine without a scheduler: allocated, captured and warm.

    Its KV cache holds random numbers, never zeros: those take less power and time.
    """
    chosen = numerics or next(iter(place.numerics.values()))
    geometry = kv_geometry(config, limits.num_blocks, limits.block_size, chosen)
    cache = allocate_on_device(geometry, chosen.kv, place.device.torch_device)
    _fill(cache)
    buckets = (
        buckets_of(limits.num_rows, limits.max_num_batched_tokens, limits.max_num_draft_tokens)
        if is_captured
        else Buckets([])
    )
    runner = DeviceRunner(
        place.device,
        model,
        cache,
        geometry,
        limits,
        buckets=buckets,
        splits=splits,
        drafting=drafting,
    )
    runner.warm_up()
    return Feed(Engine(RowTable(limits), runner))


def _fill(cache: KvCache) -> None:
    """Layer by layer: float8 has no random numbers of its own."""
    for tensor in (cache.keys, cache.values):
        for layer in tensor:
            layer.copy_(torch.randn(layer.shape, dtype=torch.bfloat16, device=layer.device))

"""Puts the runner of a CPU together: a model, its KV cache in memory, and a thread that computes.

Refuses to know requests, plans, and how a step is computed (`device` does).
"""

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass

from paceline_executor.errors import StartError
from paceline_executor.limits import RowLimits
from paceline_executor.models.collectives import Collectives
from paceline_executor.models.interface import LanguageModel
from paceline_executor.models.packed_llama import PackedLlamaModel
from paceline_executor.models.registry import build_model, twin_model
from paceline_executor.numerics import KvDtype, MatrixKind, Numerics
from paceline_executor.runner.cores import usable_cores
from paceline_executor.runner.device.buckets import Buckets
from paceline_executor.runner.device.drafts import MakeDrafting
from paceline_executor.runner.device.host_device import HostDevice
from paceline_executor.runner.device.host_model import HostModel
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.runner.interface import WarmUpProgress
from paceline_executor.runner.kv_cache import allocate_kv_cache, kv_geometry
from paceline_executor.weights.checkpoint import Checkpoint, ModelConfig
from paceline_kernels.compiler import jit
from paceline_kernels.vector.integers import this_processor
from paceline_kernels.warm_up.compile_process import have_ready

_NORMS = ("rms_norm", "add_rms_norm", "rms_norm_heads")
_IN_FLOAT32 = (
    *("linear", *_NORMS, "gate_and_multiply", "gated_experts", "softcap", "rope_and_write_kv", "paged_attention"),
)
_DECODERS = {KvDtype.INT8: "over int8", KvDtype.FLOAT16: "over float16"}
Progress = Callable[[WarmUpProgress], None]


def operations_of(numerics: Numerics, config: ModelConfig) -> tuple[str, ...]:
    """As `paceline_kernels.warm_up.calls` names them."""
    model: tuple[str, ...] = _IN_FLOAT32
    if numerics.matrices is MatrixKind.PACKED:
        decoder = "decoder" if config.experts is None else "decoder of experts"
        model = (f"{decoder} {_DECODERS[numerics.kv]}",)
    return (*model, "row_operations", "sample", "sample by rules")


def instructions() -> str:
    """Returns "AVX-512 VNNI", "AVX2" or "none"."""
    return this_processor().value


def checked_threads(num_threads: int | None) -> int:
    """None is one per usable core. Raises StartError for more than there are."""
    most = jit.max_threads()
    chosen = min(usable_cores(), most) if num_threads is None else num_threads
    if not 1 <= chosen <= most:
        raise StartError(f"the number of threads must be 1 to {most}, the cores this process may use, not {chosen}")
    return chosen


def have_compiled(device: HostDevice, operations: tuple[str, ...], on_progress: Progress) -> None:
    """Another process compiles for about a minute, once; the code is stored on disk."""

    def on_operation(name: str, is_compiled: bool) -> None:
        phase = f"compile {name}" if is_compiled else f"read {name}"
        on_progress(WarmUpProgress(phase, operations.index(name), len(operations)))

    def make_ready() -> None:
        num_threads = jit.num_threads()
        have_ready(operations, on_operation)  # with one
        jit.set_num_threads(num_threads)

    device.run(make_ready)


@dataclass(frozen=True, slots=True)
class CpuModel:
    """Of a target, or of what drafts for it."""

    device: HostDevice
    model: LanguageModel
    config: ModelConfig
    numerics: Numerics

    @classmethod
    def read(
        cls,
        device: HostDevice,
        checkpoint: Checkpoint,
        numerics: Numerics,
        max_model_len: int,
        collectives: Collectives | None = None,
    ) -> "CpuModel":
        """collectives: of a rank in float32. Raises UnsupportedModelError, ModelCorruptError."""

        def build() -> LanguageModel:
            if collectives is not None:
                return twin_model(checkpoint, max_model_len, collectives=collectives)
            return build_model(checkpoint, max_model_len, numerics.matrices)

        model = device.run(build)
        with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)  # it would keep a quarter of a small model's memory for what was freed
        return cls(device, model, checkpoint.config, numerics)

    @property
    def weight_bytes(self) -> int:
        """Of memory."""
        if isinstance(self.model, PackedLlamaModel):
            return self.model.num_bytes
        return self.numerics.weight_bytes(self.config, {})

    def expert_load_ratio(self) -> float | None:
        """See PackedLlamaModel; None of a model in float32."""
        return self.model.expert_load_ratio() if isinstance(self.model, PackedLlamaModel) else None

    @property
    def on_device(self) -> HostModel:
        return HostModel(self.model, self.config.vocab_size, self.device.profiler)

    def runner(
        self, limits: RowLimits, drafting: MakeDrafting | None = None, on_progress: Progress = lambda _: None
    ) -> DeviceRunner:
        """drafting: None is prompt lookup, where limits allow drafts. Raises StartError for too little memory."""
        geometry = kv_geometry(self.config, limits.num_blocks, limits.block_size, self.numerics)
        return DeviceRunner(
            self.device,
            self.on_device,
            allocate_kv_cache(geometry, self.numerics.kv),
            geometry,
            limits,
            buckets=Buckets([]),
            drafting=drafting,
            on_progress=on_progress,
        )

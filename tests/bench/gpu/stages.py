"""The stages as programs: their command lines, and what they import. Refuses to know what stages do."""

import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class Stage(enum.Enum):
    """In this order, whatever order they are named in."""

    KERNELS = "kernels"
    RUNNER = "runner"
    E2E = "e2e"
    DRAFTS = "drafts"
    BENCH = "bench"


_OF_MODELS = ("gguf", "safetensors", "tokenizers")
_OF_GRPC = ("grpc", "google.protobuf", "google.rpc", "grpc_health", "grpc_reflection", "grpc_status")
_OF_SERVICES = (*_OF_MODELS, *_OF_GRPC, "jinja2", "prometheus_client", "structlog", "uvloop")
NEEDED: Mapping[Stage, tuple[str, ...]] = {
    Stage.KERNELS: (),
    Stage.RUNNER: (*_OF_MODELS, "numba"),  # the CPU computes what the GPU's tokens are compared with
    Stage.E2E: _OF_SERVICES,
    Stage.DRAFTS: (*_OF_MODELS, "structlog"),
    Stage.BENCH: _OF_SERVICES,
}
"""Modules beside torch, Triton and numpy."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What all stages are asked."""

    folder: Path
    seconds: float  # for each
    rehearses: bool
    model: str | None
    peer: Path | None
    anchors: Path | None
    numbers: str | None  # bf16 or fp8; None: both


def command_of(stage: Stage, asked: Asked) -> list[str]:
    """The program of a stage."""
    if stage is Stage.KERNELS:
        command = [sys.executable, "-m", "gpu_kernels", "--json", str(asked.folder / "kernels.json")]
        command += ["--rehearse"] if asked.rehearses else ["--seconds", str(asked.seconds - 30)]
        return command + (["--anchors", str(asked.anchors)] if asked.anchors else [])
    command = [sys.executable, "-m", f"gpu.{stage.value}_stage", "--out", str(asked.folder)]
    command += ["--seconds", str(asked.seconds - 30)]
    command += ["--rehearse"] if asked.rehearses else []
    command += ["--model", asked.model] if asked.model else []
    command += ["--numbers", asked.numbers] if asked.numbers else []
    return command + (["--peer", str(asked.peer)] if asked.peer else [])

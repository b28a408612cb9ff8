"""What a user can set: one frozen value, from the command line and, for the cache, the environment.

Whether a model exists, a port is free or memory suffices is found out by those who need it.
"""

import argparse
import enum
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.plan.texts import MAX_NAME_BYTES
from paceline.process.help import HelpParser
from paceline.process.options import (
    choice,
    decimal,
    default_cache_dir,
    flag,
    json_value,
    log_level_option,
    number,
    option,
    parse_options,
    port_number,
    port_or_off,
    tls_folder,
)
from paceline.process.tls_folder import TlsFolder, is_loopback
from paceline_executor.numerics import KvDtype, Quantization
from paceline_executor.share import Share
from paceline_executor.weights import DEFAULT_MODEL

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_TRUE = ("1", "on", "yes", "true")
_SPINS = "1000"  # a few microseconds
_BLOCK_SIZE = 16
_MAX_PORT = 65535
DEVICE_BLOCK_SIZE = 64
"""Its attention spends up to a quarter less than on blocks of 16."""
_SECONDS = decimal(0, 1e6, "a number of seconds")
_MODEL, _NETWORK, _LIMITS, _PROCESS, _DEVICE = "Model", "Network", "Limits and memory", "Process", "Device"
_OF_NUMBA = {  # what else they say ends in a traceback
    "NUMBA_NUM_THREADS": "[1-9][0-9]*",
    "NUMBA_THREADING_LAYER": "default|safe|forksafe|threadsafe|omp|tbb|workqueue",
    "NUMBA_DISABLE_JIT": "0",
    "NUMBA_CPU_FEATURES": "([+-].*)?",
}
_SPECULATION = '{"drafter": "draft_model", "model": "NAME_OR_PATH"}'
_DESCRIPTION = """\
Serves one model on one device to Paceline schedulers, which attach to it and decide what runs.

Prints JSON lines on stdout (readable ones on a terminal); "ready" means that the model is loaded and warmed up.
Drains on SIGTERM or SIGINT; a second one ends the process at once."""
_PANELS = (
    (
        "Exit codes",
        (
            ("0", "Drained and ended in good order."),
            ("1", "Unexpected failure, logged."),
            ("2", "Usage, or a limit the model forbids."),
            ("3", "The model is missing, corrupt or not supported."),
            ("4", "A port is in use, or the address is not this machine's."),
            ("5", "Too little memory, too few cores or no usable GPU for this configuration."),
            ("6", "--shutdown-timeout passed before all work was finished."),
            ("7", "The model could not be fetched."),
            ("130, 143", "A second SIGINT or SIGTERM ended it at once."),
            (
                "",
                "After 2, 3 and 5 a start with the same arguments ends the same way; after others it may succeed.",
            ),
        ),
    ),
    (
        "Environment",
        (
            ("PACELINE_CACHE_DIR", "Default of --cache-dir; else XDG_CACHE_HOME/paceline, else ~/.cache/paceline."),
            ("HF_HOME, HF_HUB_CACHE", "Where models of the Hugging Face hub are kept; else ~/.cache/huggingface."),
            ("HF_TOKEN", "Token for gated and private models of the Hugging Face hub; else that of 'hf auth login'."),
            ("HF_ENDPOINT", "URL of another hub than https://huggingface.co."),
            ("HF_HUB_OFFLINE", "1: fetch nothing, use only models that are here already."),
            ("GOMP_SPINCOUNT", f"How long threads of float32 products spin before they sleep. [default: {_SPINS}]"),
        ),
    ),
)


class RunnerKind(enum.Enum):
    AUTO = "auto"  # CUDA where there is a GPU for it, else CPU
    CPU = "cpu"
    CUDA = "cuda"
    TWIN = "twin"  # the code of CUDA over the CPU's memory, in float32
    SIMULATED = "simulated"


class LoadFormat(enum.Enum):
    AUTO = "auto"
    DUMMY = "dummy"


class DrafterKind(enum.Enum):
    PROMPT_LOOKUP = "prompt_lookup"  # from a row's own tokens
    DRAFT_MODEL = "draft_model"
    TARGET_COPY = "target_copy"  # the model itself, packed, beside one in float32
    EAGLE3 = "eagle3"  # a head that reads hidden states of the model


@dataclass(frozen=True, slots=True)
class Node:
    """Which of several this one is, and where node 0 listens."""

    index: int
    count: int
    host: str
    port: int

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_WITH_MODEL = (DrafterKind.DRAFT_MODEL, DrafterKind.EAGLE3)


@dataclass(frozen=True, slots=True)
class SpeculationChoice:
    drafter: DrafterKind = DrafterKind.PROMPT_LOOKUP
    model: str | None = None


def _name(text: str) -> str:
    if not 1 <= len(text.encode(errors="surrogateescape")) <= MAX_NAME_BYTES or not text.isprintable():
        raise argparse.ArgumentTypeError(f"a name has 1 to {MAX_NAME_BYTES} bytes, and no control characters")
    return text


def _runner(text: str) -> tuple[RunnerKind, Path | None]:
    """Of a simulated runner also the file of step times."""
    kind, _, file = text.partition(":")
    if kind == RunnerKind.SIMULATED.value and file:
        return RunnerKind.SIMULATED, Path(file)
    return choice(RunnerKind)(text), None


def _speculation(text: str) -> SpeculationChoice:
    value = json_value(text, _SPECULATION)
    if not isinstance(value, dict) or not value.keys() <= {"drafter", "model"}:
        raise argparse.ArgumentTypeError(f"it has fields drafter and model alone, such as {_SPECULATION}")
    drafter, model = choice(DrafterKind)(str(value.get("drafter"))), value.get("model")
    if drafter not in _WITH_MODEL and model is not None:
        raise argparse.ArgumentTypeError(f"{drafter.value} has no model of its own: leave model out")
    if drafter in _WITH_MODEL and not (isinstance(model, str) and model):
        raise argparse.ArgumentTypeError(f"{drafter.value} needs a model: {_SPECULATION}")
    return SpeculationChoice(drafter, model)


def _node(text: str) -> Node | None:
    """None where there is one node."""
    found = re.fullmatch(r"([0-9]{1,2})/([0-9]{1,2})@(?:\[([0-9a-fA-F:]+)\]|([^:@\[\]\s]+)):([0-9]{1,5})", text)
    if found is None or int(found[1]) >= int(found[2]) or int(found[5]) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no node; write it like 1/2@10.0.0.1:7070, numbers from 0 on")
    node = Node(int(found[1]), int(found[2]), found[3] or found[4], int(found[5]))
    return node if node.count > 1 else None


def _kv_dtype(text: str) -> KvDtype | None:
    known = ("auto", *(dtype.value for dtype in KvDtype))
    if text not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(known)}")
    return None if text == "auto" else KvDtype(text)


def _share(text: str) -> float:
    if not re.fullmatch(r"[01](\.[0-9]{1,6})?", text) or not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and at most 1; write it like 0.9")
    return float(text)


def _size(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?) ?([a-z]*)", text.lower())
    if found is None or found[2] not in _UNITS or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it like 512MiB or 4GiB")
    return int(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every value is in range. None means: measured, or taken from the model."""

    model: str = option(
        _MODEL,
        str,
        "NAME_OR_PATH",
        None,
        text="Known name; GGUF file; folder with one, or with safetensors files; or model of the Hugging Face"
        " hub: org/name, of one with GGUF files org/name:FILE.gguf or org/name:Q4_K_M. [default:"
        f" {DEFAULT_MODEL}]",
    )
    revision: str | None = option(
        _MODEL, str, "NAME", None, text="Branch, tag or commit of a model of the Hugging Face hub. [default: main]"
    )
    served_model_name: str | None = option(
        _MODEL, _name, "NAME", None, text="What requests call the model. [default: its name or file name]"
    )
    cache_dir: Path = option(
        _MODEL,
        Path,
        "DIR",
        lambda: default_cache_dir(os.environ),
        text="Where known models and compiled kernels are kept; models of the Hugging Face hub are kept where its own"
        " tools have them. [default: %(default)s]",
    )
    load_format: LoadFormat = option(
        _MODEL,
        choice(LoadFormat),
        "FORMAT",
        LoadFormat.AUTO,
        text="Where weights come from. auto: from the model's files; dummy: they are random, of the shape in its"
        " config.json, quantised where that says awq or gptq, for benchmarks. [default: auto]",
    )
    quantization: Quantization = option(
        _MODEL,
        choice(Quantization),
        "KIND",
        Quantization.AUTO,
        text="How products are computed. On a CPU auto: weights stay as small as the file has them, activations"
        " become int8; none: float32. On a GPU auto: float8 stays float8, all else has 16 bits; fp8:"
        " weights become float8; none: 16 bits. [default: auto]",
    )
    host: str = option(_NETWORK, str, "ADDRESS", "127.0.0.1", text="Address to bind. [default: %(default)s]")
    port: int = option(
        _NETWORK, port_number, "N", 50061, text="Port of ExecutorService; 0: any. [default: %(default)s]"
    )
    health_port: int = option(
        _NETWORK,
        port_number,
        "N",
        50063,
        text="Port that answers health checks only, for probes; 0: any. Plaintext. [default: %(default)s]",
    )
    tls_dir: TlsFolder | None = option(
        _NETWORK,
        tls_folder,
        "DIR",
        None,
        text="Folder with ca.crt, tls.crt and tls.key, read again when they change. Then only schedulers and"
        " operators may call: those whose certificate names paceline://scheduler or paceline://operator.",
    )
    insecure: bool = flag(
        _NETWORK, text="Without --tls-dir, let other machines call: whoever reaches the port reads every prompt."
    )
    metrics_port: int | None = option(
        _NETWORK,
        port_or_off,
        "N|off",
        9465,
        text="Port where Prometheus reads /metrics; 0: any. [default: %(default)s]",
    )
    block_size: int = option(
        _LIMITS,
        number(1, 256),
        "TOKENS",
        None,
        text=f"Slots per block. [default: {_BLOCK_SIZE}, on a GPU {DEVICE_BLOCK_SIZE}]",
    )
    max_num_seqs: int = option(
        _LIMITS, number(1, 4096), "ROWS", 256, text="How many requests run at once. [default: %(default)s]"
    )
    max_num_batched_tokens: int = option(
        _LIMITS,
        number(1, 65536),
        "TOKENS",
        2048,
        text="Tokens of a step; schedulers plan shorter ones on a slow device. [default: %(default)s]",
    )
    speculation: SpeculationChoice = option(
        _LIMITS,
        _speculation,
        "FILE|JSON",
        SpeculationChoice(),
        text=f"Who drafts: a smaller model of the same vocabulary, {_SPECULATION}; eagle3, likewise with a head"
        " of the model; target_copy, the model packed, with --quantization none; prompt_lookup, the"
        " request's own tokens; or a file with this. [default: prompt_lookup]",
    )
    max_model_len: int | None = option(
        _LIMITS,
        number(2, 2**24),
        "TOKENS",
        None,
        text="Prompt and output of a request together. [default: what the model was trained for, if it fits]",
    )
    kv_cache_memory: int | None = option(
        _LIMITS,
        _size,
        "SIZE",
        None,
        text="Memory for the KV cache, such as 512MiB or 4GiB. [default: a quarter of what is free, at most"
        " 2GiB; on a GPU what is left of its share]",
    )
    gpu_memory_utilization: float | None = option(
        _LIMITS,
        _share,
        "SHARE",
        None,
        text="How much of all the memory of a GPU this process may take, above 0, at most 1. [default: 0.9]",
    )
    kv_cache_dtype: KvDtype | None = option(
        _LIMITS,
        _kv_dtype,
        "DTYPE",
        None,
        text="Type of its numbers: auto, float32, float16 or int8; on a GPU auto, bfloat16, float16, fp8_e4m3 or"
        " int8. [default: auto: int8, float32 with --quantization none; on a GPU the type that is computed"
        " with]",
    )
    batch_invariant: bool = flag(
        _LIMITS, text="On a GPU, too, no result depends on what else runs: slower. On a CPU none ever does."
    )
    tensor_parallel_size: int = option(
        _LIMITS,
        number(1, 64),
        "RANKS",
        1,
        text="Processes that share each layer of the model: a GPU each, or a CPU's cores with --quantization none."
        " [default: %(default)s]",
    )
    node: Node | None = option(
        _LIMITS,
        _node,
        "N/COUNT@ADDR",
        None,
        text="Ranks are on COUNT nodes, as many on each, which are started alike but for N. Node 0 is the executor and"
        " listens at this port of --host; others join it at ADDR, HOST:PORT. [default: one node]",
    )
    num_threads: int | None = option(
        _LIMITS,
        number(1, 1024),
        "N",
        None,
        text="Threads of a CPU device, of all ranks of a node together. [default: its usable CPUs]",
    )
    shutdown_timeout: float = option(
        _PROCESS, _SECONDS, "SECONDS", 30.0, text="How long a drain waits for running work. [default: %(default)g]"
    )
    log_level: str = log_level_option(_PROCESS)
    runner: RunnerKind = option(
        _DEVICE,
        _runner,
        "KIND",
        (RunnerKind.AUTO, None),
        text="What computes the steps. cuda: a GPU of compute capability 8.0 or later; cpu; auto: cuda where"
        " there is one and Triton is installed, else cpu; twin: the code for GPUs on the CPU, in float32,"
        " for tests and rehearsals; simulated: no model, nothing to fetch, tokens are hashes of earlier"
        " ones; simulated:FILE: steps take as long as this JSON file says. [default: auto]",
    )
    step_times: Path | None
    offline: bool
    arguments: tuple[str, ...]  # the command line itself, for the other ranks
    hub_endpoint: str | None
    has_default_block_size: bool

    @property
    def share(self) -> Share:
        if self.node is None:
            return Share(self.tensor_parallel_size)
        return Share(self.tensor_parallel_size, self.node.index, self.node.count)


def parse_config(arguments: Sequence[str] | None = None) -> Config:
    """A mistake is explained on stderr and exits with code 2."""
    parser = HelpParser("paceline-executor", _DESCRIPTION, _PANELS)
    arguments = tuple(sys.argv[1:] if arguments is None else arguments)
    values = argparse.Namespace(**parse_options(Config, parser, arguments))
    values.runner, values.step_times = values.runner
    if values.runner is RunnerKind.SIMULATED and values.model is not None:
        parser.error("--runner simulated has no model: leave out --model, and name it with --served-model-name")
    if values.load_format is LoadFormat.DUMMY and values.model is None:
        parser.error("--load-format dummy needs --model: a folder whose config.json says the shape")
    values.model = values.model or DEFAULT_MODEL
    values.offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE
    values.has_default_block_size = values.block_size is None
    values.block_size = values.block_size or _BLOCK_SIZE
    ports = [port for port in (values.port, values.health_port, values.metrics_port) if port]
    if len(set(ports)) < len(ports):
        parser.error("--port, --health-port and --metrics-port must differ")
    if not (is_loopback(values.host) or values.tls_dir or values.insecure):
        parser.error(
            f"--host: other machines reach {values.host}, and whoever attaches reads every prompt: give --tls-dir, or"
            " --insecure if the network itself keeps others out"
        )
    if values.node is not None:
        _check_node(parser, values)
    if values.max_num_batched_tokens < values.max_num_seqs:
        parser.error(
            "--max-num-batched-tokens must be at least --max-num-seqs, so that every row can advance in one step"
        )
    for name, allowed in _OF_NUMBA.items():
        value = os.environ.get(name)
        if values.runner is not RunnerKind.CUDA and value is not None and not re.fullmatch(allowed, value):
            parser.error(f"{name} is {value!r}, with which no kernel can be compiled: unset it")
    return Config(hub_endpoint=os.environ.get("HF_ENDPOINT") or None, arguments=arguments, **vars(values))


def _check_node(parser: argparse.ArgumentParser, values: argparse.Namespace) -> None:
    node, degree = values.node, values.tensor_parallel_size
    if degree % node.count:
        parser.error(
            f"--tensor-parallel-size {degree} cannot be cut evenly over {node.count} nodes: change one of them"
        )
    if is_loopback(node.host):
        return
    if is_loopback(values.host):
        parser.error(f"--node: other nodes do not reach {values.host}: give --host an address of node 0's")
    if not (values.tls_dir or values.insecure):
        parser.error(
            f"--node: who answers at {node.host} reads every prompt: give --tls-dir, or --insecure if the network"
            " itself keeps others out"
        )


def settle_collectives(*, is_one_machine: bool) -> None:
    """Unless the user has chosen, nobody else reaches what they listen on where all ranks are on one machine. And no
    thread of torch's ends the process, or spoils a capture: whether ranks live is watched by `ranks.group`.
    """
    if is_one_machine:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")


def let_waiting_threads_sleep() -> None:
    """Let OpenMP's threads spin briefly only, unless the user has chosen; it counts if torch was not imported yet.

    They spin for milliseconds by default. Where another process has one of the cores, the others burn theirs meanwhile:
    a step of 35 ms took 200 to 1,000.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)

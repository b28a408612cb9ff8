"""A model onto a device: what the runner is made of, what is logged, and what is said where memory runs out."""

import fcntl
import json
import math
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from gpu.rigs import LLAMA_8B, QWEN3_30B
from paceline.plan.values import GraphSizes
from paceline_executor.config import RunnerKind, parse_config
from paceline_executor.errors import LimitError, MissingDeviceError, ShortMemoryError
from paceline_executor.limits import RowLimits
from paceline_executor.memory import is_out_of_memory
from paceline_executor.models.registry import build_model
from paceline_executor.models.rope import rotation_bytes
from paceline_executor.numerics import KvDtype, MatrixKind, Numerics
from paceline_executor.ranks.memory import Descriptors, GroupMemory
from paceline_executor.ranks.shared_collectives import SharedMemoryCollectives
from paceline_executor.runner.device.buckets import buckets_of
from paceline_executor.runner.device.draft_model import NUM_PASSES
from paceline_executor.runner.device.memory_plan import DeviceMemory
from paceline_executor.runner.simulated import SimulatedRunner
from paceline_executor.share import Share
from paceline_executor.start import kernel_compiling, loading_device
from paceline_executor.start.device_drafts import DeviceHeadDraft
from paceline_executor.start.loading_device import DeviceStart, Place, load_on_device, rank_on_device
from paceline_executor.start.opening import Opened, ProgressLog, open_model, simulated_tokenizer
from paceline_executor.weights.checkpoint import KvScales, Mixture
from paceline_executor.weights.hf.eagle3 import eagle3_from_folder
from paceline_executor.weights.sharded import ShardedCheckpoint
from paceline_executor.weights.stored_tensor import FloatType, GroupedType
from paceline_kernels.linear import Splits
from paceline_kernels.routing import Routing
from paceline_kernels.scaled_linear import ScaledWeight
from paceline_kernels.warm_up.triton_processes import Compiled
from random_models import TINY_CONFIG, RandomCheckpoint, llama_fields, tiny_checkpoint
from random_models.eagle3 import random_head
from repository_checks.sources import ROOT

GIB = 2**30
CPU = torch.device("cpu")
H100 = Place(CPU, "NVIDIA H100", DeviceMemory(80 * GIB, 79 * GIB), (9, 0))
EIGHT_K = ["--max-model-len", "8192"]
SMALL = ["--max-num-seqs", "2", "--max-num-batched-tokens", "128", "--kv-cache-memory", "1MiB"]
COMPILE_KERNELS = DeviceStart.compile_kernels
BFLOAT16 = Numerics(MatrixKind.DENSE, KvDtype.BFLOAT16, FloatType.BFLOAT16)
MEASURED = KvScales(np.full((2, 2), 3.0, np.float32), np.full((2, 2), 2.0, np.float32))


def size(num_rows, num_tokens, *, is_decode=False):
    """A size that steps are captured in."""
    return SimpleNamespace(num_rows=num_rows, num_tokens=num_tokens, num_draws=num_rows, is_decode=is_decode)


class Sizes(list):
    """Decodes of one and two rows; two rows with 64 or 128 tokens."""

    token_sizes = (64, 128)

    def __init__(self):
        super().__init__([size(2, 128), size(2, 64), size(2, 2, is_decode=True), size(1, 1, is_decode=True)])


class Built(SimulatedRunner):
    """A runner that is built of parts and computes nothing."""

    def __init__(self, parts):
        super().__init__(parts.geometry.num_blocks, parts.geometry.block_size, 300, drawn=(65, 66))
        self.parts = parts

    @property
    def kv_geometry(self):
        """As it was told."""
        return self.parts.geometry


@pytest.fixture(autouse=True)
def built(monkeypatch):
    """The runners that are built, instead of one that computes."""
    runners = []

    def build(parts):
        runners.append(Built(parts))
        return runners[-1]

    monkeypatch.setattr(loading_device, "buckets_of", lambda *_: Sizes())
    monkeypatch.setattr(loading_device, "build_runner", build)
    monkeypatch.setattr(loading_device, "this_gpu", lambda: H100)
    monkeypatch.setattr(DeviceStart, "compile_kernels", lambda *_: None)
    monkeypatch.setattr(loading_device, "measured_scales", lambda *_: MEASURED)
    return runners


def opened(checkpoint):
    """A model as it is found, with a tokenizer of bytes."""
    return Opened(SimpleNamespace(stem="tiny"), checkpoint, simulated_tokenizer(checkpoint.config.vocab_size))


def loaded(checkpoint, *arguments, kind=RunnerKind.CUDA):
    """What an executor with these options loads."""
    config = parse_config([*SMALL, "--served-model-name", "tiny", *arguments])
    return load_on_device(config, kind, opened(checkpoint), ProgressLog(), None)


WIDE = tiny_checkpoint(head_dim=32, intermediate_size=96)


def test_the_twin_has_the_float32_weights_of_the_cpu(built):
    """And a KV cache of float32 that is planned within the host's memory."""
    checkpoint = RandomCheckpoint()
    description = loaded(checkpoint, kind=RunnerKind.TWIN).description
    (runner,) = built
    expected = build_model(checkpoint, 256, MatrixKind.DENSE)

    assert runner.parts.is_twin
    assert torch.equal(runner.parts.model._embedding, expected._embedding)
    assert torch.equal(runner.parts.model._layers[1].qkv.weight, expected._layers[1].qkv.weight)
    assert runner.parts.kv_cache.keys.dtype == torch.float32
    assert (description.device, description.kv_dtype, description.quantization) == ("twin", "float32", "")
    assert description.graphs == GraphSizes((1, 2), (64, 128))
    assert runner.parts.limits == description.limits
    assert description.limits.num_blocks == 2 * 256 // 64


@pytest.mark.parametrize("kind", [RunnerKind.CUDA, RunnerKind.TWIN])
def test_blocks_have_64_slots_on_a_gpu_unless_others_are_asked_for(built, kind):
    """A CPU's have 16."""
    assert loaded(WIDE, kind=kind).description.limits.block_size == built[0].parts.geometry.block_size == 64
    assert loaded(WIDE, "--block-size", "16", kind=kind).description.limits.block_size == 16
    assert loaded(WIDE, "--block-size", "32", kind=kind).description.geometry.block_size == 32
    assert parse_config([]).block_size == 16


def test_rows_are_drafted_for_unless_bits_may_not_depend_on_the_step(built):
    assert loaded(WIDE).description.limits.max_num_draft_tokens == 7
    assert loaded(WIDE, "--batch-invariant").description.limits.max_num_draft_tokens == 0


def test_a_follower_takes_the_kernels_that_the_first_rank_has_compiled(monkeypatch, tmp_path):
    """Each rank would compile its own otherwise, with the others waiting."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.cache, "dir", "elsewhere")
    monkeypatch.setattr(kernel_compiling, "settle_keys", lambda: None)  # of compiled functions, not of interpreted ones
    monkeypatch.setattr(loading_device, "_take_gpu", lambda *_: None)
    monkeypatch.setattr(loading_device, "_collectives", lambda memory, _: SharedMemoryCollectives(memory))
    config = parse_config([*SMALL, "--tensor-parallel-size", "2", "--cache-dir", str(tmp_path)])
    memory = GroupMemory(Descriptors.new(2), 1, Share(2))
    rank = rank_on_device(config, RunnerKind.CUDA, opened(WIDE), memory)
    rank.build(RowLimits(4, 64, 64, 16, 16, WIDE.config.vocab_size))
    assert (rank.device, triton.knobs.cache.dir) == (H100.name, str(tmp_path / "triton"))


def test_a_node_compiles_kernels_once_for_its_ranks(monkeypatch, tmp_path):
    """Rank 0's are on another machine."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.cache, "dir", "elsewhere")
    others = []

    def compile_kernels(*_):
        folder = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(folder)
        others.append("wait")

    monkeypatch.setattr(kernel_compiling, "settle_keys", lambda: None)
    monkeypatch.setattr(loading_device, "_take_gpu", lambda *_: None)
    monkeypatch.setattr(loading_device, "_collectives", lambda memory, _: SharedMemoryCollectives(memory))
    monkeypatch.setattr(DeviceStart, "compile_kernels", compile_kernels)
    node = ["--tensor-parallel-size", "2", "--cache-dir", str(tmp_path), "--node"]
    for index in range(2):
        config = parse_config([*SMALL, *node, f"{index}/2@127.0.0.1:1"])
        rank = rank_on_device(config, RunnerKind.CUDA, opened(WIDE), GroupMemory(Descriptors.new(2), 1, config.share))
        rank.build(RowLimits(4, 64, 64, 16, 16, WIDE.config.vocab_size))
    assert others == ["wait"]


def test_more_ranks_than_there_are_gpus_are_refused():
    """Of this machine, which has none; before a rank is started."""
    with pytest.raises(MissingDeviceError, match=r"--tensor-parallel-size 2: torch sees 0 GPUs: .*, or lower it"):
        loaded(WIDE, "--tensor-parallel-size", "2")


@pytest.mark.parametrize(("arguments", "splits"), [([], Splits.EVEN), (["--batch-invariant"], Splits.FIXED)])
def test_results_depend_on_batch_mates_only_where_that_is_allowed(built, arguments, splits):
    loaded(WIDE, *arguments)
    assert built[0].parts.splits is splits


def test_a_gpu_gets_16_bits_or_float8_as_asked_for(built):
    plain = loaded(WIDE).description
    small = loaded(WIDE, "--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3").description
    first, second = (runner.parts for runner in built)

    assert not first.is_twin
    assert first.model._layers[0].feed_forward.down.weight.dtype == torch.float16
    assert first.kv_cache.keys.dtype == torch.float16
    assert isinstance(second.model._layers[0].feed_forward.down.weight, ScaledWeight)
    assert second.kv_cache.keys.dtype == torch.float8_e4m3fn
    assert (plain.quantization, plain.kv_dtype) == ("", "float16")
    assert (small.quantization, small.kv_dtype) == ("float8_e4m3fn", "fp8_e4m3")
    assert small.geometry.bytes_per_block * 2 == plain.geometry.bytes_per_block
    assert plain.device == "NVIDIA H100"


class Scaled(RandomCheckpoint):
    """A checkpoint that brings scales of keys and values."""

    kv_scales = KvScales(np.full((2, 2), 0.5, np.float32), np.full((2, 2), 0.25, np.float32))


def test_scales_of_the_checkpoint_or_measured_ones_reach_the_kv_cache(built):
    """Where it is of float8."""
    checkpoint = Scaled(WIDE.config)
    loaded(checkpoint, "--kv-cache-dtype", "fp8_e4m3")
    loaded(checkpoint)
    loaded(WIDE, "--kv-cache-dtype", "fp8_e4m3")
    assert built[2].parts.kv_cache.key_scales.unique().tolist() == [3.0]
    assert built[2].parts.kv_cache.value_scales.unique().tolist() == [2.0]
    assert built[0].parts.kv_cache.key_scales.unique().tolist() == [0.5]
    assert built[0].parts.kv_cache.value_scales.unique().tolist() == [0.25]
    assert built[1].parts.kv_cache.key_scales is None


@pytest.mark.parametrize("kind", [RunnerKind.CUDA, RunnerKind.TWIN])
def test_dummy_weights_are_made_on_the_device_without_asking_the_host_for_any(built, tmp_path, kind, monkeypatch):
    """16 GB of them would take it most of a minute."""
    (tmp_path / "config.json").write_text(json.dumps(llama_fields(replace(TINY_CONFIG, head_dim=32))))
    config = parse_config([*SMALL, "--model", str(tmp_path), "--load-format", "dummy"])
    found = open_model(config, ProgressLog())
    monkeypatch.setattr(type(found.checkpoint), "tensor", lambda *_: pytest.fail("the host made weights"))
    description = load_on_device(config, kind, found, ProgressLog(), None).description

    assert description.has_dummy_weights
    dtype = torch.float32 if kind is RunnerKind.TWIN else torch.bfloat16
    assert built[0].parts.model._embedding.dtype == dtype
    assert abs(built[0].parts.model._embedding.float().std().item() - 64**-0.5) < 0.01


def test_a_start_says_what_takes_memory_and_in_which_numbers_it_computes():
    with capture_logs() as events:
        loaded(WIDE, "--quantization", "fp8")
    (memory,) = (event for event in events if event["event"] == "memory")
    (numerics,) = (event for event in events if event["event"] == "numerics")
    phases = [(event["event"], event["phase"]) for event in events if "phase" in event]

    assert {"weights", "activations", "rows", "rings", "graphs", "kv_cache"} < memory.keys()
    assert memory["kv_cache"] == 2**20 // 8192 * 8192
    assert (numerics["weights"], numerics["computed_in"], numerics["kv_cache"]) == ("float8", "float16", "float16")
    assert phases[0] == ("model_load", "weights")
    assert phases[-2:] == [("model_load", "done"), ("warm_up", "done")]


def test_progress_is_that_of_the_bytes_uploaded():
    seen = []
    progress = SimpleNamespace(log=lambda event, phase, fraction: seen.append((event, phase, fraction)))
    load_on_device(parse_config(SMALL), RunnerKind.CUDA, opened(WIDE), progress, None)
    fractions = [fraction for event, phase, fraction in seen if (event, phase) == ("model_load", "weights")]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0, 1)
    assert len(fractions) > 5


@pytest.mark.parametrize("kind", [RunnerKind.CUDA, RunnerKind.TWIN])
def test_kernels_are_compiled_for_a_gpu_before_weights_are_read(monkeypatch, kind):
    asked = []

    def have_compiled(steps, capability, cache_dir, on_progress):
        on_progress("compile kernels", 0.5)
        asked.append((steps.numerics.matrices, steps.splits, steps.limits.num_rows, capability, cache_dir.name))
        return Compiled(1, 0, 0)

    monkeypatch.setattr(DeviceStart, "compile_kernels", COMPILE_KERNELS)
    monkeypatch.setattr(kernel_compiling, "have_compiled", have_compiled)
    arguments = ["--cache-dir", "/somewhere/cache", *(["--batch-invariant"] if kind is RunnerKind.CUDA else [])]
    with capture_logs() as events:
        loaded(WIDE, *arguments, kind=kind)
    phases = [(event["event"], event["phase"]) for event in events if "phase" in event]

    if kind is RunnerKind.CUDA:
        assert asked == [(MatrixKind.AS_STORED, Splits.FIXED, 2, (9, 0), "cache")]
        assert phases[:2] == [("warm_up", "compile kernels"), ("model_load", "weights")]
    else:
        assert not asked


def test_what_the_device_does_not_take_is_refused_before_weights_are_read(monkeypatch):
    monkeypatch.setattr(loading_device, "upload_model", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(LimitError, match="--kv-cache-dtype float32"):
        loaded(WIDE, "--kv-cache-dtype", "float32")
    with pytest.raises(ShortMemoryError, match="lower --kv-cache-memory"):
        loaded(WIDE, "--kv-cache-memory", "79GiB")


def out_of_memory(*_):
    """As torch has it."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("owner", "name", "sentence"),
    [
        (
            loading_device,
            "upload_model",
            "while weights were loaded: choose --quantization fp8 or a smaller model, or end",
        ),
        (loading_device, "allocate_on_device", "for the KV cache: lower --gpu-memory-utilization or --kv-cache-memory"),
        (loading_device, "build_runner", "for what is kept of rows: lower --max-model-len or --max-num-seqs"),
        (Built, "warm_up", "while steps were captured: lower --max-num-batched-tokens or --max-num"),
    ],
)
def test_memory_that_runs_out_says_what_to_lower(monkeypatch, owner, name, sentence):
    monkeypatch.setattr(owner, name, out_of_memory)
    with pytest.raises(ShortMemoryError, match=f"the device's memory ran out {sentence}"):
        loaded(WIDE)


def test_other_failures_of_a_start_stay_what_they_are(monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Built, "warm_up", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        loaded(WIDE)


def caused(error, cause):
    """An error that came of another one."""
    error.__context__ = cause
    return error


def test_errors_that_came_of_each_other_are_looked_at_once():
    first, second = RuntimeError("of the test"), RuntimeError("of the test, too")
    assert not is_out_of_memory(caused(caused(first, second), caused(second, first)))


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (caused(RuntimeError("operation failed due to a previous error during capture"), MemoryError()), True),
    ],
)
def test_allocations_that_fail_are_known_by_their_words(error, is_memory):
    assert is_out_of_memory(error) is is_memory


def planned(*arguments, place=H100, model=LLAMA_8B):
    """What takes which memory of a model of random numbers, one of 8B on an 80 GiB GPU unless another is said."""
    config = parse_config(["--model", "shape", "--load-format", "dummy", *arguments])
    return DeviceStart(config, place, opened(RandomCheckpoint(model)), ProgressLog()).plan_memory()


def test_an_8b_model_leaves_most_of_a_large_gpu_to_its_kv_cache():
    """16 GB of weights; 128 KiB a token in bfloat16, half of that in float8."""
    plan, limits = planned(*EIGHT_K)
    assert plan.table["weights"] == LLAMA_8B.num_parameters() * 2 + 8192 * 128 * 4  # and a table of rotations
    assert sum(plan.table.values()) <= 0.9 * H100.memory.total_bytes
    assert plan.table["kv_cache"] > 52 * GIB
    assert limits.num_blocks * 64 * 128 * 1024 == plan.table["kv_cache"]
    assert limits.max_model_len == 8192
    half = planned(*EIGHT_K, "--kv-cache-dtype", "fp8_e4m3")[1]
    assert abs(half.num_blocks - 2 * limits.num_blocks) <= 1
    assert planned(*EIGHT_K, "--quantization", "fp8")[0].table["weights"] < 0.6 * plan.table["weights"]


LLAMA_70B = replace(LLAMA_8B, num_layers=80, hidden_size=8192, intermediate_size=28672, num_heads=64)
QWEN3_32B = replace(LLAMA_70B, num_layers=64, hidden_size=5120, intermediate_size=25600, vocab_size=151936)
DENSE = {"Llama 8B": LLAMA_8B, "Qwen3-32B": QWEN3_32B, "Llama 70B": LLAMA_70B}
MIXTRAL = replace(LLAMA_8B, vocab_size=32_000, experts=Mixture(Routing(8, 2), 14_336, (True,) * 32))
MIXTURES = {"Mixtral-8x7B": MIXTRAL, "Qwen3-30B-A3B": QWEN3_30B}
GPUS_GIB = (44.5, 79.1, 139.8)  # what a driver says that L40S, H100 and H200 have
SIZED_TOKENS = 131_072


def degrees_of(name):
    """What OPERATING.md says of a model: GPUs by what GPU, each by the bits of the weights."""
    text = (ROOT / "OPERATING.md").read_text(encoding="utf-8")
    cells = re.search(rf"^\| {name} \| ([\d/ |]+) \|$", text, re.MULTILINE)[1].split(" | ")
    return [[int(degree) for degree in cell.split("/")] for cell in cells]


@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_the_table_of_gpus_is_the_arithmetic_above_it(name):
    model = (DENSE | MIXTURES)[name]
    kv_bytes = SIZED_TOKENS * model.num_layers * model.num_kv_heads * model.head_dim * 4

    def degree(gib, bits):
        whole = (model.num_parameters() * bits / 8 + kv_bytes) / GIB
        return next(degree for degree in (1, 2, 4, 8) if whole / degree + 6 <= 0.9 * gib)

    assert degrees_of(name) == [[degree(gib, bits) for bits in (16, 8, 4.2)] for gib in GPUS_GIB]


@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_as_many_gpus_as_the_table_says_hold_its_tokens(name):
    for gib, degrees in zip(GPUS_GIB, degrees_of(name), strict=True):
        place = replace(H100, memory=DeviceMemory(int(gib * GIB), int(gib * GIB)))
        for quantization, degree in zip(("none", "fp8"), degrees, strict=False):
            rank = ShardedCheckpoint(RandomCheckpoint((DENSE | MIXTURES)[name]), 0, degree).config
            limits = planned("--quantization", quantization, place=place, model=rank)[1]
            assert limits.num_blocks * limits.block_size >= SIZED_TOKENS


def test_a_head_takes_memory_of_its_own_and_of_each_token(tmp_path):
    model = replace(TINY_CONFIG, num_layers=4)
    draft = DeviceHeadDraft(eagle3_from_folder(random_head(model, aux_layers=(3, 2)).write(tmp_path), model), BFLOAT16)
    limits = RowLimits(8, 256, 64, num_blocks=64, block_size=16, vocab_size=model.vocab_size)
    sizes, config = buckets_of(8, 64, 7), draft.checkpoint.config
    bytes_of = draft.bytes_of(limits, sizes)
    num_weights = sum(math.prod(shape) for shape in config.tensor_shapes().values())
    assert bytes_of.weights == 2 * num_weights + rotation_bytes(config.layer, limits.max_model_len)
    assert bytes_of.per_token == 2 * (2 * model.num_kv_heads * model.head_dim + model.hidden_size)
    assert bytes_of.per_step_token == 2 * (2 * model.hidden_size + model.hidden_size)
    assert len(bytes_of.kept) == NUM_PASSES * len({size.num_rows for size in sizes if not size.is_decode})


def test_a_model_that_does_not_fit_is_refused_with_what_to_do():
    """A 24 GiB GPU, of which another process has half."""
    small = replace(H100, memory=DeviceMemory(24 * GIB, 12 * GIB))
    with pytest.raises(ShortMemoryError, match=r"of weights .* --quantization fp8, or end other processes on the GPU"):
        planned(*EIGHT_K, place=small)


def test_a_mixture_leaves_the_rest_of_a_gpu_to_its_kv_cache():
    """Of 8x7B in float8 on 80 GiB all experts are held: 46.7 GB of weights, 128 KiB a token in 16 bits."""
    plan, limits = planned(*EIGHT_K, "--quantization", "fp8", model=MIXTRAL)
    of_layer = 8 * (3 * 14_336 * 4096 + 4 * (2 * 14_336 + 4096)) + 2 * 8 * 4096  # experts and their scales, a router
    of_layer += 2 * 4096 * (4096 + 1024) + 4 * (2 * 4096 + 2 * 1024) + 2 * 2 * 4096  # attention, norms
    by_hand = 32 * of_layer + 32_000 * 4096 * 3 + 4 * 32_000 + 2 * 4096 + 8192 * 128 * 4
    assert plan.table["weights"] == by_hand
    left = 0.9 * 80 * GIB - by_hand - sum(plan.table[name] for name in ("activations", "rows", "graphs"))
    assert limits.num_blocks * 64 * 128 * 1024 == pytest.approx(left, rel=1e-2)
    # Of 2,048 tokens two slots each, and of one row to many the vocabulary.
    assert plan.table["activations"] < 1.5 * GIB


FOUR_BITS = GroupedType("of a test", 4, group=128, scales=FloatType.FLOAT16)


def in_four_bits(model):
    """Its checkpoint, with the matrices that products are made with in groups of 128."""
    names = [name for name in model.tensor_shapes() if name.endswith("_proj.weight")]
    return Stored(model, dict.fromkeys(model.tensor_shapes(), FloatType.FLOAT16) | dict.fromkeys(names, FOUR_BITS))


class Stored(RandomCheckpoint):
    """Stored as it is told."""

    stored_types = {}  # noqa: RUF012

    def __init__(self, config, types):
        super().__init__(config)
        self.stored_types = types


def test_experts_in_four_bits_are_counted_as_they_are_held_and_none_is_widened():
    """4.125 bits a number. What is widened is one product of attention, as in a dense model."""
    config = parse_config(["--model", "shape"])
    start = DeviceStart(config, H100, opened(in_four_bits(QWEN3_30B)), ProgressLog())
    table = start.plan_memory()[0].table
    experts, attention = 128 * 3 * 768 * 2048, 2 * 2048 * (4096 + 512)
    others = 2 * (48 * (128 * 2048 + 2 * 2048) + 2 * 151_936 * 2048)
    assert table["weights"] == pytest.approx(48 * (experts + attention) * 4.125 / 8 + others, rel=1e-2)
    whole = planned(model=QWEN3_30B)[0].table
    assert table["activations"] - whole["activations"] == 2 * 2 * 4096 * 2048
    half = ShardedCheckpoint(in_four_bits(QWEN3_30B), 0, 2)
    of_rank = DeviceStart(config, H100, opened(half), ProgressLog()).plan_memory()[0].table["weights"]
    assert of_rank == pytest.approx((table["weights"] + 2 * 48 * 128 * 2048 + 2 * 151_936 * 2048) / 2, rel=1e-2)


def test_slices_of_experts_take_memory_where_bits_do_not_depend_on_the_batch():
    """Of each of two slots 8 products of 4096 numbers in place of one; of whole experts there is one in any case."""
    tokens = parse_config(["--model", "shape"]).max_num_batched_tokens
    half = ShardedCheckpoint(RandomCheckpoint(MIXTRAL), 0, 2).config
    place = replace(H100, memory=DeviceMemory(139 * GIB, 139 * GIB))

    def activations(model, *arguments):
        return planned(*arguments, place=place, model=model)[0].table["activations"]

    def more(model):
        return activations(model, "--batch-invariant") - activations(model)

    assert more(MIXTRAL) == pytest.approx(tokens * 2 * 7 * 4096 * 2 * 9 / 8, rel=1e-6)
    assert more(half) == pytest.approx(tokens * 2 * 3 * 4096 * 2 * 9 / 8, rel=1e-6)
    assert more(QWEN3_30B) == 0


GPU_80, GPU_24 = H100, replace(H100, memory=DeviceMemory(24 * GIB, 24 * GIB))


@pytest.mark.parametrize(
    ("model", "place", "arguments", "needs"),
    [
        (MIXTRAL, GPU_80, [], "2 GPUs (--tensor-parallel-size 2) or --quantization fp8"),
        (QWEN3_30B, GPU_24, [], "4 GPUs (--tensor-parallel-size 4)"),
        (MIXTRAL, GPU_24, ["--tensor-parallel-size", "2"], "8 GPUs (--tensor-parallel-size 8)"),
        (MIXTRAL, replace(GPU_80, capability=(8, 0)), [], "2 GPUs (--tensor-parallel-size 2)"),
    ],
)
def test_a_model_that_does_not_fit_says_how_it_would(model, place, arguments, needs):
    """By the fewest GPUs that hold it, and the formats in which this one does."""
    with pytest.raises(ShortMemoryError) as refused:
        planned(*EIGHT_K, *arguments, place=place, model=model)
    assert f"; the model needs {needs}, or raise --gpu-memory-utilization" in str(refused.value)


def test_ranks_that_have_no_room_are_refused_before_others_are_started(monkeypatch):
    monkeypatch.setattr(loading_device, "_take_gpu", lambda *_: None)
    ranks = SimpleNamespace(start=lambda _: pytest.fail("ranks were started"))
    config = parse_config(["--model", "shape", "--load-format", "dummy", "--tensor-parallel-size", "2"])
    monkeypatch.setattr(loading_device, "this_gpu", lambda: GPU_24)
    with pytest.raises(ShortMemoryError, match="the model needs 8 GPUs"):
        load_on_device(config, RunnerKind.CUDA, opened(RandomCheckpoint(MIXTRAL)), ProgressLog(), ranks)


def test_a_model_that_fits_in_no_way_says_so():
    """Ranks of one with float8 weights would not have the bits of one rank."""
    arguments = "--quantization", "fp8", "--batch-invariant"
    with pytest.raises(ShortMemoryError, match="; choose a smaller model, or raise --gpu-memory-utilization"):
        planned(*EIGHT_K, *arguments, place=GPU_24, model=LLAMA_70B)


def test_bits_that_do_not_depend_on_the_batch_take_no_memory():
    assert planned(*EIGHT_K, "--batch-invariant")[0].table["activations"] == planned(*EIGHT_K)[0].table["activations"]


def test_the_twin_takes_no_more_of_the_host_than_a_cpu_would():
    """Unless it is asked to."""
    place = replace(H100, capability=None, memory=DeviceMemory(16 * GIB, 16 * GIB))
    model = replace(TINY_CONFIG, max_model_len=2**18)
    plan, _ = planned("--block-size", "16", place=place, model=model)
    assert plan.table["kv_cache"] == 2 * GIB
    asked, _ = planned("--kv-cache-memory", "3GiB", place=place, model=model)
    assert asked.table["kv_cache"] == 3 * GIB

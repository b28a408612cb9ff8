"""Kernels are compiled before steps launch them: all of them, by several processes, once."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from gguf.constants import GGMLQuantizationType

pytest.importorskip("triton")

import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from executor_rig.plans import GREEDY, placement, plan
from executor_rig.stepping import SteppingEngine
from paceline.plan.sampling import SamplingParams
from paceline_executor.errors import StartError
from paceline_executor.limits import RowLimits
from paceline_executor.models.eagle3 import Eagle3Head
from paceline_executor.models.registry import upload_model
from paceline_executor.numerics import KvDtype, MatrixKind, Numerics
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.device.buckets import buckets_of
from paceline_executor.runner.device.draft_model import drafting_by_model
from paceline_executor.runner.device.eagle3 import drafting_by_head
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.runner.device.twin import TwinDevice
from paceline_executor.runner.kv_cache import allocate_on_device, kv_geometry
from paceline_executor.start import kernel_compiling
from paceline_executor.weights import load_checkpoint
from paceline_executor.weights.hf.eagle3_config import Eagle3Config
from paceline_executor.weights.stored_tensor import FloatType
from paceline_kernels.devices import cpu_stands_for_gpu
from paceline_kernels.errors import KernelCompileError
from paceline_kernels.gpu.no_gpu import NoGpu
from paceline_kernels.linear import Splits
from paceline_kernels.warm_up import triton_processes
from paceline_kernels.warm_up.triton_launches import KernelLaunch
from paceline_kernels.warm_up.triton_processes import Compiled, compile_launches
from random_models import MIXTURE_CONFIGS, TINY_CONFIG, RandomCheckpoint, gguf_parts

LIMITS = RowLimits(
    num_rows=2,
    max_model_len=64,
    max_num_batched_tokens=16,
    num_blocks=12,
    block_size=16,
    vocab_size=272,
    max_num_draft_tokens=5,
)
CPU, NUMERICS = torch.device("cpu"), Numerics(MatrixKind.DENSE, KvDtype.FLOAT16, FloatType.FLOAT16)
RULED = SamplingParams(
    temperature=0.8, top_k=7, top_p=0.9, min_p=0.01, seed=3, repetition_penalty=1.5, logit_bias=((3, 4.0),)
)
# What a process without an interpreter finds: the launches of a tiny model's steps on a GPU of sm_90, one per line. The
# last argument says what drafts beside it.
FIND = """
import json
import sys
from dataclasses import replace
import torch
from gguf.constants import GGMLQuantizationType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from paceline_executor.start.kernel_compiling import DraftModelShape, HeadShape, Steps, launches_of_steps
from paceline_executor.numerics import KvDtype, MatrixKind, Numerics
from paceline_executor.limits import RowLimits
from paceline_executor.runner.device import rehearsal
from paceline_executor.runner.device.buckets import buckets_of
from random_models import MIXTURE_CONFIGS, TINY_CONFIG
from paceline_executor.weights.hf.eagle3_config import Eagle3Config
from paceline_executor.weights.stored_tensor import FloatType
from paceline_kernels.gpu.no_gpu import compile_for
from paceline_kernels.linear import Splits
compile_for(90)


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        tensors = [one for one in tree_leaves((arguments, options, result)) if isinstance(one, torch.Tensor)]
        noted["all"].append(str(operation))
        if any(tensor.device.type != "meta" for tensor in tensors):
            noted["host"].append(str(operation))
        return result


noted = {"all": [], "host": []}
capture = rehearsal.RehearsalDevice.capture


def watched_capture(device, work):
    with Watched():
        return capture(device, work)


rehearsal.RehearsalDevice.capture = watched_capture
limits = RowLimits(
    num_rows=2, max_model_len=64, max_num_batched_tokens=16, num_blocks=12, block_size=16, vocab_size=272,
    max_num_draft_tokens=5
)
more_blocks = replace(limits, num_blocks=4097)
numerics = Numerics(MatrixKind.DENSE, KvDtype.FLOAT16, FloatType.FLOAT16)
small = replace(TINY_CONFIG, hidden_size=32, num_layers=1)
drafts_by = {
    "nothing": None,
    "blocks": None,
    "draft model": DraftModelShape(small, numerics, {}),
    "copy": DraftModelShape(TINY_CONFIG, replace(numerics, matrices=MatrixKind.FLOAT8), {}),
    "head": HeadShape(Eagle3Config(small, 100, 64, (1,), False), numerics, True, True),
}[sys.argv[-1]]
stored = {}
if sys.argv[-1] == "blocks":
    numerics = replace(numerics, matrices=MatrixKind.AS_STORED)
    stored = dict.fromkeys(TINY_CONFIG.tensor_shapes(), GGMLQuantizationType.Q4_1)
steps = Steps(TINY_CONFIG, numerics, stored, limits, buckets_of(2, 16, 5), Splits.EVEN, draft_model=drafts_by)
found = launches_of_steps(steps)
if drafts_by is None:  # how many blocks there are depends on the memory that is free
    assert launches_of_steps(replace(steps, limits=more_blocks)) == found
for launch in found:
    print(json.dumps([launch.kernel, launch.specialization]))
if sys.argv[-1] == "nothing":
    for launch in launches_of_steps(replace(steps, model=MIXTURE_CONFIGS["qwen2moe"])):
        print("mixture", json.dumps([launch.kernel, launch.specialization]))
print(json.dumps({name: sorted(set(operations)) for name, operations in noted.items()}))
"""


# A few quick kernels, twice by several processes that get them in other orders; then what cannot be compiled.
COMPILE = """
import sys
from pathlib import Path
import triton
from paceline_kernels.activation import Gate, gate_and_multiply
from paceline_kernels.errors import KernelCompileError
from paceline_kernels.gpu.no_gpu import NoGpu, compiling_for
from paceline_kernels.take_rows import take_rows
from paceline_kernels.warm_up.triton_kernels import KERNELS
from paceline_kernels.warm_up.triton_launches import KernelLaunch, launches_of
from paceline_kernels.warm_up.triton_processes import compile_launches


def meta(*shape, dtype=torch.float16):
    return torch.empty(shape, dtype=dtype, device="meta")


def call():
    take_rows(meta(8, 64), meta(2, dtype=torch.int32))
    take_rows(meta(8, 64), meta(3, dtype=torch.int32))
    gate_and_multiply(meta(2, 64), Gate.SILU)
    gate_and_multiply(meta(2, 64), Gate.GELU_TANH)


def counts(compiled):
    return compiled.num_compiled, compiled.num_kept, compiled.num_lost


class Gpu(NoGpu):
    def get_current_device(self):
        return 0


launches, folder, told = launches_of(call), Path(sys.argv[1]), []
# As after a first launch on a GPU: the kernel is in memory, and another launch would run it.
triton.runtime.driver.set_active(gpu := Gpu(90))
KERNELS[launches[0].kernel].preload(launches[0].specialization)
with compiling_for(90):
    assert launches_of(call) == launches
assert triton.runtime.driver.active is gpu
print(len(launches))
print(*counts(compile_launches(lambda: launches, 90, folder, 2, lambda done, _: told.append(done))))
print(sorted(told) == list(range(len(launches) + 1)))
kept = sorted(folder.rglob("*"))
spoilt = KernelLaunch(launches[0].kernel, launches[1].specialization)
try:
    compile_launches(lambda: [*launches[::-1], spoilt], 90, folder, 1)
except KernelCompileError as error:
    print(error)
print(sorted(folder.rglob("*")) == kept)
"""


def run(code, *arguments):
    """The output of a process that compiles kernels as on a GPU."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What one such process says: its imports take longer than all else."""
    return run(FIND + COMPILE, tmp_path_factory.mktemp("compiled"), "nothing").splitlines()


def found_in(said, model=""):
    """What is compiled beforehand: kernels, each with all that its code depends on."""
    return {tuple(json.loads(line.removeprefix(model))) for line in said if line.startswith(f"{model}[")}


# What else is launched writes only numbers, on which no launch depends: without it all are 0.
STEERING = {
    "advance_rows_kernel",
    "draw_inputs_kernel",
    "lookup_drafts_kernel",
    "read_plan_kernel",
    "stamp_kernel",
    "step_inputs_kernel",
    "write_results_kernel",
    "write_words_kernel",
}


class Recorder:
    """Has interpreted launches say what they would have had compiled; only those that steer others run."""

    def __init__(self, monkeypatch):
        self.seen = set()
        self._compiled = {}
        interpret = InterpretedFunction.run

        def run(function, *arguments, grid, warmup, **options):
            self._record(function, arguments, options)
            if function.fn.__name__ in STEERING:
                interpret(function, *arguments, grid=grid, warmup=warmup, **options)

        monkeypatch.setattr(InterpretedFunction, "run", run)
        monkeypatch.setattr(torch, "empty", torch.zeros)
        monkeypatch.setattr(triton.runtime.driver, "_active", NoGpu(90), raising=False)
        monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", self._note)

    def _record(self, function, arguments, options):
        compiled = self._compiled.setdefault(function.fn, JITFunction(function.fn, **function.kwargs))
        # Only the interpreter is told the time.
        names = function.arg_names[: len(arguments)]
        told = [None if name == "interpreted" else value for name, value in zip(names, arguments, strict=True)]
        compiled.run(*told, grid=(1,), warmup=False, **options)

    def _note(self, *, fn, compile, **_):  # noqa: A002  Triton names it so
        self.seen.add((f"{fn.module}.{fn.name}", compile["specialization_data"]))
        return True


def draft_model():
    """A smaller one than the target, that drafts for it."""
    checkpoint = RandomCheckpoint(replace(TINY_CONFIG, hidden_size=32, num_layers=1))
    model = upload_model(checkpoint, CPU, LIMITS.max_model_len, NUMERICS)
    return drafting_by_model(model, checkpoint.config, NUMERICS, LIMITS, LIMITS.max_model_len, Splits.EVEN, CPU)


def head():
    """A drafter of another size than the target, which has fewer ids and an embedding of its own."""
    config = Eagle3Config(replace(TINY_CONFIG, hidden_size=32, num_layers=1), 100, 64, (1,), norm_before_residual=False)
    shapes = config.tensor_shapes() | {"embed_tokens.weight": (272, 32)}

    def tensor(name):
        return torch.full(shapes[name], 0.01, dtype=torch.float16)

    of_head = Eagle3Head(config, tensor, None, LIMITS.max_model_len, MatrixKind.DENSE)
    return drafting_by_head(of_head, torch.arange(100), NUMERICS, LIMITS, Splits.EVEN)


def run_whole_model(drafting=None, checkpoint=None, numerics=NUMERICS, config=TINY_CONFIG):
    """Prompts in chunks beside decodes, with rules, and with log-probabilities of output and prompt; drafts of every
    depth, some beside a chunk; copies of blocks.
    """
    geometry = kv_geometry(config, LIMITS.num_blocks, LIMITS.block_size, NUMERICS)
    cache = allocate_on_device(geometry, NUMERICS.kv, CPU)
    model = upload_model(checkpoint or RandomCheckpoint(config), CPU, LIMITS.max_model_len, numerics)
    sizes = buckets_of(2, 16, 5)
    runner = DeviceRunner(TwinDevice(), model, cache, geometry, LIMITS, buckets=sizes, drafting=drafting)
    engine = SteppingEngine(RowTable(LIMITS), runner)
    asking = {"num_logprobs": 2, "num_prompt_logprobs": 1, "bad_words": [(5, 6)], "min_tokens": 2}
    first = placement(0, range(5, 25), sampling=RULED, end_token_ids=(1,), **asking)
    engine.execute(plan([(0, 16)], step_id=1, place=[first], grants=[(0, 0, 0), (0, 1, 1)]))
    second = placement(1, range(40, 47), sampling=GREEDY)
    engine.execute(plan([(0, 4), (1, 7)], step_id=2, place=[second], grants=[(1, 0, 2)]))
    engine.execute(plan([(0, 1), (1, 1)], step_id=3))
    engine.execute(plan([(0, 2), (1, 4)], step_id=4, drafts=[1, 3], copies=[(2, 7)], grants=[(1, 1, 7)]))
    engine.execute(plan([(1, 6)], step_id=5, drafts=[5]))


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@pytest.mark.parametrize(
    ("drafts_by", "make_drafting"),
    [
        ("nothing", lambda: None),
        pytest.param("draft model", draft_model, marks=pytest.mark.slow),
        pytest.param("head", head, marks=pytest.mark.slow),
    ],
)
def test_whatever_a_whole_model_launches_was_compiled_before(said, monkeypatch, drafts_by, make_drafting):
    """Down to the alignment of every pointer: what is missing would be compiled while requests wait."""
    found = found_in(said if drafts_by == "nothing" else run(FIND, drafts_by).splitlines())
    recorder = Recorder(monkeypatch)
    with cpu_stands_for_gpu():
        run_whole_model(make_drafting())
    kernels = {name.rpartition(".")[2] for name, _ in recorder.seen}

    assert recorder.seen <= found
    assert kernels >= {"attend_splits", "attend_chunks", "apply_rules_kernel", "take_logprobs_kernel"}
    assert "block_copy_kernel" in kernels
    assert ("lookup_drafts_kernel" in kernels) == (drafts_by == "nothing")


@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_whatever_a_mixture_launches_was_compiled_before(said, monkeypatch):
    """Few slots and tiles, whichever a step has; a choice of one, by which a shared expert is multiplied."""
    recorder = Recorder(monkeypatch)
    with cpu_stands_for_gpu():
        run_whole_model(config=MIXTURE_CONFIGS["qwen2moe"])
    kernels = {name.rpartition(".")[2] for name, _ in recorder.seen}
    assert recorder.seen <= found_in(said, "mixture ")
    assert kernels >= {"route_rows", "group_slots", "multiply_few_slots", "multiply_expert_tiles", "combine_slots"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
def test_whatever_a_model_of_blocks_launches_was_compiled_before(tmp_path, monkeypatch):
    parts = gguf_parts(RandomCheckpoint(), GGMLQuantizationType.Q4_1)
    checkpoint, found = load_checkpoint(parts.write(tmp_path / "tiny.gguf")), found_in(run(FIND, "blocks").splitlines())
    recorder = Recorder(monkeypatch)
    with cpu_stands_for_gpu():
        run_whole_model(checkpoint=checkpoint, numerics=replace(NUMERICS, matrices=MatrixKind.AS_STORED))
    assert recorder.seen <= found
    assert {name.rpartition(".")[2] for name, _ in recorder.seen} >= {"multiply_few_groups"}


@pytest.mark.slow
def test_products_of_8_bits_of_a_copy_that_drafts_are_compiled_before():
    assert any("fp8e4" in specialization for _, specialization in found_in(run(FIND, "copy").splitlines()))


def test_nothing_that_is_captured_has_to_do_with_the_host(said):
    """A capture refuses to copy from memory that is not pinned, and to wait for the device. On a device without numbers
    whatever reads one fails.
    """
    (noted,) = (json.loads(line) for line in said if line.startswith("{"))
    assert "aten.empty.memory_format" in noted["all"]
    assert noted["host"] == []


def test_kernels_are_compiled_once_whoever_compiles_which_and_in_whatever_order(said):
    num_launches, counted, is_told, refusal, is_all_kept = (
        line for line in said if not line.startswith(("[", "{", "mixture"))
    )
    assert (num_launches, counted) == ("3", "3 0 0")  # rows are taken in one way, however many
    assert (is_told, is_all_kept) == ("True", "True")
    assert refusal.startswith("paceline_kernels.take_rows.triton.take_rows_kernel: RuntimeError: Specialization data")


STEPS = kernel_compiling.Steps(TINY_CONFIG, NUMERICS, {}, LIMITS, buckets_of(2, 16, 5), Splits.EVEN)


class Processes:
    """What is compiled, without compiling it."""

    def __init__(self, num_lost=0, error=None):
        self.num_lost, self.error, self.asked = num_lost, error, []

    def __call__(self, find, capability, folder, num_processes, on_done):
        self.asked.append(capability)
        folder.mkdir(exist_ok=True)
        launches = find()
        for num_done in range(len(launches) + 1):
            on_done(num_done, len(launches))
            (folder / f"code-{capability}-{num_done}").mkdir(exist_ok=True)
        if self.error:
            raise KernelCompileError(self.error)
        return Compiled(len(launches) - self.num_lost, 0, self.num_lost)


@pytest.fixture
def compiling(monkeypatch, tmp_path):
    """Compile by such processes: returns what the start is told, and what became of it."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(kernel_compiling, "settle_keys", lambda: None)
    monkeypatch.setattr(
        kernel_compiling, "launches_of_steps", lambda _: [KernelLaunch("a", "1"), KernelLaunch("b", "2")]
    )

    def compile_by(processes, capability=(9, 0), steps=STEPS):
        told = []
        monkeypatch.setattr(kernel_compiling, "compile_launches", processes)
        progress = lambda phase, fraction: told.append((phase, fraction))  # noqa: E731
        return told, kernel_compiling.have_compiled(steps, capability, tmp_path, progress)

    return compile_by


def test_a_start_shows_how_far_it_is_and_the_next_one_starts_no_process(compiling):
    """Unless the GPU is another one, or what was compiled was lost."""
    processes = Processes()
    told, compiled = compiling(processes)
    assert told == [("find kernels", 0.0), ("compile kernels", 0.0), ("compile kernels", 0.5), ("compile kernels", 1.0)]
    assert (compiled.num_compiled, processes.asked) == (2, [90])

    assert compiling(processes) == ([], Compiled(0, 2, 0))
    compiling(Processes(num_lost=1), (8, 9))
    compiling(processes, (8, 9))
    assert processes.asked == [90, 89]


def test_kernels_that_somebody_has_removed_are_compiled_again(compiling, tmp_path):
    """Though the mark is still there."""
    processes = Processes()
    compiling(processes)
    for code in (tmp_path / "triton").glob("code-*"):
        code.rmdir()
    _, compiled = compiling(processes)
    assert (compiled.num_compiled, processes.asked) == (2, [90, 90])


def test_kernels_are_looked_for_again_where_others_may_be_launched(compiling):
    """Not because there is memory for more blocks."""
    processes = Processes()
    more_blocks = replace(STEPS, limits=replace(LIMITS, num_blocks=LIMITS.num_blocks + 1))
    fewer_sizes = replace(STEPS, sizes=buckets_of(2, 8, 5))
    drafted = replace(STEPS, draft_model=kernel_compiling.DraftModelShape(TINY_CONFIG, NUMERICS, {}))
    for steps in (STEPS, more_blocks, replace(STEPS, splits=Splits.FIXED), fewer_sizes, drafted, STEPS):
        compiling(processes, steps=steps)
    assert processes.asked == [90] * 4


def test_processes_that_die_at_once_lose_a_launch_each(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(triton_processes.sys, "executable", "/bin/false")
    launches = [KernelLaunch("a", str(number)) for number in range(5)]
    assert compile_launches(lambda: launches, 90, tmp_path, 3) == Compiled(0, 0, 5)
    assert [record.getMessage() for record in caplog.records].count(
        "a process that compiles kernels ended with 1 at a"
    ) == 3


def test_no_machine_starts_more_processes_than_are_of_use(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(triton_processes._Pool, "serve", lambda pool, command: started.append(command))
    compile_launches(list, 90, tmp_path, 500)
    assert len(started) == triton_processes._MAX_PROCESSES


def test_processes_that_compile_end_where_nothing_is_found(tmp_path):
    def find():
        raise ValueError("of the test")

    with pytest.raises(ValueError, match="of the test"):
        compile_launches(find, 90, tmp_path, 1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("compile ")]


def test_a_kernel_that_the_compiler_refuses_ends_the_start(compiling):
    with pytest.raises(StartError, match=r"compute capability 9\.0: kernel: no such.*another version of Triton"):
        compiling(Processes(error="kernel: no such instruction"))


def test_layers_that_launch_the_same_are_gone_through_once():
    """One of each window at each alignment: a model of 26 layers with every sixth unlike the others."""
    sliding = tuple(layer % 6 != 5 for layer in range(26))
    deep = replace(TINY_CONFIG, num_layers=26, sliding_window=20, sliding_layers=sliding)
    first = kernel_compiling.first_layers(deep, {})
    kinds = {(deep.window(layer), layer % 4) for layer in range(26)}

    assert {(first.window(layer), layer % 4) for layer in range(first.num_layers)} == kinds
    assert first.num_layers == 12
    assert kernel_compiling.first_layers(replace(TINY_CONFIG, num_layers=32), {}).num_layers == 4


def test_sparse_layers_are_gone_through_wherever_they_begin():
    """Here behind five dense ones."""
    config = MIXTURE_CONFIGS["glm4moe"]
    experts = replace(config.experts, sparse_layers=(False,) * 5 + (True,) * 41)
    assert kernel_compiling.first_layers(replace(config, num_layers=46, experts=experts), {}).num_layers == 9

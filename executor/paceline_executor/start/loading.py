"""From a configuration to a loaded model: fetch, read, allocate, warm up. Runs in the step thread.

Refuses to know file formats and computing, and imports the latter, with torch, only when it is needed.
"""

import os
from dataclasses import replace

import structlog

from paceline.bytes_tokenizer import PRINTABLE, VOCAB_SIZE
from paceline.process.command import ExitCode
from paceline_executor.config import Config, LoadFormat, RunnerKind
from paceline_executor.limits import RowLimits
from paceline_executor.link.description import Description, Loaded
from paceline_executor.link.engine import Engine
from paceline_executor.memory import available_bytes, explained
from paceline_executor.numerics import choose_cpu_numerics
from paceline_executor.ranks.group import OnLost
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.drafter import PromptLookup
from paceline_executor.runner.interface import CacheGeometry, Runner, WarmUpProgress
from paceline_executor.runner.simulated import BYTES_PER_TOKEN as SIMULATED_TOKEN_BYTES
from paceline_executor.runner.simulated import SimulatedRunner
from paceline_executor.runner.step_times import StepTimeCurve, read_step_times
from paceline_executor.start.drafter_choice import open_drafter
from paceline_executor.start.opening import (
    Opened,
    ProgressLog,
    open_model,
    served_name,
    simulated_tokenizer,
)
from paceline_executor.start.runner_choice import choose_runner
from paceline_executor.start.sizing import NO_DRAFTER, DrafterNeeds, ModelNeeds, limits_for, limits_within
from paceline_executor.weights.sharded import ShardedCheckpoint, check_degree
from paceline_executor.weights.tokenizer import TokenizerBundle

_SIMULATED_MODEL_LEN = 8192


def load(config: Config, on_lost: OnLost = lambda _: os._exit(ExitCode.FAILED)) -> Loaded:
    """on_lost: told of several ranks when one is lost. Raises ModelError for the model's faults, StartError for the
    configuration's.
    """
    kind = choose_runner(config)
    if kind is RunnerKind.SIMULATED:
        return load_simulated(config, read_step_times(config.step_times) if config.step_times else StepTimeCurve())
    progress = ProgressLog()
    opened = open_model(config, progress)
    check_degree(opened.checkpoint.config, config.tensor_parallel_size)
    if kind is RunnerKind.CPU:
        with explained("memory ran out while the model was loaded: free some, or raise its limits, also ulimit -v"):
            return _load_on_cpu(config, opened, progress, on_lost)

    from paceline_executor.start.loading_device import load_on_device  # with torch, which takes seconds to import

    return load_on_device(config, kind, opened, progress)


def load_simulated(
    config: Config, step_times: StepTimeCurve, vocab_size: int = VOCAB_SIZE, engine: type[Engine] = Engine
) -> Loaded:
    """The tokenizer is one of bytes, and of words if the vocabulary is larger."""
    max_model_len = config.max_model_len or _SIMULATED_MODEL_LEN
    needs = ModelNeeds(0, SIMULATED_TOKEN_BYTES, max_model_len, vocab_size)
    limits = limits_within(config, needs, available_bytes())
    runner = SimulatedRunner(limits.num_blocks, limits.block_size, vocab_size, drawn=PRINTABLE, step_times=step_times)
    runner.draft_by(PromptLookup())
    tokenizer = simulated_tokenizer(vocab_size)
    description = describe_simulated(config.served_model_name or "simulated", runner, limits, tokenizer)
    return Loaded(engine(RowTable(limits), runner), description)


def describe_simulated(name: str, runner: Runner, limits: RowLimits, tokenizer: TokenizerBundle) -> Description:
    return Description(
        model=name,
        architecture="simulated",
        num_parameters=0,
        quantization="",
        limits=limits,
        geometry=runner.kv_geometry,
        kv_dtype="int32",
        tokenizer=tokenizer,
        step_points=runner.warm_up(),
        device="simulated",
        num_threads=0,
    )


def _load_on_cpu(config: Config, opened: Opened, progress: ProgressLog, on_lost: OnLost) -> Loaded:
    whole, degree = opened.checkpoint, config.tensor_parallel_size
    checkpoint = whole if degree == 1 else ShardedCheckpoint(whole, 0, degree)
    numerics = choose_cpu_numerics(config.quantization, config.kv_cache_dtype, whole.config, config.block_size)
    opened_drafter = open_drafter(config, opened, numerics, progress)
    drafter_needs = NO_DRAFTER if opened_drafter is None else opened_drafter.needs
    limits = limits_for(config, checkpoint.config, numerics, available_bytes(), drafter_needs, checkpoint.stored_types)

    from paceline_executor.ranks.shared_collectives import SharedMemoryCollectives
    from paceline_executor.runner.cpu import CpuModel, checked_threads, have_compiled, instructions, operations_of
    from paceline_executor.runner.device.host_device import HostDevice
    from paceline_executor.start.ranks import ranked_runner, start_followers

    def on_warm_up(warm_up: WarmUpProgress) -> None:
        progress.log("warm_up", warm_up.step, warm_up.index / warm_up.num_steps)

    num_threads = max(1, checked_threads(config.num_threads) // degree)
    device = HostDevice(num_threads)
    group = start_followers(config, opened, limits, num_threads, on_lost)
    progress.log("model_load", "weights", 0.5)
    collectives = None if group is None else SharedMemoryCollectives(group.memory)
    model = CpuModel.read(device, checkpoint, numerics, limits.max_model_len, collectives)
    progress.log("model_load", "done", 1.0)
    have_compiled(device, operations_of(numerics), on_warm_up)
    drafting = None if opened_drafter is None else opened_drafter.drafting(model, limits, progress)
    own = model.runner(limits, drafting, on_warm_up)
    runner = own if group is None else ranked_runner(group, own, whole)
    step_points = runner.warm_up()
    if group is not None:
        group.has_warmed_up()
    progress.log("warm_up", "done", 1.0)
    structlog.get_logger().info(
        "numerics",
        weights=numerics.weights,
        kv_cache=numerics.kv.value,
        instructions=instructions(),
        num_threads=num_threads,
    )
    description = Description(
        model=served_name(config, opened.path),
        architecture=checkpoint.config.architecture,
        num_parameters=whole.config.num_parameters(),
        quantization=checkpoint.quantization,
        limits=limits,
        geometry=_with_drafter(runner.kv_geometry, drafter_needs),
        kv_dtype=numerics.kv.value,
        tokenizer=opened.tokenizer,
        step_points=step_points,
        device="cpu",
        num_threads=num_threads * degree,
        has_dummy_weights=config.load_format is LoadFormat.DUMMY,
        weight_bytes=model.weight_bytes * degree,
        weights_digest=checkpoint.digest,
    )
    return Loaded(Engine(RowTable(limits), runner), description)


def _with_drafter(geometry: CacheGeometry, drafter: DrafterNeeds) -> CacheGeometry:
    return replace(geometry, bytes_per_block=geometry.bytes_per_block + geometry.block_size * drafter.bytes_per_token)

"""A model on a CPU: kernels are compiled, weights read, the runner is built and warmed up.

Refuses to know file formats, and how a step is computed.
"""

from dataclasses import replace

import structlog

from paceline.plan.values import MAX_BLOCKS
from paceline_executor.config import Config, LoadFormat
from paceline_executor.limits import RowLimits
from paceline_executor.link.description import Description, Loaded
from paceline_executor.link.engine import Engine
from paceline_executor.memory import available_bytes
from paceline_executor.numerics import FLOAT32_NUMERICS, Numerics, choose_cpu_numerics
from paceline_executor.ranks.memory import GroupMemory
from paceline_executor.ranks.process_group import collectives_of_hosts
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuModel, checked_threads, have_compiled, instructions, operations_of
from paceline_executor.runner.device.host_device import HostDevice
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.runner.interface import CacheGeometry, WarmUpProgress
from paceline_executor.start.drafter_choice import open_drafter
from paceline_executor.start.opening import Opened, ProgressLog, forms_of, served_name
from paceline_executor.start.ranks import RankStart, part_of
from paceline_executor.start.sizing import NO_DRAFTER, DrafterNeeds, limits_for
from paceline_executor.weights import Checkpoint

_NAME = "cpu"


def load_on_cpu(config: Config, opened: Opened, progress: ProgressLog, ranks: RankStart | None) -> Loaded:
    """Raises ModelError, StartError."""
    whole, degree = opened.checkpoint, config.tensor_parallel_size
    if ranks is not None:
        ranks.start(opened)
    checkpoint = part_of(whole, 0, degree)
    numerics = choose_cpu_numerics(config.quantization, config.kv_cache_dtype, whole.config, config.block_size)
    opened_drafter = open_drafter(config, opened, numerics, progress)
    drafter_needs = NO_DRAFTER if opened_drafter is None else opened_drafter.needs
    limits = limits_for(config, checkpoint.config, numerics, available_bytes(), drafter_needs, checkpoint.stored_types)

    def on_warm_up(warm_up: WarmUpProgress) -> None:
        progress.log("warm_up", warm_up.step, warm_up.index / warm_up.num_steps)

    num_threads = _threads_of_rank(config)
    device = HostDevice(num_threads)
    if ranks is not None:
        num_blocks = ranks.agree(_NAME, limits.num_blocks)
        longest = min(limits.max_model_len, num_blocks * limits.block_size)
        limits = replace(limits, num_blocks=num_blocks, max_model_len=longest)
    have_compiled(device, operations_of(numerics, checkpoint.config), on_warm_up)
    if ranks is not None:
        ranks.begin(limits)
    progress.log("model_load", "weights", 0.5)
    collectives = None if ranks is None else collectives_of_hosts(ranks.memory)
    model = CpuModel.read(device, checkpoint, numerics, limits.max_model_len, collectives)
    progress.log("model_load", "done", 1.0)
    drafting = None if opened_drafter is None else opened_drafter.drafting(model, limits, progress)
    own = model.runner(limits, drafting, on_warm_up)
    runner = own if ranks is None else ranks.runner(own)
    step_points = runner.warm_up()
    if ranks is not None:
        ranks.has_warmed_up()
    progress.log("warm_up", "done", 1.0)
    _log_numerics(numerics, num_threads)
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
        device=_NAME,
        num_threads=num_threads * degree,
        has_dummy_weights=config.load_format is LoadFormat.DUMMY,
        weight_bytes=model.weight_bytes * degree,
        weights_digest=checkpoint.digest,
        num_ranks=degree,
        expert_load_ratio=model.expert_load_ratio,
        forms=forms_of(opened.tokenizer, limits.vocab_size),
    )
    return Loaded(Engine(RowTable(limits, description.forms), runner), description)


def _log_numerics(numerics: Numerics, num_threads: int) -> None:
    structlog.get_logger().info(
        "numerics",
        weights=numerics.weights,
        kv_cache=numerics.kv.value,
        instructions=instructions(),
        num_threads=num_threads,
    )


class CpuRank:
    """A follower's part, in float32. The first rank of a node shares out its cores and memory."""

    device = _NAME

    def __init__(self, config: Config, whole: Checkpoint, memory: GroupMemory) -> None:
        self._config, self._part, self._memory = config, part_of(whole, memory.rank, memory.degree), memory

    @property
    def num_blocks(self) -> int:
        if self._memory.share.node == 0:
            return MAX_BLOCKS
        config, part = self._config, self._part
        return limits_for(
            config, part.config, FLOAT32_NUMERICS, available_bytes(), NO_DRAFTER, part.stored_types
        ).num_blocks

    def build(self, limits: RowLimits) -> DeviceRunner:
        device = HostDevice(_threads_of_rank(self._config))
        have_compiled(device, operations_of(FLOAT32_NUMERICS, self._part.config), lambda _: None)
        sums = collectives_of_hosts(self._memory)
        return CpuModel.read(device, self._part, FLOAT32_NUMERICS, limits.max_model_len, sums).runner(limits)


def _threads_of_rank(config: Config) -> int:
    return max(1, checked_threads(config.num_threads) // len(config.share.ranks))


def _with_drafter(geometry: CacheGeometry, drafter: DrafterNeeds) -> CacheGeometry:
    return replace(geometry, bytes_per_block=geometry.bytes_per_block + geometry.block_size * drafter.bytes_per_token)

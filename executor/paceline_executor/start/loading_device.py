"""A model on a GPU, or on the twin of one: memory is planned, weights arrive, the runner is built, steps are captured.

Refuses to know how bytes come to a device and in which numbers they are computed with.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import structlog
import torch

from paceline_executor.config import DEVICE_BLOCK_SIZE, Config, DrafterKind, LoadFormat, RunnerKind
from paceline_executor.device_numerics import DeviceNumerics, choose_device_numerics, choose_twin_numerics
from paceline_executor.limits import RowLimits
from paceline_executor.link.description import Description, Loaded
from paceline_executor.link.engine import Engine
from paceline_executor.memory import available_bytes, explained
from paceline_executor.models.device_eagle3 import DeviceEagle3Head
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.registry import dummy_model, twin_model, upload_model
from paceline_executor.models.rope import rotation_bytes
from paceline_executor.numerics import KvDtype
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.device.buckets import Buckets, buckets_of
from paceline_executor.runner.device.draft_model import NUM_PASSES, drafting_by_model, most_tokens
from paceline_executor.runner.device.drafts import MakeDrafting
from paceline_executor.runner.device.eagle3 import drafting_by_head, head_geometry
from paceline_executor.runner.device.kv_scales import measured_scales
from paceline_executor.runner.device.memory_plan import (
    BlockNeeds,
    DeviceMemory,
    MemoryPlan,
    MemoryUses,
    activation_bytes,
    graph_bytes,
    plan_memory,
)
from paceline_executor.runner.interface import CacheGeometry, Runner, WarmUpProgress
from paceline_executor.runner.kv_cache import allocate_on_device, kv_geometry
from paceline_executor.runner.prompt_logprobs import MAX_PIECE_TOKENS
from paceline_executor.start.device_runner import RunnerParts, build_runner, graph_sizes
from paceline_executor.start.drafter_choice import open_draft_model, open_head
from paceline_executor.start.opening import Opened, ProgressLog, num_parameters, served_name
from paceline_executor.start.sizing import (
    MAX_DEFAULT_KV_BYTES,
    MIN_POOL_TOKENS,
    fillable_blocks,
    longest_row,
    row_limits,
)
from paceline_executor.upload.matrices import MatrixKind
from paceline_executor.weights.checkpoint import Checkpoint, KvScales
from paceline_executor.weights.hf.eagle3 import Eagle3Checkpoint
from paceline_executor.weights.stored_tensor import FloatType, StoredType
from paceline_kernels.linear import Splits

_DEFAULT_SHARE = 0.9
_TWIN_KV_SHARE = 4  # a quarter of what is free, as on a CPU
_MAX_DRAFTS = 7  # eight tokens of four query heads: attention keeps so many in registers
_TOKEN_BYTES = 32  # ids, positions and slots of a captured step


@dataclass(frozen=True, slots=True)
class DeviceDraft:
    """A draft model: its headers are read, its weights are not. Keys and values are of the type it computes in."""

    checkpoint: Checkpoint
    numerics: DeviceNumerics
    stored: Mapping[str, StoredType]
    is_copy: bool = False  # of the target

    @property
    def bytes_per_token(self) -> int:
        """Counts the KV cache."""
        return self.numerics.bytes_per_token(self.checkpoint.config)

    def max_model_len(self, limits: RowLimits) -> int:
        return min(limits.max_model_len, self.checkpoint.config.max_model_len)


@dataclass(frozen=True, slots=True)
class DeviceHeadDraft:
    """An EAGLE-3 head: its headers are read, its weights are not."""

    checkpoint: Eagle3Checkpoint
    numerics: DeviceNumerics  # the target's

    @property
    def bytes_per_token(self) -> int:
        return head_geometry(self.checkpoint.config, 1, 1, self.numerics).bytes_per_block

    @property
    def weight_bytes(self) -> int:
        """At most."""
        return self.checkpoint.num_parameters() * self.numerics.dtype.itemsize

    @property
    def step_bytes_per_token(self) -> int:
        """Of the target's: hidden states, and the feature that they become."""
        config = self.checkpoint.config
        width = len(config.aux_layers) * config.target_hidden_size + config.layer.hidden_size
        return width * self.numerics.dtype.itemsize


Draft = DeviceDraft | DeviceHeadDraft


@dataclass(frozen=True, slots=True)
class Place:
    device: torch.device
    name: str  # for people
    memory: DeviceMemory
    capability: tuple[int, int] | None  # None of the twin

    @property
    def is_twin(self) -> bool:
        return self.capability is None


def this_gpu() -> Place:
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    device = torch.device("cuda", torch.cuda.current_device())
    memory = DeviceMemory(total_bytes, free_bytes)
    return Place(device, torch.cuda.get_device_name(), memory, torch.cuda.get_device_capability())


def twin_place() -> Place:
    free_bytes = available_bytes()
    return Place(torch.device("cpu"), "twin", DeviceMemory(free_bytes, free_bytes), None)


def load_on_device(config: Config, kind: RunnerKind, opened: Opened, progress: ProgressLog) -> Loaded:
    """Raises ModelError, LimitError, ShortMemoryError."""
    config = _on_device(config)
    place = this_gpu() if kind is RunnerKind.CUDA else twin_place()
    checkpoint, log = opened.checkpoint, structlog.get_logger()
    stored = _stored_types(config, checkpoint)
    numerics = _choose_numerics(config, place, checkpoint, stored)
    draft = _open_draft(config, place, opened, numerics, progress)
    sizes = buckets_of(config.max_num_seqs, config.max_num_batched_tokens, _max_drafts(config))
    plan, limits = plan_device(config, place, checkpoint, numerics, stored, sizes, draft)
    log.info("memory", device=place.name, total=place.memory.total_bytes, **plan.table)
    if place.capability is not None:
        _compile_kernels(config, place.capability, checkpoint, numerics, stored, limits, sizes, draft, progress)
    runner = _runner(config, place, checkpoint, numerics, limits, sizes, draft, progress)
    with _explained("while steps were captured", "lower --max-num-batched-tokens or --max-num-seqs"):
        step_points = runner.warm_up()
    progress.log("warm_up", "done", 1.0)
    log.info(
        "numerics",
        weights=numerics.matrices.value,
        computed_in=str(numerics.dtype).removeprefix("torch."),
        kv_cache=numerics.kv.value,
        device=place.name,
        batch_invariant=config.batch_invariant,
    )
    is_rounded = numerics.matrices is MatrixKind.FLOAT8
    description = Description(
        model=served_name(config, opened.path),
        architecture=checkpoint.config.architecture,
        num_parameters=num_parameters(checkpoint.config),
        quantization=FloatType.FLOAT8_E4M3FN.value if is_rounded else checkpoint.quantization,
        limits=limits,
        geometry=_with_draft(runner.kv_geometry, draft),
        kv_dtype=numerics.kv.value,
        tokenizer=opened.tokenizer,
        step_points=step_points,
        device=place.name,
        num_threads=0,
        has_dummy_weights=config.load_format is LoadFormat.DUMMY,
        graphs=graph_sizes(sizes),
    )
    return Loaded(Engine(RowTable(limits), runner), description)


def plan_device(
    config: Config,
    place: Place,
    checkpoint: Checkpoint,
    numerics: DeviceNumerics,
    stored: Mapping[str, StoredType],
    sizes: Buckets,
    draft: Draft | None = None,
) -> tuple[MemoryPlan, RowLimits]:
    """stored: as in `choose_device_numerics`.

    Raises LimitError, ShortMemoryError.
    """
    model = checkpoint.config
    max_model_len = longest_row(config, model.max_model_len)
    fillable = fillable_blocks(config, max_model_len)
    most = _row_limits(config, model.vocab_size, max_model_len, fillable)
    drafting = draft_bytes(draft, most, sizes)

    def step_bytes(num_draws: int, num_tokens: int) -> int:
        seen = num_tokens * drafting.per_step_token
        return seen + activation_bytes(model, num_tokens, num_draws, numerics.dtype.itemsize)

    # A captured step keeps tables of blocks, hidden states, a few columns.
    kept = [
        size.num_rows * 4 * most.max_blocks_per_row
        + size.num_draws * model.hidden_size * numerics.dtype.itemsize
        + size.num_tokens * _TOKEN_BYTES
        for size in sizes
    ]
    activations = step_bytes(max(most.max_device_draws, MAX_PIECE_TOKENS), config.max_num_batched_tokens)
    uses = MemoryUses(
        weights=numerics.weight_bytes(model, stored) + rotation_bytes(model, max_model_len) + drafting.weights,
        activations=max(activations, drafting.activations),
        rows=most.num_rows * most.device_row_bytes,
        rings=0,  # in the host's memory
        graphs=graph_bytes(
            max(drafting.activations, *(step_bytes(size.num_draws, size.num_tokens) for size in sizes)),
            [*kept, *drafting.kept],
        ),
    )
    least_tokens = config.max_model_len or min(max_model_len, MIN_POOL_TOKENS)
    needs = BlockNeeds(
        bytes_per_block=config.block_size * (numerics.bytes_per_token(model) + drafting.per_token),
        min_blocks=-(-least_tokens // config.block_size),
        max_blocks=fillable,
    )
    kv_bytes = config.kv_cache_memory
    if kv_bytes is None and place.is_twin:
        kv_bytes = min(place.memory.free_bytes // _TWIN_KV_SHARE, MAX_DEFAULT_KV_BYTES)
    plan = plan_memory(place.memory, config.gpu_memory_utilization or _DEFAULT_SHARE, uses, needs, kv_bytes)
    return plan, _row_limits(config, model.vocab_size, max_model_len, plan.num_blocks)


@dataclass(frozen=True, slots=True)
class DraftBytes:
    weights: int = 0
    per_token: int = 0  # of KV cache
    activations: int = 0
    kept: tuple[int, ...] = ()  # of each captured pass
    per_step_token: int = 0  # of the target's steps


def draft_bytes(draft: Draft | None, limits: RowLimits, sizes: Buckets) -> DraftBytes:
    if draft is None:
        return DraftBytes()
    numerics, per_step_token = draft.numerics, 0
    if isinstance(draft, DeviceHeadDraft):
        model, per_step_token = draft.checkpoint.config.layer, draft.step_bytes_per_token
        weights = draft.weight_bytes + rotation_bytes(model, limits.max_model_len)
    else:
        model = draft.checkpoint.config
        weights = numerics.weight_bytes(model, draft.stored) + rotation_bytes(model, draft.max_model_len(limits))
    num_tokens, num_bytes = most_tokens(limits.max_num_batched_tokens), numerics.dtype.itemsize
    num_rows = sorted({size.num_rows for size in sizes if not size.is_decode})
    of_row = 4 * limits.max_blocks_per_row + model.hidden_size * num_bytes
    return DraftBytes(
        weights=weights,
        per_token=draft.bytes_per_token,
        activations=activation_bytes(model, num_tokens, limits.num_rows, num_bytes),
        kept=tuple(rows * of_row + num_tokens * _TOKEN_BYTES for rows in num_rows for _ in range(NUM_PASSES)),
        per_step_token=per_step_token,
    )


def _open_draft(
    config: Config, place: Place, target: Opened, numerics: DeviceNumerics, progress: ProgressLog
) -> Draft | None:
    """None for prompt lookup. numerics: the target's."""
    if config.speculation.drafter is DrafterKind.TARGET_COPY:
        return _open_copy(config, place, target, numerics)
    if config.speculation.drafter is DrafterKind.EAGLE3:
        return DeviceHeadDraft(open_head(config, target, progress), numerics)
    if config.speculation.drafter is not DrafterKind.DRAFT_MODEL:
        return None
    checkpoint = open_draft_model(config, target, progress).checkpoint
    stored = _stored_types(config, checkpoint)
    numerics = _choose_numerics(replace(config, kv_cache_dtype=None), place, checkpoint, stored)
    return DeviceDraft(checkpoint, numerics, stored)


def _open_copy(config: Config, place: Place, target: Opened, numerics: DeviceNumerics) -> DeviceDraft:
    """The twin's has such numbers in float32."""
    stored = _stored_types(config, target.checkpoint)
    mine = numerics if place.capability is None else numerics.rounded(stored, place.capability)
    structlog.get_logger().info("drafter", kind=DrafterKind.TARGET_COPY.value, path=str(target.path))
    return DeviceDraft(target.checkpoint, mine, stored, is_copy=True)


def _draft_model(
    config: Config, place: Place, draft: DeviceDraft, limits: RowLimits, progress: ProgressLog
) -> MakeDrafting:
    model, max_model_len = draft.checkpoint.config, draft.max_model_len(limits)
    loaded = _load_weights(
        config, place, draft.checkpoint, draft.numerics, max_model_len, progress, is_rounded=draft.is_copy
    )
    return drafting_by_model(loaded, model, draft.numerics, limits, max_model_len, _splits(config), place.device)


def _drafting(
    config: Config, place: Place, draft: Draft | None, limits: RowLimits, target: LlamaModel, progress: ProgressLog
) -> MakeDrafting | None:
    if draft is None:
        return None
    if isinstance(draft, DeviceHeadDraft):
        return _head(config, place, draft, limits, target)
    return _draft_model(config, place, draft, limits, progress)


def _head(config: Config, place: Place, draft: DeviceHeadDraft, limits: RowLimits, target: LlamaModel) -> MakeDrafting:
    checkpoint, numerics = draft.checkpoint, draft.numerics

    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(checkpoint.tensor(name)).to(place.device, numerics.dtype)

    embed = None if checkpoint.has_embedding else target.embed
    is_float8 = numerics.matrices is MatrixKind.FLOAT8
    head = DeviceEagle3Head(checkpoint.config, tensor, embed, limits.max_model_len, is_float8=is_float8)
    ids = checkpoint.target_ids
    target_ids = None if ids is None else torch.from_numpy(ids).to(place.device, torch.int64)
    return drafting_by_head(head, target_ids, numerics, limits, _splits(config))


def _with_draft(geometry: CacheGeometry, draft: Draft | None) -> CacheGeometry:
    """Its blocks hold what both keep in them."""
    if draft is None:
        return geometry
    return replace(geometry, bytes_per_block=geometry.bytes_per_block + geometry.block_size * draft.bytes_per_token)


def _on_device(config: Config) -> Config:
    return replace(config, block_size=DEVICE_BLOCK_SIZE) if config.has_default_block_size else config


def _max_drafts(config: Config) -> int:
    """What is verified together has other bits."""
    return 0 if config.batch_invariant else _MAX_DRAFTS


def _row_limits(config: Config, vocab_size: int, max_model_len: int, num_blocks: int) -> RowLimits:
    limits = row_limits(config, vocab_size, max_model_len, num_blocks)
    return replace(limits, max_num_draft_tokens=_max_drafts(config))


def _stored_types(config: Config, checkpoint: Checkpoint) -> Mapping[str, StoredType]:
    if config.load_format is LoadFormat.DUMMY:
        return {}  # asking for one would make its numbers
    return {name: checkpoint.stored(name).stored for name in checkpoint.config.tensor_shapes()}


def _choose_numerics(
    config: Config, place: Place, checkpoint: Checkpoint, stored: Mapping[str, StoredType]
) -> DeviceNumerics:
    if place.capability is None:
        return choose_twin_numerics(config.quantization, config.kv_cache_dtype)
    model = checkpoint.config
    return choose_device_numerics(config.quantization, config.kv_cache_dtype, model, stored, place.capability)


def _runner(
    config: Config,
    place: Place,
    checkpoint: Checkpoint,
    numerics: DeviceNumerics,
    limits: RowLimits,
    sizes: Buckets,
    draft: Draft | None,
    progress: ProgressLog,
) -> Runner:
    if place.is_twin:
        _limit_threads(config.num_threads)
    progress.log("model_load", "weights", 0.0)
    with _explained("while weights were loaded", "choose --quantization fp8 or a smaller model"):
        model = _load_weights(config, place, checkpoint, numerics, limits.max_model_len, progress)
    progress.log("model_load", "kv_cache", 0.0)
    geometry = kv_geometry(checkpoint.config, limits.num_blocks, limits.block_size, numerics)
    with _explained("for the KV cache", "lower --gpu-memory-utilization or --kv-cache-memory"):
        scales = _kv_scales(place, checkpoint, numerics, limits, model)
        kv_cache = allocate_on_device(geometry, numerics.kv, place.device, scales)
        drafting = _drafting(config, place, draft, limits, model, progress)
    progress.log("model_load", "done", 1.0)

    def on_warm_up(step: WarmUpProgress) -> None:
        progress.log("warm_up", step.step, step.index / step.num_steps)

    columns = model, kv_cache, geometry, limits, sizes, _splits(config), drafting
    parts = RunnerParts(place.is_twin, *columns, on_warm_up)
    with _explained("for what is kept of rows", "lower --max-model-len or --max-num-seqs"):
        return build_runner(parts)


def _compile_kernels(
    config: Config,
    capability: tuple[int, int],
    checkpoint: Checkpoint,
    numerics: DeviceNumerics,
    stored: Mapping[str, StoredType],
    limits: RowLimits,
    sizes: Buckets,
    draft: Draft | None,
    progress: ProgressLog,
) -> None:
    """Of a GPU, where Triton is."""
    from paceline_executor.start.kernel_compiling import DraftModelShape, HeadShape, Steps, have_compiled

    def on_progress(phase: str, fraction: float) -> None:
        progress.log("warm_up", phase, fraction)

    shape: DraftModelShape | HeadShape | None = None
    if isinstance(draft, DeviceHeadDraft):
        head = draft.checkpoint
        shape = HeadShape(head.config, draft.numerics, head.has_embedding, head.target_ids is not None)
    elif draft is not None:
        shape = DraftModelShape(draft.checkpoint.config, draft.numerics, draft.stored)
    steps = Steps(checkpoint.config, numerics, stored, limits, sizes, _splits(config), shape)
    compiled = have_compiled(steps, capability, config.cache_dir, on_progress)
    structlog.get_logger().info("kernels", compiled=compiled.num_compiled, kept=compiled.num_kept)


def _splits(config: Config) -> Splits:
    return Splits.FIXED if config.batch_invariant else Splits.EVEN


def _limit_threads(num_threads: int | None) -> None:
    """A machine with a GPU need not have a compiler for CPUs."""
    from paceline_executor.runner.cpu import checked_threads
    from paceline_kernels.compiler import jit

    jit.set_num_threads(checked_threads(num_threads))


def _kv_scales(
    place: Place, checkpoint: Checkpoint, numerics: DeviceNumerics, limits: RowLimits, model: LlamaModel
) -> KvScales | None:
    if numerics.kv is not KvDtype.FP8_E4M3 or checkpoint.kv_scales is not None:
        return checkpoint.kv_scales
    block_size, max_len = limits.block_size, limits.max_model_len
    return measured_scales(model, checkpoint.config, numerics, place.device, block_size, max_len)


def _load_weights(
    config: Config,
    place: Place,
    checkpoint: Checkpoint,
    numerics: DeviceNumerics,
    max_model_len: int,
    progress: ProgressLog,
    *,
    is_rounded: bool = False,
) -> LlamaModel:
    def on_progress(num_bytes: int, total_bytes: int) -> None:
        progress.log("model_load", "weights", num_bytes / total_bytes)

    dtype, matrices = numerics.dtype, numerics.matrices
    if config.load_format is LoadFormat.DUMMY:
        return dummy_model(checkpoint.config, place.device, max_model_len, dtype, matrices)
    if place.is_twin:
        return twin_model(checkpoint, max_model_len, is_rounded=is_rounded)
    return upload_model(checkpoint, place.device, max_model_len, dtype, matrices, on_progress)


def _explained(when: str, advice: str) -> AbstractContextManager[None]:
    """Says what to do where memory runs out all the same."""
    return explained(f"the device's memory ran out {when}: {advice}, or end other processes on the device")

"""A model on a GPU, or on the twin of one: memory is planned, weights arrive, the runner is built, steps are captured.

Refuses to know how bytes come to a device and in which numbers they are computed with.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace

import structlog
import torch

from paceline_executor.config import (
    DEVICE_BLOCK_SIZE,
    Config,
    DrafterKind,
    LoadFormat,
    RunnerKind,
)
from paceline_executor.errors import LimitError, MissingDeviceError, ShortMemoryError
from paceline_executor.limits import RowLimits
from paceline_executor.link.description import Description, Loaded
from paceline_executor.link.engine import Engine
from paceline_executor.memory import available_bytes, explained
from paceline_executor.models.collectives import Collectives
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.registry import dummy_model, twin_model, upload_model
from paceline_executor.models.rope import rotation_bytes
from paceline_executor.numerics import (
    KvDtype,
    MatrixKind,
    Numerics,
    Quantization,
    choose_gpu_numerics,
    choose_twin_numerics,
)
from paceline_executor.ranks.memory import GroupMemory
from paceline_executor.ranks.process_group import ProcessGroupCollectives, collectives_of_hosts
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.device.buckets import buckets_of
from paceline_executor.runner.device.draft_model import drafting_by_model
from paceline_executor.runner.device.drafts import MakeDrafting
from paceline_executor.runner.device.kv_scales import measured_scales
from paceline_executor.runner.device.memory_plan import (
    STEP_TOKEN_BYTES,
    BlockNeeds,
    DeviceMemory,
    MemoryPlan,
    MemoryUses,
    activation_bytes,
    graph_bytes,
    plan_memory,
)
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.runner.interface import Runner, WarmUpProgress
from paceline_executor.runner.kv_cache import allocate_on_device, kv_geometry
from paceline_executor.runner.prompt_logprobs import MAX_PIECE_TOKENS
from paceline_executor.share import Share
from paceline_executor.start.device_drafts import DeviceDraft, DeviceHeadDraft, Draft, DraftBytes
from paceline_executor.start.device_runner import RunnerParts, build_runner, graph_sizes
from paceline_executor.start.drafter_choice import open_draft_model, open_head
from paceline_executor.start.opening import NoProgress, Opened, ProgressLog, forms_of, served_name
from paceline_executor.start.ranks import RankStart, part_of
from paceline_executor.start.sizing import (
    MAX_DEFAULT_KV_BYTES,
    MIN_POOL_TOKENS,
    fillable_blocks,
    longest_row,
    row_limits,
)
from paceline_executor.weights.checkpoint import Checkpoint, KvScales, ModelConfig
from paceline_executor.weights.sharded import can_share
from paceline_executor.weights.shares import own_slices, shares_whole_experts
from paceline_executor.weights.stored_tensor import FloatType, StoredType
from paceline_kernels.linear import Splits

_DEFAULT_SHARE = 0.9
_TWIN_KV_SHARE = 4  # a quarter of what is free, as on a CPU
_MAX_DRAFTS = 7  # eight tokens of four query heads: attention keeps so many in registers


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


def twin_place(degree: int = 1) -> Place:
    """degree: of ranks, which share the memory."""
    free_bytes = available_bytes() // degree
    return Place(torch.device("cpu"), "twin", DeviceMemory(free_bytes, free_bytes), None)


def load_on_device(
    config: Config, kind: RunnerKind, opened: Opened, progress: ProgressLog, ranks: RankStart | None
) -> Loaded:
    """Raises ModelError, LimitError, ShortMemoryError, MissingDeviceError."""
    return DeviceStart(config, _place(kind, 0, config.share), opened, progress).load(ranks)


def rank_on_device(config: Config, kind: RunnerKind, opened: Opened, memory: GroupMemory) -> "DeviceStart":
    """A follower's: see `start.follower.Rank`. Raises as `load_on_device` does."""
    place = _place(kind, memory.rank, memory.share)
    if not place.is_twin:
        from paceline_executor.start.kernel_compiling import find_kernels_in  # where Triton is

        find_kernels_in(config.cache_dir)
    return DeviceStart(config, place, opened, NoProgress(), memory)


def _place(kind: RunnerKind, rank: int, share: Share) -> Place:
    """Of the GPUs that torch sees, each rank has that of its place among the node's."""
    if kind is not RunnerKind.CUDA:
        return twin_place(len(share.ranks))
    if share.degree > 1:
        _take_gpu(rank, share)
    return this_gpu()


def _take_gpu(rank: int, share: Share) -> None:
    if len(share.ranks) > torch.cuda.device_count():
        sentence = f"--tensor-parallel-size {share.degree}: torch sees {torch.cuda.device_count()} GPUs"
        raise MissingDeviceError(f"{sentence}: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or lower it")
    torch.cuda.set_device(share.ranks.index(rank))


class DeviceStart:
    """One start. What is chosen by headers alone is chosen when it is made; its methods are the steps that follow.

    Raises ModelError, LimitError, ShortMemoryError, as its steps do.
    """

    def __init__(
        self,
        config: Config,
        place: Place,
        opened: Opened,
        progress: ProgressLog,
        memory: GroupMemory | None = None,
    ) -> None:
        """memory: of a rank that follows; the first one's is there from `load` on."""
        if config.has_default_block_size:
            config = replace(config, block_size=DEVICE_BLOCK_SIZE)
        self._config = config
        self._place = place
        self._opened = opened
        self._progress = progress
        self._memory = memory
        degree = config.tensor_parallel_size
        self._checkpoint = checkpoint = part_of(opened.checkpoint, 0 if memory is None else memory.rank, degree)
        self._model = checkpoint.config
        self._stored = checkpoint.stored_types
        self._numerics = self._choose_numerics(checkpoint, self._stored, config.kv_cache_dtype)
        self._check_splits(self._numerics, degree)
        self._draft = self._open_draft()
        # What is verified together has other bits.
        self._max_drafts = 0 if config.batch_invariant else _MAX_DRAFTS
        self._splits = Splits.FIXED if config.batch_invariant else Splits.EVEN
        self._sizes = buckets_of(config.max_num_seqs, config.max_num_batched_tokens, self._max_drafts)

    @property
    def device(self) -> str:
        """For people."""
        return self._place.name

    @property
    def num_blocks(self) -> int:
        """That fit beside the model, or a rank's part of it."""
        return self.plan_memory()[0].num_blocks

    def load(self, ranks: RankStart | None = None) -> Loaded:
        """ranks: the others', where this one's is the first of several."""
        place, log = self._place, structlog.get_logger()
        plan, limits = self.plan_memory()
        log.info("memory", device=place.name, total=place.memory.total_bytes, **plan.table)
        if ranks is not None:
            ranks.start(self._opened)
            self._memory = ranks.memory
            limits = self._limits(limits.max_model_len, ranks.agree(place.name, limits.num_blocks))
        if place.capability is not None:
            self.compile_kernels(place.capability, limits)
        if ranks is not None:
            ranks.begin(limits)
        own = self.build(limits)
        runner = own if ranks is None else ranks.runner(own)
        with _explained("while steps were captured", "lower --max-num-batched-tokens or --max-num-seqs"):
            step_points = runner.warm_up()
        if ranks is not None:
            ranks.has_warmed_up()
        self._progress.log("warm_up", "done", 1.0)
        log.info(
            "numerics",
            weights=self._numerics.weights,
            computed_in=self._numerics.dtype.value,
            kv_cache=self._numerics.kv.value,
            device=place.name,
            batch_invariant=self._config.batch_invariant,
        )
        forms = forms_of(self._opened.tokenizer, limits.vocab_size)
        description = replace(self._describe(limits, runner, step_points), forms=forms)
        return Loaded(Engine(RowTable(limits, forms), runner), description)

    def plan_memory(self) -> tuple[MemoryPlan, RowLimits]:
        """Raises ShortMemoryError, which says what would fit."""
        return self._planned(self._model, self._numerics, self._config.tensor_parallel_size, self._what_fits)

    def _what_fits(self) -> str:
        """As many GPUs as the weights take, or the formats in which they take less."""
        whole, degree, fitting = self._opened.checkpoint, self._config.tensor_parallel_size, []
        for more in () if self._place.is_twin else range(degree + 1, whole.config.num_heads + 1):
            if can_share(whole, more) and self._fits(part_of(whole, 0, more).config, self._numerics, more):
                fitting.append(f"{more} GPUs (--tensor-parallel-size {more})")
                break
        for quantization in (Quantization.AUTO, Quantization.FP8):
            with suppress(LimitError):
                numerics = self._choose_numerics(
                    self._checkpoint, self._stored, self._config.kv_cache_dtype, quantization
                )
                if numerics != self._numerics and self._fits(self._model, numerics, degree):
                    fitting.append(f"--quantization {quantization.value}")
        return f"the model needs {' or '.join(fitting)}" if fitting else "choose a smaller model"

    def _fits(self, model: ModelConfig, numerics: Numerics, degree: int) -> bool:
        try:
            self._check_splits(numerics, degree)
            self._planned(model, numerics, degree)
        except (LimitError, ShortMemoryError):
            return False
        return True

    def _check_splits(self, numerics: Numerics, degree: int) -> None:
        if self._config.batch_invariant and degree > 1 and numerics.matrices is not MatrixKind.DENSE:
            sentence = "--batch-invariant with --tensor-parallel-size is for weights that stay floats"
            raise LimitError(f"{sentence}: choose --quantization none, or leave one out")

    def _planned(
        self, model: ModelConfig, numerics: Numerics, degree: int, what_fits: Callable[[], str] = str
    ) -> tuple[MemoryPlan, RowLimits]:
        """model: a rank's part, where there are several."""
        config = self._config
        max_model_len = longest_row(config, model.max_model_len)
        fillable = fillable_blocks(config, max_model_len)
        most = self._limits(max_model_len, fillable)
        # With fixed splits ranks add up slices of experts, which are apart until then.
        is_sliced = self._splits is Splits.FIXED and numerics.matrices is not MatrixKind.FLOAT8
        expert_slices = own_slices(model) if is_sliced and not shares_whole_experts(model) else 1
        drafting = DraftBytes() if self._draft is None else self._draft.bytes_of(most, self._sizes)

        def step_bytes(num_draws: int, num_tokens: int) -> int:
            seen = num_tokens * drafting.per_step_token
            return seen + activation_bytes(model, num_tokens, num_draws, numerics.dtype.itemsize, expert_slices)

        # A captured step keeps tables of blocks, hidden states, a few columns.
        kept = [
            size.num_rows * 4 * most.max_blocks_per_row
            + size.num_draws * model.hidden_size * numerics.dtype.itemsize
            + size.num_tokens * STEP_TOKEN_BYTES
            for size in self._sizes
        ]
        activations = step_bytes(max(most.max_draws, MAX_PIECE_TOKENS), config.max_num_batched_tokens)
        uses = MemoryUses(
            weights=numerics.weight_bytes(model, self._stored)
            + rotation_bytes(model, max_model_len)
            + drafting.weights,
            activations=max(activations, drafting.activations) + numerics.widened_bytes(model, self._stored),
            rows=most.num_rows * most.device_row_bytes,
            rings=0,  # in the host's memory
            graphs=graph_bytes(
                max(drafting.activations, *(step_bytes(size.num_draws, size.num_tokens) for size in self._sizes)),
                [*kept, *drafting.kept],
                degree,
            ),
        )
        least_tokens = config.max_model_len or min(max_model_len, MIN_POOL_TOKENS)
        needs = BlockNeeds(
            bytes_per_block=config.block_size * (numerics.bytes_per_token(model) + drafting.per_token),
            min_blocks=-(-least_tokens // config.block_size),
            max_blocks=fillable,
        )
        place = self._place
        kv_bytes = None if config.kv_cache_memory is None else config.kv_cache_memory // degree
        if kv_bytes is None and place.is_twin:
            kv_bytes = min(place.memory.free_bytes // _TWIN_KV_SHARE, MAX_DEFAULT_KV_BYTES // degree)
        share = config.gpu_memory_utilization or _DEFAULT_SHARE
        plan = plan_memory(place.memory, share, uses, needs, kv_bytes, what_fits)
        return plan, self._limits(max_model_len, plan.num_blocks)

    def compile_kernels(self, capability: tuple[int, int], limits: RowLimits) -> None:
        """Of a GPU, where Triton is."""
        from paceline_executor.start.kernel_compiling import DraftModelShape, HeadShape, Steps, have_compiled

        def on_progress(phase: str, fraction: float) -> None:
            self._progress.log("warm_up", phase, fraction)

        shape: DraftModelShape | HeadShape | None = None
        match self._draft:
            case DeviceHeadDraft(head, numerics):
                shape = HeadShape(head.config, numerics, head.has_embedding, head.target_ids is not None)
            case DeviceDraft(checkpoint, numerics, stored):
                shape = DraftModelShape(checkpoint.config, numerics, stored)
        degree = self._config.tensor_parallel_size
        steps = Steps(self._model, self._numerics, self._stored, limits, self._sizes, self._splits, shape, degree)
        compiled = have_compiled(steps, capability, self._config.cache_dir, on_progress)
        structlog.get_logger().info("kernels", compiled=compiled.num_compiled, kept=compiled.num_kept)

    def build(self, limits: RowLimits) -> DeviceRunner:
        """Loads weights and takes the memory of everything else."""
        place, numerics, log = self._place, self._numerics, self._progress.log
        if place.is_twin:
            _limit_threads(self._config.num_threads)
        if self._memory is not None and self._memory.share.node and place.capability is not None:
            from paceline_executor.start.kernel_compiling import alone_in

            with alone_in(self._config.cache_dir):  # rank 0 has compiled for its own node, and here the first rank does
                self.compile_kernels(place.capability, limits)
        log("model_load", "weights", 0.0)
        with _explained("while weights were loaded", "choose --quantization fp8 or a smaller model"):
            collectives = None if self._memory is None else _collectives(self._memory, place)
            model = self._load_weights(self._checkpoint, numerics, limits.max_model_len, collectives)
        log("model_load", "kv_cache", 0.0)
        geometry = kv_geometry(self._model, limits.num_blocks, limits.block_size, numerics)
        with _explained("for the KV cache", "lower --gpu-memory-utilization or --kv-cache-memory"):
            kv_cache = allocate_on_device(geometry, numerics.kv, place.device, self._kv_scales(limits, model))
            drafting = self._drafting(limits, model)
        log("model_load", "done", 1.0)

        def on_warm_up(step: WarmUpProgress) -> None:
            log("warm_up", step.step, step.index / step.num_steps)

        parts = RunnerParts(
            is_twin=place.is_twin,
            model=model,
            kv_cache=kv_cache,
            geometry=geometry,
            limits=limits,
            sizes=self._sizes,
            splits=self._splits,
            drafting=drafting,
            on_progress=on_warm_up,
        )
        with _explained("for what is kept of rows", "lower --max-model-len or --max-num-seqs"):
            return build_runner(parts)

    def _describe(self, limits: RowLimits, runner: Runner, step_points: tuple[tuple[int, int], ...]) -> Description:
        checkpoint, geometry = self._opened.checkpoint, runner.kv_geometry
        if self._draft is not None:  # its blocks hold what both keep in them
            per_block = geometry.block_size * self._draft.bytes_per_token
            geometry = replace(geometry, bytes_per_block=geometry.bytes_per_block + per_block)
        is_rounded = self._numerics.matrices is MatrixKind.FLOAT8
        return Description(
            model=served_name(self._config, self._opened.path),
            architecture=self._model.architecture,
            num_parameters=checkpoint.config.num_parameters(),
            quantization=FloatType.FLOAT8_E4M3FN.value if is_rounded else checkpoint.quantization,
            limits=limits,
            geometry=geometry,
            kv_dtype=self._numerics.kv.value,
            tokenizer=self._opened.tokenizer,
            step_points=step_points,
            device=self._place.name,
            num_threads=0,
            has_dummy_weights=self._config.load_format is LoadFormat.DUMMY,
            graphs=graph_sizes(self._sizes),
            weight_bytes=self._numerics.weight_bytes(self._model, self._stored) * self._config.tensor_parallel_size,
            weights_digest=checkpoint.digest,
            num_ranks=self._config.tensor_parallel_size,
        )

    def _limits(self, max_model_len: int, num_blocks: int) -> RowLimits:
        limits = row_limits(self._config, self._model.vocab_size, max_model_len, num_blocks)
        return replace(limits, max_num_draft_tokens=self._max_drafts)

    def _choose_numerics(
        self,
        checkpoint: Checkpoint,
        stored: Mapping[str, StoredType],
        kv_dtype: KvDtype | None,
        quantization: Quantization | None = None,
    ) -> Numerics:
        """quantization: else the one that was asked for."""
        quantization, capability = quantization or self._config.quantization, self._place.capability
        if capability is None:
            return choose_twin_numerics(quantization, kv_dtype)
        return choose_gpu_numerics(quantization, kv_dtype, checkpoint.config, stored, capability)

    def _open_draft(self) -> Draft | None:
        """None for prompt lookup."""
        config, target, progress = self._config, self._opened, self._progress
        match config.speculation.drafter:
            case DrafterKind.TARGET_COPY:
                return self._open_copy()
            case DrafterKind.EAGLE3:
                return DeviceHeadDraft(open_head(config, target, progress), self._numerics)
            case DrafterKind.DRAFT_MODEL:
                checkpoint = open_draft_model(config, target, progress).checkpoint
                stored = checkpoint.stored_types
                return DeviceDraft(checkpoint, self._choose_numerics(checkpoint, stored, None), stored)
        return None

    def _open_copy(self) -> DeviceDraft:
        """The twin's has such numbers in float32."""
        numerics, stored, capability = self._numerics, self._stored, self._place.capability
        if capability is not None:
            numerics = numerics.rounded(stored, capability)
        structlog.get_logger().info("drafter", kind=DrafterKind.TARGET_COPY.value, path=str(self._opened.path))
        return DeviceDraft(self._opened.checkpoint, numerics, stored, is_copy=True)

    def _drafting(self, limits: RowLimits, target: LlamaModel) -> MakeDrafting | None:
        draft, device, splits = self._draft, self._place.device, self._splits
        if draft is None:
            return None
        if isinstance(draft, DeviceHeadDraft):
            return draft.drafting(target, device, limits, splits)
        longest = draft.max_model_len(limits)
        model = self._load_weights(draft.checkpoint, draft.numerics, longest, is_rounded=draft.is_copy)
        return drafting_by_model(model, draft.checkpoint.config, draft.numerics, limits, longest, splits, device)

    def _kv_scales(self, limits: RowLimits, model: LlamaModel) -> KvScales | None:
        stored = self._checkpoint.kv_scales
        if self._numerics.kv is not KvDtype.FP8_E4M3 or stored is not None:
            return stored
        lengths = limits.block_size, limits.max_model_len
        return measured_scales(model, self._model, self._numerics, self._place.device, *lengths)

    def _load_weights(
        self,
        checkpoint: Checkpoint,
        numerics: Numerics,
        max_model_len: int,
        collectives: Collectives | None = None,
        *,
        is_rounded: bool = False,
    ) -> LlamaModel:
        """is_rounded: of the twin, as float8 would be."""

        def on_progress(num_bytes: int, total_bytes: int) -> None:
            self._progress.log("model_load", "weights", num_bytes / total_bytes)

        device = self._place.device
        if self._config.load_format is LoadFormat.DUMMY:
            return dummy_model(checkpoint.config, checkpoint.stored_types, device, max_model_len, numerics, collectives)
        if self._place.is_twin:
            return twin_model(checkpoint, max_model_len, is_rounded=is_rounded, collectives=collectives)
        return upload_model(checkpoint, device, max_model_len, numerics, on_progress, collectives)


def _collectives(memory: GroupMemory, place: Place) -> Collectives:
    return collectives_of_hosts(memory) if place.is_twin else ProcessGroupCollectives(memory, place.device)


def _limit_threads(num_threads: int | None) -> None:
    """A machine with a GPU need not have a compiler for CPUs."""
    from paceline_executor.runner.cpu import checked_threads
    from paceline_kernels.compiler import jit

    jit.set_num_threads(checked_threads(num_threads))


def _explained(when: str, advice: str) -> AbstractContextManager[None]:
    """Says what to do where memory runs out all the same."""
    return explained(f"the device's memory ran out {when}: {advice}, or end other processes on the device")

"""Which drafter an executor has: what `--speculation` comes to for this model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from paceline_executor.config import Config, DrafterKind
from paceline_executor.errors import DrafterError
from paceline_executor.limits import RowLimits
from paceline_executor.numerics import MatrixKind, Numerics, Quantization, choose_cpu_numerics
from paceline_executor.runner.interface import WarmUpProgress
from paceline_executor.start.opening import Opened, ProgressLog, open_model
from paceline_executor.start.sizing import DrafterNeeds
from paceline_executor.weights import Checkpoint, FetchOptions, resolve_model
from paceline_executor.weights.hf.eagle3 import Eagle3Checkpoint, eagle3_from_folder
from paceline_executor.weights.tokenizer import TokenizerBundle

if TYPE_CHECKING:  # with torch, which takes seconds to import
    from paceline_executor.runner.cpu import CpuModel
    from paceline_executor.runner.device.drafts import MakeDrafting


@dataclass(frozen=True, slots=True)
class OpenedDrafter:
    checkpoint: Checkpoint
    numerics: Numerics

    @property
    def needs(self) -> DrafterNeeds:
        model = self.checkpoint.config
        weight_bytes = self.numerics.weight_bytes(model, self.checkpoint.stored_types)
        return DrafterNeeds(weight_bytes, self.numerics.bytes_per_token(model))

    def drafting(self, target: "CpuModel", limits: RowLimits, progress: ProgressLog) -> "MakeDrafting":
        """Raises ModelError, StartError."""
        from paceline_executor.runner.cpu import CpuModel, operations_of
        from paceline_executor.runner.device.draft_model import DeviceDraftModel, DraftModelParts
        from paceline_executor.runner.kv_cache import allocate_kv_cache, kv_geometry
        from paceline_kernels.attention import Splits

        _have_compiled(target, operations_of(self.numerics, self.checkpoint.config), progress)
        model = self.checkpoint.config
        longest = min(limits.max_model_len, model.max_model_len)
        mine = CpuModel.read(target.device, self.checkpoint, self.numerics, longest)
        geometry = kv_geometry(model, limits.num_blocks, limits.block_size, self.numerics)
        kv_cache = allocate_kv_cache(geometry, self.numerics.kv)
        parts = DraftModelParts(mine.on_device, kv_cache, model.vocab_size, longest)
        return partial(DeviceDraftModel, parts, limits, Splits.EVEN)


@dataclass(frozen=True, slots=True)
class OpenedHead:
    """An EAGLE-3 head: its headers are read, its weights are not."""

    checkpoint: Eagle3Checkpoint
    numerics: Numerics  # the target's

    @property
    def needs(self) -> DrafterNeeds:
        from paceline_executor.runner.device.eagle3 import head_geometry

        weight_bytes = int(self.checkpoint.num_parameters() * self.numerics.max_bytes_per_weight())
        return DrafterNeeds(weight_bytes, head_geometry(self.checkpoint.config, 1, 1, self.numerics).bytes_per_block)

    def drafting(self, target: "CpuModel", limits: RowLimits, progress: ProgressLog) -> "MakeDrafting":
        """Raises ModelError, StartError."""
        from paceline_executor.models.eagle3 import operations_of_head
        from paceline_executor.start.device_drafts import DeviceHeadDraft
        from paceline_kernels.attention import Splits

        device, draft = target.device, DeviceHeadDraft(self.checkpoint, self.numerics)
        _have_compiled(target, operations_of_head(self.numerics.matrices), progress)
        return device.run(lambda: draft.drafting(target.model, device.torch_device, limits, Splits.EVEN))


def _have_compiled(target: "CpuModel", operations: tuple[str, ...], progress: ProgressLog) -> None:
    from paceline_executor.runner.cpu import have_compiled

    def on_operation(operation: WarmUpProgress) -> None:
        progress.log("warm_up", f"drafter: {operation.step}", operation.index / operation.num_steps)

    have_compiled(target.device, operations, on_operation)


def open_drafter(
    config: Config, target: Opened, numerics: Numerics, progress: ProgressLog
) -> OpenedDrafter | OpenedHead | None:
    """None for drafters without a model. numerics: the target's. Raises DrafterError, ModelError."""
    choice = config.speculation
    if choice.drafter is DrafterKind.PROMPT_LOOKUP:
        return None
    if choice.drafter is DrafterKind.EAGLE3:
        return OpenedHead(open_head(config, target, progress), numerics)
    opened = target if choice.model is None else open_draft_model(config, target, progress)
    # Drafts need not be exact: the smallest numbers there are.
    mine = choose_cpu_numerics(Quantization.AUTO, None, opened.checkpoint.config, config.block_size)
    if choice.model is None:
        _check_copy(mine, numerics)
    if choice.model is None:
        structlog.get_logger().info("drafter", kind=choice.drafter.value, path=str(opened.path))
    return OpenedDrafter(opened.checkpoint, mine)


def open_draft_model(config: Config, target: Opened, progress: ProgressLog) -> Opened:
    """It is named by --speculation. Raises DrafterError, ModelError."""
    choice = config.speculation
    assert choice.model is not None
    opened = open_model(replace(config, model=choice.model, revision=None, tensor_parallel_size=1), progress)
    _check_vocabulary(opened.tokenizer, target.tokenizer, choice.model)
    structlog.get_logger().info("drafter", kind=choice.drafter.value, path=str(opened.path))
    return opened


def open_head(config: Config, target: Opened, progress: ProgressLog) -> Eagle3Checkpoint:
    """It is named by --speculation. Raises ModelError."""
    assert config.speculation.model is not None
    options = FetchOptions(None, config.hub_endpoint, config.offline, has_tokenizer=False)
    path = resolve_model(
        config.speculation.model, cache_dir=config.cache_dir, on_progress=progress.fetch, options=options
    )
    structlog.get_logger().info("drafter", kind=config.speculation.drafter.value, path=str(path))
    return eagle3_from_folder(path, target.checkpoint.config)


def _check_copy(copy: Numerics, target: Numerics) -> None:
    instead = 'name a smaller model: --speculation \'{"drafter": "draft_model", "model": "NAME_OR_PATH"}\''
    if target.matrices is MatrixKind.PACKED:
        raise DrafterError(f"--speculation target_copy is for --quantization none, and this model is packed: {instead}")
    if copy.matrices is not MatrixKind.PACKED:
        raise DrafterError(f"--speculation target_copy: 32 does not divide the sizes of this model's layers: {instead}")


def _check_vocabulary(drafter: TokenizerBundle, target: TokenizerBundle, name: str) -> None:
    """An id that only one of them has is never drafted, or never right."""
    mine, theirs = _texts(drafter), _texts(target)
    different = [token_id for token_id in sorted(mine.keys() & theirs.keys()) if mine[token_id] != theirs[token_id]]
    if different:
        first = different[0]
        sentence = f"--speculation: {name} has another vocabulary than the model it would draft for"
        raise DrafterError(
            f"{sentence} (token {first} is {mine[first]!r} in one and {theirs[first]!r} in the other):"
            " name a smaller model of the same family, or leave --speculation out"
        )


def _texts(tokenizer: TokenizerBundle) -> Mapping[int, str]:
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_buffer(tokenizer.tokenizer_json).get_vocab(with_added_tokens=True)
    return {token_id: text for text, token_id in vocabulary.items()}

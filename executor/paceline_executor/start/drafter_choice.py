"""Which drafter an executor has: what `--speculation` comes to for this model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from paceline_executor.config import Config, DrafterKind
from paceline_executor.errors import DrafterError
from paceline_executor.limits import RowLimits
from paceline_executor.numerics import MatrixKind, Numerics, Quantization, choose_cpu_numerics
from paceline_executor.runner.drafter import Drafter
from paceline_executor.runner.interface import WarmUpProgress
from paceline_executor.start.opening import Opened, ProgressLog, open_model
from paceline_executor.start.sizing import DrafterNeeds
from paceline_executor.weights import Checkpoint, FetchOptions, resolve_model
from paceline_executor.weights.hf.eagle3 import Eagle3Checkpoint, eagle3_from_folder
from paceline_executor.weights.hf.eagle3_config import eagle3_bytes_per_token
from paceline_executor.weights.tokenizer import TokenizerBundle

if TYPE_CHECKING:  # with torch, which takes seconds to import
    from paceline_executor.runner.cpu import CpuRunner


@dataclass(frozen=True, slots=True)
class OpenedDrafter:
    checkpoint: Checkpoint
    numerics: Numerics

    @property
    def needs(self) -> DrafterNeeds:
        model = self.checkpoint.config
        return DrafterNeeds(self.numerics.weight_bytes(model, {}), self.numerics.bytes_per_token(model))

    def read(self, target: "CpuRunner", limits: RowLimits, progress: ProgressLog) -> Drafter:
        """Raises ModelError, StartError."""
        from paceline_executor.runner.cpu import CpuRunner
        from paceline_executor.speculation.draft_model import CatchUpTime, DraftModel

        def on_warm_up(warm_up: WarmUpProgress) -> None:
            progress.log("warm_up", f"drafter: {warm_up.step}", warm_up.index / warm_up.num_steps)

        model = self.checkpoint.config
        max_model_len = min(limits.max_model_len, model.max_model_len)
        runner = CpuRunner(
            self.checkpoint,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            numerics=self.numerics,
            max_model_len=max_model_len,
            num_threads=target.num_threads,
            on_progress=on_warm_up,
        )
        catch_up = CatchUpTime(runner.warm_up(), limits.max_num_batched_tokens)
        return DraftModel(runner, max_model_len=max_model_len, vocab_size=model.vocab_size, catch_up=catch_up)


@dataclass(frozen=True, slots=True)
class OpenedHead:
    """An EAGLE-3 head: its headers are read, its weights are not."""

    checkpoint: Eagle3Checkpoint
    numerics: Numerics  # the target's
    block_size: int

    @property
    def needs(self) -> DrafterNeeds:
        weight_bytes = int(self.checkpoint.num_parameters() * self.numerics.max_bytes_per_weight())
        return DrafterNeeds(weight_bytes, eagle3_bytes_per_token(self.checkpoint.config, self.block_size))

    def read(self, target: "CpuRunner", limits: RowLimits, progress: ProgressLog) -> Drafter:
        """It sees the target's steps from now on. Raises ModelError, StartError."""
        from paceline_executor.models.eagle3 import operations_of_head, read_head
        from paceline_executor.speculation.eagle3 import Eagle3Drafter
        from paceline_kernels.warm_up.compile_process import have_ready

        operations = operations_of_head(self.numerics.matrices)

        def on_operation(name: str, is_compiled: bool) -> None:
            phase = f"drafter: {'compile' if is_compiled else 'read'} {name}"
            progress.log("warm_up", phase, operations.index(name) / len(operations))

        have_ready(operations, on_operation)
        drafter = Eagle3Drafter(
            read_head(self.checkpoint, target.embed, limits.max_model_len, self.numerics.matrices),
            self.checkpoint,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            num_threads=target.num_threads,
        )
        target.observe_by(drafter)
        return drafter


def open_drafter(
    config: Config, target: Opened, numerics: Numerics, progress: ProgressLog
) -> OpenedDrafter | OpenedHead | None:
    """None for drafters without a model. numerics: the target's. Raises DrafterError, ModelError."""
    choice = config.speculation
    if choice.drafter is DrafterKind.PROMPT_LOOKUP:
        return None
    if choice.drafter is DrafterKind.EAGLE3:
        return OpenedHead(open_head(config, target, progress), numerics, config.block_size)
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
    opened = open_model(replace(config, model=choice.model, revision=None), progress)
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

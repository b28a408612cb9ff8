"""A small model, served on a CPU or on the twin of a device, and all that may draft for it there.

A drafter is one of the host's, or the name of one of production's: `lookup`; `itself`, the same model once more;
`copy`, in other numbers; `shallow`, one of fewer layers; `model`, one that knows fewer tokens and shorter rows, too;
`head`, an EAGLE-3 head of random weights that knows 30 tokens; `large head`, one that knows all and has an embedding of
its own.
"""

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from drafting.serving import Plain
from paceline_executor.limits import RowLimits
from paceline_executor.link.engine import Engine
from paceline_executor.models.eagle3 import read_head
from paceline_executor.models.interface import KvCache
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, MatrixKind, Numerics
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.runner.cuda import DeviceRunner
from paceline_executor.runner.device.buckets import Buckets, buckets_of
from paceline_executor.runner.device.draft_model import drafting_by_model
from paceline_executor.runner.device.drafts import LookupDrafter, MakeDrafting, launching
from paceline_executor.runner.device.eagle3 import drafting_by_head
from paceline_executor.runner.device.row_words import RowWords
from paceline_executor.runner.device.twin import TwinDevice
from paceline_executor.runner.drafter import Drafter
from paceline_executor.runner.interface import StepBatch, StepOutput
from paceline_executor.runner.kv_cache import allocate_kv_cache, kv_geometry
from paceline_executor.speculation.draft_model import DraftModel
from paceline_executor.speculation.prompt_lookup import PromptLookup
from paceline_executor.testing.drafters import UpTo, head_drafter, wanted_drafts
from paceline_executor.testing.eagle3 import random_head
from paceline_executor.testing.models import tiny_checkpoint
from paceline_executor.testing.random_plans import LIMITS as PLAIN_LIMITS
from paceline_executor.weights import Checkpoint
from paceline_executor.weights.hf.eagle3 import eagle3_from_folder
from paceline_kernels.attention import Splits
from paceline_kernels.step_inputs import PlanColumns

LIMITS = replace(PLAIN_LIMITS, max_num_draft_tokens=8)
INT8_LIMITS = replace(LIMITS, block_size=16, max_model_len=48, num_blocks=8)  # int8 keys and values need such blocks
DEVICE_LIMITS = replace(LIMITS, max_num_draft_tokens=5)
BUCKETS = buckets_of(LIMITS.num_rows, LIMITS.max_num_batched_tokens, DEVICE_LIMITS.max_num_draft_tokens)


def _checkpoint(num_layers: int, vocab_size: int, max_model_len: int, seed: int) -> Checkpoint:
    return tiny_checkpoint(
        num_layers=num_layers,
        num_heads=9,
        num_kv_heads=3,
        head_dim=32,
        intermediate_size=96,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        seed=seed,
    )


MODEL = _checkpoint(3, LIMITS.vocab_size, INT8_LIMITS.max_model_len, 0)
SHALLOW = _checkpoint(1, LIMITS.vocab_size, INT8_LIMITS.max_model_len, 1)
SMALLER = _checkpoint(1, LIMITS.vocab_size - 9, 20, 1)
HIGH = LIMITS.vocab_size - 2  # a token that the smaller model does not know
_HEADS = {
    "head": random_head(MODEL.config, aux_layers=(2, 1), draft_vocab_size=30),
    "large head": random_head(MODEL.config, aux_layers=(2, 1), has_embedding=True),
}
_PACKED = {16: Numerics(MatrixKind.PACKED, KvDtype.INT8), 4: Numerics(MatrixKind.PACKED, KvDtype.FLOAT16)}


class Target(Protocol):
    limits: RowLimits
    plain: Plain

    def engine(self, drafter: str | Drafter | None) -> Engine:
        """With rows of its own; what is in caches stays from one to the next."""
        ...

    def fail_next(self, error: Exception | None) -> None: ...

    def late_by(self, seed: int) -> None: ...


class BreakableRunner(CpuRunner):
    """Its next step is lost when it has been computed."""

    error: Exception | None = None

    def launch(self, batch: StepBatch) -> StepOutput:
        output = super().launch(batch)
        error, self.error = self.error, None
        if error is not None:
            raise error
        return output


def host_runner(checkpoint: Checkpoint, limits: RowLimits, numerics: Numerics) -> BreakableRunner:
    """Its cache holds NaN wherever nothing was written."""
    runner = BreakableRunner(
        checkpoint, num_blocks=limits.num_blocks, block_size=limits.block_size, numerics=numerics, num_threads=1
    )
    spoil(runner._kv_cache)  # noqa: SLF001  # nobody else has it
    return runner


def spoil(kv_cache: KvCache) -> None:
    """What is read before it was written is NaN."""
    for cache in (kv_cache.keys, kv_cache.values):
        cache.fill_(-1 if cache.dtype == torch.int8 else float("nan"))  # four bytes of -1 are a NaN


class HostTarget:
    """See Target. Drafters of production are made once: what they keep of earlier rows must do no harm."""

    def __init__(self, numerics: Numerics, folder: Path) -> None:
        self.limits = INT8_LIMITS if numerics.kv is KvDtype.INT8 else LIMITS
        self.plain = Plain(host_runner(MODEL, self.limits, numerics), self.limits)
        self.runner = host_runner(MODEL, self.limits, numerics)
        self._numerics = numerics
        self._folder = folder
        self._drafters: dict[str, Drafter] = {}

    def engine(self, drafter: str | Drafter | None) -> Engine:
        if isinstance(drafter, str):
            if drafter not in self._drafters:
                self._drafters[drafter] = self._make(drafter)
            drafter = self._drafters[drafter]
        self.runner.draft_by(drafter or PromptLookup())
        return Engine(RowTable(self.limits), self.runner)

    def fail_next(self, error: Exception | None) -> None:
        self.runner.error = error

    def late_by(self, seed: int) -> None:
        """It computes at once."""

    def _make(self, name: str) -> Drafter:
        if name == "lookup":
            return PromptLookup()
        if name in _HEADS:
            folder = _HEADS[name].write(self._folder / name)
            drafter = head_drafter(self.runner, folder, MODEL.config, self._numerics.matrices, self.limits)
            spoil(drafter._kv_cache)  # noqa: SLF001  # nobody else has it
            return drafter
        checkpoint, numerics = {
            "itself": (MODEL, self._numerics),
            "copy": (MODEL, _PACKED[self.limits.block_size]),
            "shallow": (SHALLOW, FLOAT32_NUMERICS),
            "model": (SMALLER, FLOAT32_NUMERICS),
        }[name]
        return DraftModel(
            host_runner(checkpoint, self.limits, numerics),
            max_model_len=min(self.limits.max_model_len, checkpoint.config.max_model_len),
            vocab_size=checkpoint.config.vocab_size,
            # Slowly, so that drafts come with and without a row being far behind.
            catch_up=UpTo(8),
        )


class ChosenDrafter:
    """On the device what `inner`, a drafter of the host, finds among the tokens that the device has by then."""

    inner: Drafter

    def draft(self, rows: RowWords, plan: PlanColumns) -> None:
        """Write the drafts that there are tokens for."""
        known, held = rows.draws.num_known.numpy(), rows.state.num_held.numpy()
        tokens, computed = rows.state.token_ids.numpy(), rows.state.num_computed.numpy()
        for row, planned in zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True):
            if row < 0 or rows.state.finish[row] or planned <= known[row] - computed[row]:
                continue
            num_wanted = planned - (known[row] - computed[row])
            (found,) = self.inner.draft(wanted_drafts([(row, tokens[row, : known[row]].tolist(), num_wanted)]))
            is_bad = (found < 0) | (found >= DEVICE_LIMITS.vocab_size)
            found = (found[: is_bad.argmax()] if is_bad.any() else found)[:num_wanted]
            tokens[row, known[row] : known[row] + found.size] = found
            held[row] = known[row] + found.size


def device_runner(
    drafting: MakeDrafting,
    *,
    checkpoint: Checkpoint = MODEL,
    limits: RowLimits = DEVICE_LIMITS,
    buckets: Buckets = BUCKETS,
) -> tuple[DeviceRunner, TwinDevice]:
    """A warm one on the twin, in float32."""
    device = TwinDevice()
    geometry = kv_geometry(checkpoint.config, limits.num_blocks, limits.block_size, FLOAT32_NUMERICS)
    runner = DeviceRunner(
        device,
        LlamaModel(HostWeights(checkpoint), limits.max_model_len),
        allocate_kv_cache(geometry, FLOAT32_NUMERICS.kv),
        geometry,
        limits,
        buckets=buckets,
        drafting=drafting,
    )
    runner.warm_up()
    return runner, device


def device_lookups() -> MakeDrafting:
    return launching(LookupDrafter(DEVICE_LIMITS.max_num_draft_tokens), DEVICE_LIMITS.max_num_draft_tokens)


def device_draft_model(
    checkpoint: Checkpoint, limits: RowLimits = DEVICE_LIMITS, max_model_len: int | None = None
) -> MakeDrafting:
    """Drafts by this model, whose KV cache is its own."""
    model, longest = LlamaModel(HostWeights(checkpoint), limits.max_model_len), max_model_len or limits.max_model_len
    return drafting_by_model(
        model, checkpoint.config, FLOAT32_NUMERICS, limits, longest, Splits.EVEN, torch.device("cpu")
    )


def device_head(folder: Path) -> MakeDrafting:
    checkpoint = eagle3_from_folder(folder, MODEL.config)
    target = LlamaModel(HostWeights(MODEL), DEVICE_LIMITS.max_model_len)
    head = read_head(checkpoint, target.embed, DEVICE_LIMITS.max_model_len, MatrixKind.DENSE)
    ids = None if checkpoint.target_ids is None else torch.from_numpy(checkpoint.target_ids).long()
    return drafting_by_head(head, ids, FLOAT32_NUMERICS, DEVICE_LIMITS, Splits.EVEN)


class DeviceTarget:
    """See Target. One runner for each drafter, that remembers rows which it must forget."""

    limits = DEVICE_LIMITS

    def __init__(self, buckets: Buckets, folder: Path) -> None:
        self.plain = Plain(host_runner(MODEL, LIMITS, FLOAT32_NUMERICS), LIMITS)
        self._buckets = buckets
        self._folder = folder
        self._chosen = ChosenDrafter()
        self._runners: dict[str, tuple[DeviceRunner, TwinDevice]] = {}
        self.runner, self._device = self._warm("lookup")

    def engine(self, drafter: str | Drafter | None) -> Engine:
        """Without a drafter nobody asks it."""
        if drafter is not None and not isinstance(drafter, str):
            self._chosen.inner = drafter
            drafter = "chosen"
        self.runner, self._device = self._warm(drafter or "lookup")
        return Engine(RowTable(self.limits), self.runner)

    def fail_next(self, error: Exception | None) -> None:
        self._device.fail_next = error

    def late_by(self, seed: int) -> None:
        self._device.late_by(seed)

    def _warm(self, name: str) -> tuple[DeviceRunner, TwinDevice]:
        if name not in self._runners:
            self._runners[name] = device_runner(self._make(name), buckets=self._buckets)
        return self._runners[name]

    def _make(self, name: str) -> MakeDrafting:
        match name:
            case "lookup":
                return device_lookups()
            case "chosen":
                return launching(self._chosen, DEVICE_LIMITS.max_num_draft_tokens)
            case "itself":
                return device_draft_model(MODEL)
            case "shallow":
                return device_draft_model(SHALLOW)
            case "model":
                return device_draft_model(SMALLER, max_model_len=SMALLER.config.max_model_len)
            case "head" | "large head":
                return device_head(_HEADS[name].write(self._folder / name))
        raise ValueError(name)

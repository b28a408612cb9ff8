"""A small model, served on a CPU or on the twin of a GPU, and all that may draft for it there.

A drafter is one of a host, or the name of one of production's: `lookup`; `itself`, the same model once more; `copy`, on
a CPU, in other numbers; `model`, one of fewer layers that knows fewer tokens and shorter rows; `head`, an EAGLE-3 head
of random weights that knows 30 tokens; `large head`, one that knows all and has an embedding of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import torch

from drafting.serving import Plain
from executor_rig.forms import letter_forms
from executor_rig.random_plans import LIMITS as PLAIN_LIMITS
from hash_twin import HostDrafter
from paceline_executor.limits import RowLimits
from paceline_executor.link.engine import Engine
from paceline_executor.models.eagle3 import read_head
from paceline_executor.models.interface import DeviceModel, KvCache, LanguageModel
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, MatrixKind, Numerics
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.cpu import CpuModel
from paceline_executor.runner.device.buckets import Buckets, buckets_of
from paceline_executor.runner.device.draft_model import DeviceDraftModel, DraftModelParts
from paceline_executor.runner.device.drafts import MakeDrafting, launching, lookups
from paceline_executor.runner.device.eagle3 import drafting_by_head
from paceline_executor.runner.device.host_device import HostDevice
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.runner.device.twin import TwinDevice
from paceline_executor.runner.drafter import Drafter, NoDrafter
from paceline_executor.runner.kv_cache import allocate_kv_cache, kv_geometry
from paceline_executor.weights import Checkpoint
from paceline_executor.weights.hf.eagle3 import eagle3_from_folder
from paceline_kernels.attention import Splits
from random_models import tiny_checkpoint
from random_models.eagle3 import random_head

T = TypeVar("T")

LIMITS = replace(PLAIN_LIMITS, max_num_draft_tokens=5)
INT8_LIMITS = replace(LIMITS, block_size=16, max_model_len=48, num_blocks=8)  # int8 keys and values need such blocks
BUCKETS = buckets_of(LIMITS.num_rows, LIMITS.max_num_batched_tokens, LIMITS.max_num_draft_tokens)


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
SMALLER = _checkpoint(1, LIMITS.vocab_size - 9, 20, 1)
HIGH = LIMITS.vocab_size - 2  # a token that the smaller model does not know
FORMS = letter_forms(LIMITS.vocab_size, (7, HIGH))
_HEADS = {
    "head": random_head(MODEL.config, aux_layers=(2, 1), draft_vocab_size=30),
    "large head": random_head(MODEL.config, aux_layers=(2, 1), has_embedding=True),
}
_PACKED = {16: Numerics(MatrixKind.PACKED, KvDtype.INT8), 4: Numerics(MatrixKind.PACKED, KvDtype.FLOAT16)}


@dataclass(frozen=True, slots=True)
class Kind:
    """buckets: captured on the twin of a GPU; None is a CPU."""

    numerics: Numerics = FLOAT32_NUMERICS
    buckets: Buckets | None = None

    @property
    def limits(self) -> RowLimits:
        return INT8_LIMITS if self.numerics.kv is KvDtype.INT8 else LIMITS


HOSTS = {
    "packed-float16": Kind(_PACKED[4]),
    "packed-int8": Kind(_PACKED[16]),
    "float32": Kind(),
}
TWINS = {"captured": Kind(buckets=BUCKETS), "launched one by one": Kind(buckets=Buckets([]))}
KINDS = HOSTS | TWINS


class BreakableDevice(HostDevice):
    """What is launched next fails while it is computed, by `fail_next`."""

    fail_next: Exception | None = None

    def launch(self, work: Callable[[], object]) -> None:
        if self.fail_next is not None:
            work = partial(_throw, self.fail_next)
            self.fail_next = None
        super().launch(work)

    def late_by(self, seed: int) -> None:
        """Its thread takes its time by itself."""


def _throw(error: Exception) -> None:
    raise error


@cache
def host_device() -> BreakableDevice:
    return BreakableDevice(1)


def spoilt_cache(checkpoint: Checkpoint, limits: RowLimits, numerics: Numerics) -> KvCache:
    """What is read before it was written is NaN."""
    geometry = kv_geometry(checkpoint.config, limits.num_blocks, limits.block_size, numerics)
    kv_cache = allocate_kv_cache(geometry, numerics.kv)
    for cache_ in (kv_cache.keys, kv_cache.values):
        cache_.fill_(-1 if cache_.dtype == torch.int8 else float("nan"))  # four bytes of -1 are a NaN
    return kv_cache


class Place:
    """A device, and models and runners on it. Its drafters draft for `MODEL`."""

    def __init__(self, kind: Kind, limits: RowLimits | None = None) -> None:
        self.kind, self.limits = kind, limits or kind.limits
        self.device = host_device() if kind.buckets is None else TwinDevice()

    def run(self, work: Callable[[], T]) -> T:
        """Where whatever computes has to be run."""
        return self.device.run(work) if isinstance(self.device, HostDevice) else work()

    def model(self, checkpoint: Checkpoint, numerics: Numerics) -> tuple[LanguageModel, DeviceModel]:
        longest = min(self.limits.max_model_len, checkpoint.config.max_model_len)
        if isinstance(self.device, HostDevice):
            of_host = CpuModel.read(self.device, checkpoint, numerics, longest)
            return of_host.model, of_host.on_device
        model = LlamaModel(HostWeights(checkpoint), longest)
        return model, model

    def runner(self, drafting: MakeDrafting | None, checkpoint: Checkpoint = MODEL) -> DeviceRunner:
        """A warm one. drafting: None is prompt lookup."""
        numerics, limits = self.kind.numerics, self.limits
        runner = DeviceRunner(
            self.device,
            self.model(checkpoint, numerics)[1],
            spoilt_cache(checkpoint, limits, numerics),
            kv_geometry(checkpoint.config, limits.num_blocks, limits.block_size, numerics),
            limits,
            buckets=self.kind.buckets or Buckets([]),
            drafting=drafting,
        )
        if self.kind.buckets is not None:
            runner.warm_up()
        return runner

    def draft_model(self, checkpoint: Checkpoint, numerics: Numerics, max_model_len: int | None = None) -> MakeDrafting:
        """Of a KV cache of its own."""
        config = checkpoint.config
        longest = max_model_len or min(self.limits.max_model_len, config.max_model_len)
        kv_cache = spoilt_cache(checkpoint, self.limits, numerics)
        parts = DraftModelParts(self.model(checkpoint, numerics)[1], kv_cache, config.vocab_size, longest)
        return partial(DeviceDraftModel, parts, self.limits, Splits.EVEN)

    def head(self, folder: Path) -> MakeDrafting:
        """The EAGLE-3 head in this folder."""
        checkpoint, numerics = eagle3_from_folder(folder, MODEL.config), self.kind.numerics
        target = self.model(MODEL, numerics)[0]
        head = self.run(lambda: read_head(checkpoint, target.embed, self.limits.max_model_len, numerics.matrices))
        ids = None if checkpoint.target_ids is None else torch.from_numpy(checkpoint.target_ids).long()
        return drafting_by_head(head, ids, numerics, self.limits, Splits.EVEN)


class Target:
    """One runner for each drafter, that remembers rows which it must forget; what is in caches stays, too."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.limits = kind.limits
        self.plain = Plain(Place(Kind(kind.numerics)).runner(None), kind.limits, FORMS)
        self._place = Place(kind)
        self._folder = folder
        self._chosen = HostDrafter(NoDrafter(), kind.limits.vocab_size)
        self._runners: dict[str, DeviceRunner] = {}
        self.runner = self._warm("lookup")

    @property
    def device(self) -> BreakableDevice | TwinDevice:
        return self._place.device

    def engine(self, drafter: str | Drafter | None) -> Engine:
        """With rows of its own. Without a drafter nobody asks it."""
        if drafter is not None and not isinstance(drafter, str):
            self._chosen.inner = drafter
            drafter = "chosen"
        self.runner = self._warm(drafter or "lookup")
        return Engine(RowTable(self.limits, FORMS), self.runner)

    def _warm(self, name: str) -> DeviceRunner:
        if name not in self._runners:
            self._runners[name] = self._place.runner(self._make(name))
        return self._runners[name]

    def _make(self, name: str) -> MakeDrafting:
        place, numerics = self._place, self._place.kind.numerics
        match name:
            case "lookup":
                return lookups(self.limits)
            case "chosen":
                return launching(self._chosen, self.limits.max_num_draft_tokens)
            case "itself":
                return place.draft_model(MODEL, numerics)
            case "copy":
                return place.draft_model(MODEL, _PACKED[self.limits.block_size])
            case "model":
                return place.draft_model(SMALLER, FLOAT32_NUMERICS)
            case "head" | "large head":
                return place.head(_HEADS[name].write(self._folder / name))
        raise ValueError(name)

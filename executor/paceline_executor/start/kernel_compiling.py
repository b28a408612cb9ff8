"""Kernels for a GPU, compiled before anything launches them, by as many processes as there are cores.

Apart from `loading_device`, which says when. Knows how a model without weights is put together, and where compiled code
is kept. It refuses to know kernels.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars

import paceline_executor
import paceline_kernels
from paceline.process.small_files import read_small_file
from paceline_executor.errors import StartError
from paceline_executor.limits import RowLimits
from paceline_executor.models.collectives import Collectives
from paceline_executor.models.eagle3 import Eagle3Head
from paceline_executor.models.llama import LlamaModel
from paceline_executor.models.shapes import META, ShapeWeights
from paceline_executor.numerics import KvDtype, Numerics
from paceline_executor.runner.cores import usable_cores
from paceline_executor.runner.device.buckets import Buckets
from paceline_executor.runner.device.draft_model import drafting_by_model
from paceline_executor.runner.device.drafts import MakeDrafting
from paceline_executor.runner.device.eagle3 import drafting_by_head
from paceline_executor.runner.device.kv_scales import filled_cache
from paceline_executor.runner.device.rehearsal import rehearse
from paceline_executor.runner.kv_cache import allocate_on_device, kv_geometry
from paceline_executor.upload.conversion import TORCH_TYPES
from paceline_executor.weights.checkpoint import ModelConfig
from paceline_executor.weights.hf.eagle3 import EMBEDDING
from paceline_executor.weights.hf.eagle3_config import Eagle3Config
from paceline_executor.weights.stored_tensor import StoredType
from paceline_kernels.errors import KernelCompileError
from paceline_kernels.gpu.no_gpu import compiling_for
from paceline_kernels.linear import Splits
from paceline_kernels.warm_up.triton_kernels import settle_keys
from paceline_kernels.warm_up.triton_launches import KernelLaunch, launches_of
from paceline_kernels.warm_up.triton_processes import Compiled, compile_launches

_FOLDER, _OF_LAYER = "triton", "model.layers."
_ALIGNED_LAYERS = 4  # scales of a layer's heads lie at a multiple of 4 bytes, and alignments count up to 16


@dataclass(frozen=True, slots=True)
class DraftModelShape:
    """stored: as in `Steps`."""

    model: ModelConfig
    numerics: Numerics
    stored: Mapping[str, StoredType]


@dataclass(frozen=True, slots=True)
class HeadShape:
    config: Eagle3Config
    numerics: Numerics
    has_embedding: bool
    has_ids: bool  # of its own


@dataclass(frozen=True, slots=True)
class Steps:
    """What the launches of a device's steps depend on. stored: how the file has tensors, by name."""

    model: ModelConfig
    numerics: Numerics
    stored: Mapping[str, StoredType]
    limits: RowLimits
    sizes: Buckets
    splits: Splits
    draft_model: DraftModelShape | HeadShape | None = None
    degree: int = 1  # of ranks, of one of which `model` is the part


@dataclass(frozen=True, slots=True)
class _NoLinks:
    """See Collectives; what ranks send each other is no kernel of ours."""

    degree: int
    rank: int = 0

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.empty((self.degree, *part.shape), dtype=part.dtype, device=part.device)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(part)


def launches_of_steps(steps: Steps) -> list[KernelLaunch]:
    limits, splits, draft = steps.limits, steps.splits, steps.draft_model
    shape, numerics = first_layers(steps.model, steps.stored), steps.numerics

    def model_of(
        shape: ModelConfig,
        numerics: Numerics,
        stored: Mapping[str, StoredType],
        collectives: Collectives | None = None,
    ) -> LlamaModel:
        weights = ShapeWeights(shape, TORCH_TYPES[numerics.dtype], numerics.matrices, stored)
        return LlamaModel(weights, limits.max_model_len, collectives)

    def drafting_for(target: LlamaModel) -> MakeDrafting | None:
        if draft is None:
            return None
        if isinstance(draft, HeadShape):
            return _drafting_of_head(draft, target, limits, splits)
        shape, max_len = first_layers(draft.model, draft.stored), limits.max_model_len
        model = model_of(shape, draft.numerics, draft.stored)
        return drafting_by_model(model, shape, draft.numerics, limits, max_len, splits, META)

    def go_through() -> None:
        collectives = _NoLinks(steps.degree) if steps.degree > 1 else None
        target = model_of(shape, numerics, steps.stored, collectives)
        geometry = kv_geometry(shape, limits.num_blocks, limits.block_size, numerics)
        kv_cache = allocate_on_device(geometry, numerics.kv, META)
        rehearse(target, kv_cache, limits, steps.sizes, splits, drafting_for(target))
        if numerics.kv is KvDtype.FP8_E4M3:
            filled_cache(target, shape, numerics, META, limits.block_size, limits.max_model_len)

    return launches_of(go_through)


def _drafting_of_head(shape: HeadShape, target: LlamaModel, limits: RowLimits, splits: Splits) -> MakeDrafting:
    config, numerics = shape.config, shape.numerics
    shapes = config.tensor_shapes() | {EMBEDDING: (config.layer.vocab_size, config.layer.hidden_size)}

    def tensor(name: str) -> torch.Tensor:
        return torch.empty(shapes[name], dtype=TORCH_TYPES[numerics.dtype], device=META)

    embed = None if shape.has_embedding else target.embed
    head = Eagle3Head(config, tensor, embed, limits.max_model_len, numerics.matrices)
    ids = torch.empty(config.draft_vocab_size, dtype=torch.int64, device=META) if shape.has_ids else None
    return drafting_by_head(head, ids, numerics, limits, splits)


def find_kernels_in(cache_dir: Path) -> Path:
    """This process takes from there what is compiled, and keeps there what it compiles itself. Returns the folder."""
    folder = cache_dir / _FOLDER
    triton.knobs.cache.dir = str(folder)
    settle_keys()
    return folder


@contextlib.contextmanager
def alone_in(cache_dir: Path) -> Iterator[None]:
    """Of the processes of this machine that do the same: the others find what the first one keeps."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    folder = os.open(cache_dir, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: each for itself
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def have_compiled(
    steps: Steps, capability: tuple[int, int], cache_dir: Path, on_progress: Callable[[str, float], None]
) -> Compiled:
    """This process finds it from now on. on_progress: told what is done, and which part of it. Raises StartError for a
    kernel that the compiler refuses.
    """
    folder, (major, minor) = find_kernels_in(cache_dir), capability
    mark = folder / f"all-{_digest(steps, capability)}"
    if num_kept := _num_kept(mark):
        return Compiled(num_compiled=0, num_kept=num_kept, num_lost=0)

    def find() -> list[KernelLaunch]:
        with compiling_for(10 * major + minor):
            return launches_of_steps(steps)

    def on_done(num_done: int, num_launches: int) -> None:
        on_progress("compile kernels", num_done / max(1, num_launches))

    on_progress("find kernels", 0.0)
    try:
        compiled = compile_launches(find, 10 * major + minor, folder, usable_cores(), on_done)
    except KernelCompileError as error:
        sentence = f"a kernel cannot be compiled for this GPU, of compute capability {major}.{minor}: {error}"
        raise StartError(f"{sentence}; install another version of Triton, or choose --runner cpu") from error
    if not compiled.num_lost:
        with contextlib.suppress(OSError):  # then processes are started again next time
            mark.write_text(str(compiled.num_compiled + compiled.num_kept))
    return compiled


def _num_kept(mark: Path) -> int:
    """0 without a mark, or where there are fewer folders beside it than kernels: somebody has tidied up."""
    try:
        num_kept = int(read_small_file(mark))
        num_folders = sum(path.is_dir() for path in mark.parent.iterdir())
    except (OSError, ValueError):
        return 0
    return num_kept if num_folders >= num_kept else 0


def _digest(steps: Steps, capability: tuple[int, int]) -> str:
    """Of all that launches depend on, so that nobody has to look for them again. How many blocks there are is none."""
    limits = replace(steps.limits, num_blocks=0)
    of_model = steps.model, steps.numerics, dict(steps.stored), steps.draft_model, steps.degree
    versions = triton.__version__, torch.__version__, get_cache_invalidating_env_vars(), triton.knobs.runtime.debug
    told = *of_model, limits, list(steps.sizes), steps.splits, capability, versions
    digest = hashlib.sha256(repr(told).encode())
    for package in (paceline_kernels, paceline_executor):
        for source in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def first_layers(model: ModelConfig, stored: Mapping[str, StoredType]) -> ModelConfig:
    """The same model up to the layer behind which none is launched otherwise than one before."""
    types: dict[int, list[StoredType]] = {layer: [] for layer in range(model.num_layers)}
    for name in model.tensor_shapes() if stored else ():
        if name.startswith(_OF_LAYER):
            types[int(name.split(".")[2])].append(stored[name])
    kinds = [
        (model.window(layer), layer % _ALIGNED_LAYERS, model.is_sparse(layer), tuple(types[layer]))
        for layer in range(model.num_layers)
    ]
    num_layers = next(count for count in range(1, len(kinds) + 1) if set(kinds[:count]) == set(kinds))
    return replace(model, num_layers=num_layers)

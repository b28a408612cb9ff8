"""How fast weights come to the device: out of a file of the timed model's shape, by the way that executors take.

Knows files and their places in memory. It refuses to know what a model computes.
"""

import gc
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from gpu.bench_models import write_config
from gpu.cells import LOADING, LOADING_SHARE
from gpu.errors import DoesNotFitError
from gpu.report import Figure
from gpu.rigs import AWQ, GROUP_SIZE, Place, quantised_fields
from paceline_executor.models.registry import upload_model
from paceline_executor.upload.staging import HostTransfer, Staging
from paceline_executor.weights.checkpoint import ModelConfig
from paceline_executor.weights.grouped_rows import GroupedTensor
from paceline_executor.weights.hf.safetensors_folder import WEIGHTS_FILE, checkpoint_from_folder
from paceline_executor.weights.stored_checkpoint import StoredCheckpoint

_PART_BYTES = 32 << 20  # written at a time
_ITEM_BYTES = {"BF16": 2, "I32": 4}
_FREE_DISK = 1.2  # times the file
_SEED = 0
_MAX_LEN = 4096  # tables of rotations are no weights
_TIMES = 2  # out of the page cache; the faster one counts, since the first meets kernels that are not there yet


def loading_figures(place: Place, numbers: Sequence[str], config: ModelConfig, folder: Path) -> list[Figure]:
    """GB/s of files of these types, one for all floats: read before, which leaves them in the page cache, and of the
    device's first type also not before; and that of the disk alone.

    Raises DoesNotFitError.
    """
    first = next(iter(place.numerics))
    figures: list[Figure] = []
    for kinds in ([each for each in numbers if not quantised_fields(each)], [AWQ] if AWQ in numbers else []):
        if kinds:
            with _written(config, kinds[0], folder) as (checkpoint, file):
                figures += _figures_of(place, checkpoint, file, kinds, is_first=kinds[0] == first)
    return figures


def _figures_of(
    place: Place, checkpoint: StoredCheckpoint, file: Path, kinds: Sequence[str], *, is_first: bool
) -> Iterator[Figure]:
    def rate(read: Callable[[], object]) -> float:
        begun = time.perf_counter()
        read()
        seconds = time.perf_counter() - begun
        gc.collect()  # a model's memory, before the next one takes its own
        return file.stat().st_size / seconds / 1e9

    if is_first:
        rates = []
        for read in (partial(_read_all, checkpoint), partial(_upload, place, checkpoint, kinds[0])):
            _forget(file)
            rates.append(rate(read))
        yield Figure(kinds[0], LOADING, "from the disk", "GB/s", engine=rates[1])
        yield Figure(kinds[0], LOADING_SHARE, "", "x", engine=rates[1] / rates[0])
    _read_all(checkpoint)
    for numbers in kinds:
        best = max(rate(partial(_upload, place, checkpoint, numbers)) for _ in range(_TIMES))
        yield Figure(numbers, LOADING, "from the page cache", "GB/s", engine=best)


@contextmanager
def _written(config: ModelConfig, numbers: str, folder: Path) -> Iterator[tuple[StoredCheckpoint, Path]]:
    num_bytes = sum(_num_bytes(kind, shape) for _, kind, shape in _tensors(config, numbers))
    if shutil.disk_usage(folder).free < _FREE_DISK * num_bytes:
        raise DoesNotFitError(f"a file of {num_bytes / 1e9:.1f} GB does not fit onto the disk of {folder}")
    with tempfile.TemporaryDirectory(dir=folder, prefix="weights-") as name:
        model = write_weights(config, Path(name), numbers)
        yield checkpoint_from_folder(model), model / WEIGHTS_FILE


def write_weights(config: ModelConfig, folder: Path, numbers: str = "") -> Path:
    """A folder as Hugging Face's, of random numbers; they are on the disk when it returns."""
    model = write_config(config, folder, numbers)
    offset, header = 0, {}
    for name, kind, shape in _tensors(config, numbers):
        end = offset + _num_bytes(kind, shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (model / WEIGHTS_FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in _numbers(offset):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return model


def _tensors(config: ModelConfig, numbers: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape."""
    for name, shape in config.tensor_shapes().items():
        if numbers != AWQ or not name.endswith("_proj.weight"):
            yield name, "BF16", shape
            continue
        (outputs, inputs), module = shape, name.removesuffix("weight")
        groups = inputs // GROUP_SIZE
        yield f"{module}qweight", "I32", (inputs, outputs // 8)
        yield f"{module}qzeros", "I32", (groups, outputs // 8)
        yield f"{module}scales", "BF16", (groups, outputs)


def _numbers(num_bytes: int) -> Iterator[memoryview]:
    """The same of bfloat16 again and again: making them takes longer than writing. As integers they are any."""
    generator = torch.Generator().manual_seed(_SEED)
    numbers = torch.randn(min(num_bytes, _PART_BYTES) // 2, generator=generator).mul_(0.02).to(torch.bfloat16)
    data = numbers.view(torch.uint8).numpy().data
    while num_bytes > 0:
        yield data[:num_bytes]
        num_bytes -= _PART_BYTES


def _num_bytes(kind: str, shape: tuple[int, ...]) -> int:
    return _ITEM_BYTES[kind] * math.prod(shape)


def _upload(place: Place, checkpoint: StoredCheckpoint, numbers: str) -> None:
    numerics, device = place.numerics[numbers], place.device.torch_device
    upload_model(checkpoint, device, min(_MAX_LEN, checkpoint.config.max_model_len), numerics)
    place.synchronize()


def _read_all(checkpoint: StoredCheckpoint) -> None:
    """By as many threads, into the same buffers, without a device."""
    with Staging(HostTransfer()) as staging:
        for name in checkpoint.config.tensor_shapes():
            tensor = checkpoint.stored(name)
            for _first, _rows in staging.stream(tensor.codes.part if isinstance(tensor, GroupedTensor) else tensor):
                pass


def _forget(path: Path) -> None:
    """Out of the page cache, as far as the system listens."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

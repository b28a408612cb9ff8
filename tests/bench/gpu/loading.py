"""How fast weights come to the device: out of a file of the timed model's shape, by the way that executors take.

Knows files and their places in memory. It refuses to know what a model computes.
"""

import gc
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from gpu.bench_models import write_config
from gpu.cells import LOADING, LOADING_SHARE
from gpu.errors import DoesNotFitError
from gpu.report import Figure
from gpu.rigs import Place
from paceline_executor.models.registry import upload_model
from paceline_executor.upload.staging import HostTransfer, Staging
from paceline_executor.weights.checkpoint import ModelConfig
from paceline_executor.weights.hf.safetensors_folder import WEIGHTS_FILE, checkpoint_from_folder
from paceline_executor.weights.stored_checkpoint import StoredCheckpoint
from paceline_executor.weights.stored_tensor import StoredTensor

_PART_NUMBERS = 16 << 20  # written at a time
_BYTES_PER_NUMBER = 2
_FREE_DISK = 1.2  # times the file
_SEED = 0
_MAX_LEN = 4096  # tables of rotations are no weights
_TIMES = 2  # out of the page cache; the faster one counts, since the first meets kernels that are not there yet


def loading_figures(place: Place, config: ModelConfig, folder: Path) -> list[Figure]:
    """GB/s of a file in bfloat16: read before, which leaves it in the page cache, and not; and that of the disk alone.

    Raises DoesNotFitError.
    """
    num_bytes = _num_bytes(config)
    if shutil.disk_usage(folder).free < _FREE_DISK * num_bytes:
        raise DoesNotFitError(f"a file of {num_bytes / 1e9:.1f} GB does not fit onto the disk of {folder}")
    with tempfile.TemporaryDirectory(dir=folder, prefix="weights-") as name:
        model = write_weights(config, Path(name))
        checkpoint, file = checkpoint_from_folder(model), model / WEIGHTS_FILE

        def rate(read: Callable[[], object], *, is_cached: bool) -> float:
            if is_cached:
                _read_all(checkpoint)
            else:
                _forget(file)
            begun = time.perf_counter()
            read()
            seconds = time.perf_counter() - begun
            gc.collect()  # a model's memory, before the next one takes its own
            return num_bytes / seconds / 1e9

        first = next(iter(place.numerics))
        disk = rate(partial(_read_all, checkpoint), is_cached=False)
        cold = rate(partial(_upload, place, checkpoint, first), is_cached=False)
        cached = {
            numbers: max(rate(partial(_upload, place, checkpoint, numbers), is_cached=True) for _ in range(_TIMES))
            for numbers in place.numerics
        }
    return [
        Figure(first, LOADING, "from the disk", "GB/s", engine=cold),
        Figure(first, LOADING_SHARE, "", "x", engine=cold / disk),
        *(Figure(numbers, LOADING, "from the page cache", "GB/s", engine=one) for numbers, one in cached.items()),
    ]


def write_weights(config: ModelConfig, folder: Path) -> Path:
    """A folder as Hugging Face's, of random numbers; they are on the disk when it returns."""
    model = write_config(config, folder)
    offset, header = 0, {}
    for name, shape in config.tensor_shapes().items():
        end = offset + _BYTES_PER_NUMBER * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (model / WEIGHTS_FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in _numbers(offset // _BYTES_PER_NUMBER):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return model


def _numbers(count: int) -> Iterator[memoryview]:
    """The same ones again and again: making them takes longer than writing."""
    generator = torch.Generator().manual_seed(_SEED)
    numbers = torch.randn(min(count, _PART_NUMBERS), generator=generator).mul_(0.02).to(torch.bfloat16)
    data = numbers.view(torch.uint8).numpy().data
    while count > 0:
        yield data[: _BYTES_PER_NUMBER * min(count, _PART_NUMBERS)]
        count -= _PART_NUMBERS


def _num_bytes(config: ModelConfig) -> int:
    return sum(_BYTES_PER_NUMBER * int(np.prod(shape)) for shape in config.tensor_shapes().values())


def _upload(place: Place, checkpoint: StoredCheckpoint, numbers: str) -> None:
    numerics, device = place.numerics[numbers], place.device.torch_device
    upload_model(checkpoint, device, min(_MAX_LEN, checkpoint.config.max_model_len), numerics)
    place.synchronize()


def _read_all(checkpoint: StoredCheckpoint) -> None:
    """By as many threads, into the same buffers, without a device."""
    with Staging(HostTransfer()) as staging:
        for name in checkpoint.config.tensor_shapes():
            tensor = checkpoint.stored(name)
            assert isinstance(tensor, StoredTensor)
            for _first, _rows in staging.stream(tensor):
                pass


def _forget(path: Path) -> None:
    """Out of the page cache, as far as the system listens."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

"""Whether a runner goes on and on in the memory that it had. Knows a process's memory and a device's, not results."""

import gc
import itertools
import os
import time
from pathlib import Path

import torch

from gpu.errors import CheckFailedError
from gpu.feed import Step, limits_of, prompts_of
from gpu.rigs import Place, make_feed, random_model
from random_models import TINY_CONFIG

_MIB = 2**20
_ALLOWED_HOST_MIB, _ALLOWED_DEVICE_MIB = 16.0, 1.0
_NUM_TOKENS = 40  # of a stream, with its prompt well below a row's bound
_MAX_LEN = 64


def goes_on(place: Place, num_rows: int, num_steps: int) -> str:
    """So many steps with streams that come and go; memory after a tenth of them and at the end. Raises
    CheckFailedError.
    """
    limits = limits_of(TINY_CONFIG, num_rows, _MAX_LEN)
    feed = make_feed(place, random_model(place, TINY_CONFIG, next(iter(place.numerics)), _MAX_LEN), TINY_CONFIG, limits)
    prompts = itertools.cycle(prompts_of(TINY_CONFIG, range(1, 20)))
    num_landed, streams = 0, [feed.add(next(prompts), _NUM_TOKENS) for _ in range(num_rows)]

    def on_step(_: Step) -> None:
        nonlocal num_landed
        num_landed += 1
        for index, stream in enumerate(streams):
            if stream.is_done:
                streams[index] = feed.add(next(prompts), _NUM_TOKENS)

    feed.run(on_step, until=lambda: num_landed >= num_steps // 10)
    before, begun = _memory_mib(place), time.perf_counter()
    feed.run(on_step, until=lambda: num_landed >= num_steps)
    seconds, after = time.perf_counter() - begun, _memory_mib(place)
    device, host = (now - then for then, now in zip(before, after, strict=True))
    each = 1e6 * seconds / (num_landed - num_steps // 10)
    sentence = f"{host:+.1f} MiB of the host and {device:+.1f} of the device, {each:.0f} us per step of {num_rows} rows"
    if device > _ALLOWED_DEVICE_MIB or host > _ALLOWED_HOST_MIB:
        raise CheckFailedError(sentence)
    return sentence


def _memory_mib(place: Place) -> tuple[float, float]:
    """The device's, allocated, and this process's."""
    gc.collect()
    device = torch.cuda.memory_allocated() if place.is_cuda else 0
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return device / _MIB, resident / _MIB

"""What kernels achieved: the bytes that they cannot do without reading, over the time that they took.

Knows kernels by name, and events as torch.profiler writes them. It refuses to know how bytes were counted.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LINEAR, ATTENTION = "linear", "attention"
_LAST_KERNEL = "write_results"  # of each step, once

# Parts of the names that kernels of a GPU have: ours, and those of the vendor's libraries.
_OF_LIBRARIES = ("gemm", "gemv", "nvjet", "cutlass", "splitk")
_KINDS: Mapping[str, tuple[str, ...]] = {
    ATTENTION: ("attend_", "fold_partials"),
    LINEAR: (
        "multiply_tiles",
        "multiply_few_rows",
        "multiply_few_groups",
        "multiply_group",
        "widen_groups",
        *_OF_LIBRARIES,
    ),
}


def kind_of(kernel: str) -> str | None:
    """None for a kernel whose bytes are not counted."""
    name = kernel.lower()
    return next((kind for kind, parts in _KINDS.items() if any(part in name for part in parts)), None)


def kernel_times(events: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, float]]:
    """Kind and seconds of each kernel among events, whose times are microseconds."""
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "kernel":
            kind = kind_of(str(event["name"]))
            if kind is not None:
                yield kind, float(event["dur"]) / 1e6


def num_traced_steps(events: Iterable[Mapping[str, Any]]) -> int:
    """Whose kernels a trace has: with two in flight they are not quite the steps that landed meanwhile."""
    return sum(event.get("cat") == "kernel" and _LAST_KERNEL in str(event["name"]) for event in events)


def achieved(times: Iterable[tuple[str, float]], num_bytes: Mapping[str, int]) -> dict[str, float]:
    """Bytes per second by kind. times: kind and seconds, any number of each. num_bytes: over the same steps."""
    seconds: dict[str, float] = {}
    for kind, taken in times:
        seconds[kind] = seconds.get(kind, 0.0) + taken
    return {kind: num_bytes[kind] / taken for kind, taken in seconds.items() if taken > 0 and num_bytes.get(kind)}


def context_bytes(
    context_lens: npt.NDArray[np.int32],
    num_tokens: npt.NDArray[np.int32],
    windows: Sequence[int | None],
    bytes_per_token: int,
) -> int:
    """Keys and values that the rows of a step see, each once. windows: of each layer. bytes_per_token: of one layer."""
    seen = sum(
        int((context_lens if window is None else np.minimum(context_lens, num_tokens + window - 1)).sum())
        for window in windows
    )
    return seen * bytes_per_token

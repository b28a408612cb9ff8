"""What this machine can do at most with two threads: read memory, multiply int8 and float32. Prints one JSON object.

Each is the best of a few trials, with torch's own kernels, on operands well beyond the caches.
"""

import json
import sys
import time
from collections.abc import Callable

import torch

_NUM_THREADS = 2
_NUM_TRIALS = 5
_READ_BYTES = 512 << 20
_SIZE = 2048


def best_s(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(_NUM_TRIALS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def read_gb_per_s() -> float:
    """A sum over more memory than any cache holds."""
    values = torch.ones(_READ_BYTES // 4, dtype=torch.float32)
    return _READ_BYTES / best_s(values.sum) / 1e9


def int8_gop_per_s() -> float:
    """A large product of 8-bit matrices with exact int32 sums, FBGEMM's."""
    weights = torch.quantize_per_tensor(torch.randn(_SIZE, _SIZE), 0.1, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weights, None)
    inputs = torch.quantize_per_tensor(torch.randn(_SIZE, _SIZE), 0.1, 64, torch.quint8)
    return 2 * _SIZE**3 / best_s(lambda: torch.ops.quantized.linear(inputs, packed, 1.0, 0)) / 1e9


def float32_gflop_per_s() -> float:
    first, second = torch.randn(_SIZE, _SIZE), torch.randn(_SIZE, _SIZE)
    return 2 * _SIZE**3 / best_s(lambda: first @ second) / 1e9


def main() -> None:
    torch.set_num_threads(_NUM_THREADS)
    limits = {
        "read_gb_per_s": read_gb_per_s(),
        "int8_gop_per_s": int8_gop_per_s(),
        "float32_gflop_per_s": float32_gflop_per_s(),
    }
    json.dump(limits, sys.stdout)


if __name__ == "__main__":
    main()

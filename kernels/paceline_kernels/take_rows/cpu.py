"""take_rows for CPUs: a copy by numpy, in the calling thread. (torch would wake threads of its own.)"""

import numpy as np
import torch

from paceline_kernels.errors import KernelArgumentError


def take_rows(table: torch.Tensor, indices: torch.Tensor, scale: float) -> torch.Tensor:
    rows = indices.numpy()
    lowest = rows.min(initial=0)
    if rows.size and not (lowest >= -1 and rows.max() < table.shape[0]):
        raise KernelArgumentError("take_rows", f"indices must be 0 to {table.shape[0] - 1}, or -1 for none")
    out = torch.empty((rows.size, table.shape[1]), dtype=torch.float32)
    # The indices were checked: "clip" only spares numpy a buffer.
    np.take(table.numpy(), rows, axis=0, out=out.numpy(), mode="clip")
    if lowest < 0:
        out.numpy()[rows < 0] = np.nan
    if scale != 1.0:
        np.multiply(out.numpy(), np.float32(scale), out=out.numpy())
    return out

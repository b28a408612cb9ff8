"""Memory for tests of GPU kernels: tensors in the middle of NaN, and the addresses that a kernel may touch.

Knows addresses, and the two operations by which Triton's interpreter reaches memory. It refuses to know kernels. On a
GPU nothing watches the reads; there the surroundings show what is written, and NaN what is read, beyond the bounds.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kernel_rig import unwritten_value

_empty = torch.empty  # as it is before a test puts something else in its place
_CPU = torch.device("cpu")
MARGIN = 128  # elements on either side, a multiple of every vector a kernel reads


class OutOfBoundsError(Exception):
    """An interpreted kernel reached for memory that belongs to none of the tensors it may use."""


class BoundedMemory:
    """Tensors of a test that a kernel may use, and nothing else."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._starts: list[int] = []
        self._stops: list[int] = []

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the device, in the middle of memory that holds NaN or an absurd integer."""
        buffer = unwritten((tensor.numel() + 2 * MARGIN,), tensor.dtype, self._device)
        inner = buffer[MARGIN:-MARGIN].view(tensor.shape).copy_(tensor)
        self._buffers.append(buffer)
        self._starts.append(inner.data_ptr())
        self._stops.append(inner.data_ptr() + inner.numel() * inner.element_size())
        return inner

    def empty(self, *size: Any, dtype: torch.dtype, device: torch.device = _CPU) -> torch.Tensor:  # noqa: ANN401
        """A stand-in for `torch.empty`, whose memory is placed, too, and holds what `unwritten` does.

        What runs on another device, as references do where kernels run on a GPU, gets memory as it always does.
        """
        if device.type != self._device.type:
            return _empty(*size, dtype=dtype, device=device)
        shape = torch.Size(size[0] if isinstance(size[0], tuple | torch.Size) else size)
        return self.place(unwritten(shape, dtype, self._device))

    def margins_are_untouched(self) -> bool:
        """Whether nothing was written around any of the tensors."""
        return all(
            torch.equal(margin.view(torch.uint8), unwritten((MARGIN,), buffer.dtype, self._device).view(torch.uint8))
            for buffer in self._buffers
            for margin in (buffer[:MARGIN], buffer[-MARGIN:])
        )

    def watched_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """The interpreter's `create_masked_load`, which from now on raises OutOfBoundsError."""

        def checked(  # a descriptor's load names the last three
            builder: Any,  # noqa: ANN401
            pointers: Any,  # noqa: ANN401
            mask: Any,  # noqa: ANN401
            other: Any,  # noqa: ANN401
            cache_modifier: Any,  # noqa: ANN401
            eviction_policy: Any,  # noqa: ANN401
            is_volatile: Any,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            self._check(pointers, mask)
            return load(builder, pointers, mask, other, cache_modifier, eviction_policy, is_volatile)

        return checked

    def watched_store(self, store: Callable[..., Any]) -> Callable[..., Any]:
        """The same of `create_masked_store`."""

        def checked(builder: Any, pointers: Any, value: Any, mask: Any, *arguments: Any) -> Any:  # noqa: ANN401
            self._check(pointers, mask)
            return store(builder, pointers, value, mask, *arguments)

        return checked

    def _check(self, pointers: Any, mask: Any) -> None:  # noqa: ANN401
        # A descriptor's mask is an array, whose data is memory.
        addresses = pointers.data[np.asarray(mask.data, dtype=np.bool_)].astype(np.int64)
        size = pointers.get_element_ty().primitive_bitwidth // 8
        order = np.argsort(self._starts)
        starts, stops = np.array(self._starts)[order], np.array(self._stops)[order]
        place = np.searchsorted(starts, addresses, side="right") - 1
        outside = (place < 0) | (addresses + size > stops[np.maximum(place, 0)])
        if outside.any():
            raise OutOfBoundsError(f"{np.count_nonzero(outside)} of {outside.size} elements lie in no tensor")


def unwritten(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, unwritten_value(dtype), dtype=dtype, device=device)

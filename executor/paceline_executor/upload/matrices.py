"""A checkpoint's tensors on a device: each row at its place in the one tensor that it belongs to, and checked.

Refuses to know what a model does with them, and how bytes come to the device.

Everything is allocated once, in its last type and shape: matrices that take the same input are written into one, and a
part of a matrix becomes 4 or 8 bits a number as it arrives. So a model takes its own size of the device, and a little.
"""

from collections.abc import Callable, Iterator

import numpy as np
import structlog
import torch

from paceline_executor.numerics import MatrixKind, experts_stay_grouped
from paceline_executor.upload.conversion import check_convertible, codes_of, groups_of, numbers_of, numbers_of_groups
from paceline_executor.upload.grouping import expected_weight, grouped_weight, put, stack_of
from paceline_executor.upload.staging import Staging
from paceline_executor.weights.checkpoint import Checkpoint, ModelConfig
from paceline_executor.weights.grouped_rows import GroupedTensor, Matrix
from paceline_executor.weights.stored_checkpoint import as_float32, not_finite
from paceline_executor.weights.stored_tensor import (
    FloatType,
    GroupedType,
    Stored,
    StoredTensor,
    are_w8a8,
    grouped_type,
)
from paceline_kernels.grouped_linear import GroupedWeight, pack_grouped
from paceline_kernels.scaled_linear import ScaledWeight, quantize_rows

# Converted at a time; that takes a few times as many float32 beside them.
_NUMBERS_AT_ONCE = 16 << 20


class Uploader:
    """One thread may use it at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        staging: Staging,
        on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        """dtype: of dense numbers. on_progress: told how many bytes of how many have been read, often.

        Raises UnsupportedModelError, before anything is read, for numbers that are not dequantised on a device.
        """
        self._checkpoint = checkpoint
        self._device = device
        self._dtype = dtype
        self._staging = staging
        self._on_progress = on_progress
        tensors = [checkpoint.stored(name) for name in checkpoint.config.tensor_shapes()]
        for tensor in tensors:
            check_convertible(tensor)
        self._num_bytes, self._total_bytes = 0, sum(tensor.num_bytes for tensor in tensors)
        self._checked: list[tuple[Matrix, torch.Tensor]] = []  # on the device: whether all numbers are finite

    @property
    def config(self) -> ModelConfig:
        return self._checkpoint.config

    @property
    def dtype(self) -> torch.dtype:
        """Dense numbers have it."""
        return self._dtype

    def dense(self, *names: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One below the other: [all rows, …] of `dtype`, else that of all.

        Raises ModelCorruptError.
        """
        tensors = [self._checkpoint.stored(name) for name in names]
        shape = (sum(tensor.num_rows for tensor in tensors), *tensors[0].shape[1:])
        out = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        first = 0
        for tensor in tensors:
            self._write_dense(tensor, out[first : first + tensor.num_rows].view(tensor.num_rows, -1))
            first += tensor.num_rows
        return out

    def matrix(self, *names: str, kind: MatrixKind) -> torch.Tensor | ScaledWeight | list[torch.Tensor | GroupedWeight]:
        """One below the other: one product instead of several. Apart, where any is quantised in groups and stays so.

        Raises ModelCorruptError.
        """
        tensors = [self._checkpoint.stored(name) for name in names]
        is_int8 = kind is MatrixKind.AS_STORED and are_w8a8(tensor.stored for tensor in tensors)
        if kind is MatrixKind.AS_STORED and not is_int8:
            if any(grouped_type(tensor.stored) for tensor in tensors):
                return [self._as_stored(tensor) for tensor in tensors]
            if all(tensor.stored is not FloatType.FLOAT8_E4M3FN for tensor in tensors):
                return self.dense(*names)
        if kind is MatrixKind.DENSE:
            return self.dense(*names)
        num_rows, width = sum(tensor.num_rows for tensor in tensors), tensors[0].shape[1]
        dtype, write = (torch.int8, self._write_int8) if is_int8 else (torch.float8_e4m3fn, self._write_float8)
        values = torch.empty((num_rows, width), dtype=dtype, device=self._device)
        scales = torch.empty((num_rows,), dtype=torch.float32, device=self._device)
        first = 0
        for tensor in tensors:
            rows = slice(first, first + tensor.num_rows)
            write(tensor, ScaledWeight(values[rows], scales[rows]))
            first = rows.stop
        return ScaledWeight(values, scales)

    def experts(self, layer: int, kind: MatrixKind) -> list[torch.Tensor | ScaledWeight | GroupedWeight]:
        """Gates and ups, and downs, of all experts of a sparse layer: each one below the other, in one allocation.

        Grouped, where both stay so, else neither. Raises ModelCorruptError.
        """
        config, stored = self.config, self._checkpoint.stored_types
        both = [config.expert_names(layer, *parts) for parts in (("gate_proj", "up_proj"), ("down_proj",))]
        if kind is MatrixKind.AS_STORED and experts_stay_grouped(config, layer, stored):
            stacks = [stack for stack in map(self._stack, both) if stack is not None]
            if len(stacks) == len(both):
                return [*stacks]
        return [self._experts(names, kind) for names in both]

    def _stack(self, names: list[str]) -> GroupedWeight | None:
        """None where kernels have no form for one, or none for all."""
        stack = None
        for place, name in enumerate(names):
            tensor = self._checkpoint.stored(name)
            grouped = grouped_type(tensor.stored)
            weight = None if grouped is None else self._grouped(tensor, grouped)
            if weight is None:
                return None
            self._note(tensor, weight.is_finite())
            stack = put(stack_of(weight, len(names)) if stack is None else stack, place, weight)
            if stack is None:
                return None
        return stack

    def _experts(self, names: list[str], kind: MatrixKind) -> torch.Tensor | ScaledWeight:
        tensors = [self._checkpoint.stored(name) for name in names]
        types = [tensor.stored for tensor in tensors]
        if kind is MatrixKind.AS_STORED and any(map(grouped_type, types)) and not are_w8a8(types):
            structlog.get_logger().info("weights_widened", tensor=tensors[0].name, stored=str(types[0]))
            kind = MatrixKind.DENSE
        weight = self.matrix(*names, kind=kind)
        assert not isinstance(weight, list)
        return weight

    def _as_stored(self, tensor: Matrix) -> torch.Tensor | GroupedWeight:
        grouped = grouped_type(tensor.stored)
        if grouped is not None:
            weight = self._grouped(tensor, grouped)
            if weight is not None:
                self._note(tensor, weight.is_finite())
                return weight
            structlog.get_logger().info("weights_widened", tensor=tensor.name, stored=grouped.name)
        out = torch.empty((tensor.num_rows, tensor.row_numbers), dtype=self._dtype, device=self._device)
        self._write_dense(tensor, out)
        return out

    def _grouped(self, tensor: Matrix, kind: GroupedType) -> GroupedWeight | None:
        if isinstance(tensor, GroupedTensor):
            codes = codes_of(self._octets(tensor.codes.part), tensor.codes)
            weight = grouped_weight(tensor.read_scales(), codes, kind, self._dtype)
            if weight is not None:
                self._tell(tensor.num_bytes)
            return weight
        weight = expected_weight(kind, (tensor.num_rows, tensor.row_numbers), self._dtype, self._device)
        if weight is not None:
            for first, rows in self._rows(tensor):
                codes, scales, minima = groups_of(rows, tensor.stored)
                pack_grouped(weight, self._places(tensor, first, len(rows)), codes, scales, minima=minima)
        return weight

    def _octets(self, part: Stored) -> torch.Tensor:
        """All of them: [rows, bytes per row]."""
        out = torch.empty((part.num_rows, part.row_bytes), dtype=torch.uint8, device=self._device)
        for first, rows in self._staging.stream(part):
            out[first : first + rows.shape[0]] = rows
        return out

    def check(self) -> None:
        """Waits for the device. Raises ModelCorruptError for the first tensor that holds other than finite numbers."""
        if self._checked and not torch.stack([is_finite for _, is_finite in self._checked]).all():
            raise not_finite(next(tensor for tensor, is_finite in self._checked if not is_finite))
        self._checked.clear()

    def _write_dense(self, tensor: Matrix, out: torch.Tensor) -> None:
        """out: [rows, numbers], rows in the order of the model."""
        scales = self._scales(tensor)
        for first, numbers in self._parts(tensor):
            values = numbers if scales is None else numbers.float() * scales[first : first + numbers.shape[0], None]
            rounded = values.to(out.dtype)
            self._note(tensor, rounded.isfinite().all())
            _put_rows(out, rounded, self._places(tensor, first, numbers.shape[0]))

    def _write_float8(self, tensor: Matrix, out: ScaledWeight) -> None:
        is_float8 = tensor.stored is FloatType.FLOAT8_E4M3FN
        scales = self._scales(tensor)
        for first, numbers in self._parts(tensor):
            num_rows = numbers.shape[0]
            if is_float8:
                of_rows = torch.ones(num_rows, device=self._device) if scales is None else scales[first:][:num_rows]
                part = ScaledWeight(numbers, of_rows)
                self._note(tensor, ((numbers.view(torch.uint8) & 127) != 127).all())
            else:
                part = quantize_rows(numbers, torch.float8_e4m3fn)
                self._note(tensor, numbers.isfinite().all())
            places = self._places(tensor, first, num_rows)
            _put_rows(out.values.view(torch.uint8), part.values.view(torch.uint8), places)
            _put_rows(out.scales, part.scales, places)

    def _write_int8(self, tensor: Matrix, out: ScaledWeight) -> None:
        assert isinstance(tensor, GroupedTensor)
        for first, rows in self._staging.stream(tensor.codes.part):
            out.values[first : first + rows.shape[0]] = rows.view(torch.int8)
        out.scales[:] = torch.tensor(tensor.read_scales().scales[:, 0])
        self._tell(tensor.num_bytes)

    def _parts(self, tensor: Matrix) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, numbers [rows, numbers]), in the order of the file."""
        if isinstance(tensor, GroupedTensor):
            for first, part in tensor.read().parts():
                yield first, numbers_of_groups(part, self._device)
            self._tell(tensor.num_bytes)
            return
        for first, rows in self._rows(tensor):
            yield first, numbers_of(rows, tensor.stored)

    def _rows(self, tensor: StoredTensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row, bytes [rows, bytes per row]), in the order of the file."""
        rows_at_once = max(1, _NUMBERS_AT_ONCE // tensor.row_numbers)
        for first, rows in self._staging.stream(tensor):
            for start in range(0, rows.shape[0], rows_at_once):
                yield first + start, rows[start : start + rows_at_once]
            self._tell(rows.numel())

    def _tell(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._on_progress(self._num_bytes, self._total_bytes)

    def _scales(self, tensor: Matrix) -> torch.Tensor | None:
        """Of each row, [rows] float32, in the order of the file."""
        if isinstance(tensor, GroupedTensor) or tensor.scales is None:
            return None
        scales = torch.from_numpy(as_float32(tensor.scales).reshape(-1)).to(self._device)
        return scales.expand(tensor.num_rows)

    def _places(self, tensor: Matrix, first: int, num_rows: int) -> slice | torch.Tensor:
        """Where these rows of the file belong among the rows of the tensor."""
        if isinstance(tensor, GroupedTensor) or not tensor.interleaved_heads:
            return slice(first, first + num_rows)
        places = tensor.place_of_row(np.arange(first, first + num_rows))
        return torch.from_numpy(places).to(self._device)

    def _note(self, tensor: Matrix, is_finite: torch.Tensor) -> None:
        self._checked.append((tensor, is_finite))


def _put_rows(out: torch.Tensor, rows: torch.Tensor, places: slice | torch.Tensor) -> None:
    if isinstance(places, slice):
        out[places] = rows
    else:
        out.index_copy_(0, places, rows)

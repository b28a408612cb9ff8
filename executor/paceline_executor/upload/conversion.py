"""From stored bytes to numbers, or to integers in groups, by torch operations, which run on any device.

Knows the blocks of ggml's types, as ggml-common.h of the ggml project defines them. The arithmetic is float32, in the
order of the gguf library, so that the values have the same bits.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType

from paceline_executor.errors import UnsupportedModelError
from paceline_executor.weights.grouped_rows import GroupedRows, GroupedTensor, Matrix, StoredCodes
from paceline_executor.weights.stored_tensor import FloatType, PlainType, block_sizes

TORCH_TYPES: Mapping[FloatType, torch.dtype] = {
    FloatType.FLOAT32: torch.float32,
    FloatType.FLOAT16: torch.float16,
    FloatType.BFLOAT16: torch.bfloat16,
    FloatType.FLOAT8_E4M3FN: torch.float8_e4m3fn,
}


class Groups(NamedTuple):
    """Weight = code * scale + minimum."""

    codes: torch.Tensor  # [rows, inputs] int8, or uint8 where there are minima
    scales: torch.Tensor  # [rows, groups] float16 or float32
    minima: torch.Tensor | None = None  # of the same shape and type


def check_convertible(tensor: Matrix) -> None:
    """Raises UnsupportedModelError for a type that `numbers_of` does not know."""
    if isinstance(tensor, GroupedTensor):
        return
    if not isinstance(tensor.stored, FloatType) and tensor.stored not in _BLOCKS:
        known = ", ".join(sorted(kind.name for kind in _BLOCKS))
        raise UnsupportedModelError(
            f"{tensor.source.path} cannot be served from this device: tensor {tensor.name} is stored as "
            f"{tensor.stored.name}, and {known} are read there; choose another file of the model"
        )


def numbers_of(rows: torch.Tensor, stored: PlainType) -> torch.Tensor:
    """Returns [rows, numbers]: of their own type for floats, float32 for blocks.

    rows: [rows, bytes per row] uint8, contiguous, on any device. Floats are a view of them.
    """
    if isinstance(stored, FloatType):
        return rows.view(TORCH_TYPES[stored])
    codes, scales, minima = groups_of(rows, stored)
    numbers = codes.view(*scales.shape, -1) * scales.float()[:, :, None]
    if minima is not None:
        numbers += minima[:, :, None]
    return numbers.flatten(1)


def groups_of(rows: torch.Tensor, stored: PlainType) -> Groups:
    """Of blocks. rows: [rows, bytes per row] uint8, contiguous, on any device."""
    codes, scales, minima = _BLOCKS[stored](rows.view(-1, block_sizes(stored)[1]))
    shape = rows.shape[0], -1
    return Groups(codes.reshape(shape), scales.reshape(shape), None if minima is None else minima.reshape(shape))


def codes_of(octets: torch.Tensor, codes: StoredCodes) -> torch.Tensor:
    """[out, in] uint8, or int8 where they are signed, as `StoredCodes.read` has them.

    octets: [rows of the file, bytes per row] uint8, contiguous.
    """
    if codes.num_bits == 8 and not codes.is_transposed:
        return codes.trimmed(octets.view(torch.int8) if codes.is_signed else octets)
    size = 4 if codes.is_transposed else 1
    words = octets.view(torch.int32 if size == 4 else torch.uint8)
    words = words.t() if codes.is_transposed else words
    places = range(8 * size // codes.num_bits)
    found = torch.empty(*words.shape, len(places), dtype=torch.uint8, device=octets.device)
    for place in places:
        found[..., place] = words >> codes.num_bits * place & (1 << codes.num_bits) - 1
    if codes.outputs_of_word:
        places_of_outputs = torch.tensor(codes.outputs_of_word, device=octets.device).argsort()
        return found[..., places_of_outputs].transpose(1, 2).reshape(codes.shape)
    return codes.trimmed((found.flip(-1) if codes.high_first else found).flatten(1))


def numbers_of_groups(rows: GroupedRows, device: torch.device) -> torch.Tensor:
    """Returns float32 [rows, inputs] on the device, with the bits of `GroupedRows.floats`."""

    def moved(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.require(array, requirements=("C", "W"))).to(device)

    groups, codes = moved(rows.group_of_input), moved(rows.codes)
    values = codes.float() if rows.table is None else moved(rows.table)[codes.int()]
    if rows.zeros is not None:
        values -= moved(rows.zeros)[:, groups]
    return values.mul_(moved(rows.scales)[:, groups]).mul_(rows.factor)


def _halves(columns: torch.Tensor) -> torch.Tensor:
    """float16 numbers [blocks, 2 * n] as they are: [blocks, n]."""
    return columns.contiguous().view(torch.float16)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[…, n] bytes -> [… , 2 * n]: all low halves first."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q4_0(blocks: torch.Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 2:]).to(torch.int8) - 8, _halves(blocks[:, :2]))


def _q4_1(blocks: torch.Tensor) -> Groups:
    return Groups(_nibbles(blocks[:, 4:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _q5_0(blocks: torch.Tensor) -> Groups:
    return Groups(_five_bits(blocks[:, 2:6], blocks[:, 6:]).to(torch.int8) - 16, _halves(blocks[:, :2]))


def _q5_1(blocks: torch.Tensor) -> Groups:
    return Groups(_five_bits(blocks[:, 4:8], blocks[:, 8:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _five_bits(fifth: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Of 4 bytes of fifth bits and 16 of the others: [blocks, 32]."""
    eight = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return _nibbles(packed) | (fifth[:, :, None] >> eight & 1).flatten(1) << 4


def _q8_0(blocks: torch.Tensor) -> Groups:
    return Groups(blocks[:, 2:].contiguous().view(torch.int8), _halves(blocks[:, :2]))


def _q4_k(blocks: torch.Tensor) -> Groups:
    """144 bytes: scale, scale of minima, 12 bytes of eight 6-bit scales and minima, 128 of integers."""
    return Groups(_nibbles(blocks[:, 16:].reshape(-1, 4, 32)), *_six_bits(blocks[:, :16]))


def _q5_k(blocks: torch.Tensor) -> Groups:
    """176 bytes: as of Q4_K, with 32 of the integers' fifth bits before the integers."""
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    eight = torch.arange(8, dtype=torch.uint8, device=blocks.device)[None, :, None]
    fifth = blocks[:, 16:48].reshape(-1, 1, 32) >> eight & 1
    return Groups(low | fifth << 4, *_six_bits(blocks[:, :16]))


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima [blocks, 8]: eight each of 6 bits in 12 bytes, after what they are multiplied with."""
    first, second, rest = packed[:, 4:8], packed[:, 8:12], packed[:, 12:]
    scales = torch.cat((first & 63, rest & 15 | first >> 2 & 48), dim=1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), dim=1)
    return _halves(packed[:, :2]).float() * scales, -(_halves(packed[:, 2:4]).float() * minima)


def _q6_k(blocks: torch.Tensor) -> Groups:
    """210 bytes: 128 of lower four bits, 64 of upper two, sixteen scales of 8 bits, a scale."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 8, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3).view(-1, 8, 32)
    scales = _halves(blocks[:, 208:]).float() * blocks[:, 192:208].contiguous().view(torch.int8)
    return Groups((low | high << 4).to(torch.int8) - 32, scales)


_BLOCKS: Mapping[PlainType, Callable[[torch.Tensor], Groups]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}

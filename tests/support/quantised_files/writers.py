"""Quantised matrices, written number by number as each format defines them: tensors, and what they stand for.

Takes nothing from the readers. Every writer draws a matrix, and returns its tensors by the ends of their names and the
float32 numbers that its definition gives: (code - zero) * scale, one product.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Float32Array = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]
Tensors = dict[str, torch.Tensor]
Writer = Callable[[np.random.Generator, int, int], tuple[Tensors, Float32Array]]
"""Takes outputs and inputs."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each half byte of a word holds, from the lowest on


@dataclass(frozen=True, slots=True)
class Rounded:
    """A matrix of random weights as integers from 0 on."""

    codes: IntArray  # [out, in]
    zeros: IntArray  # [out, groups]
    scales: torch.Tensor  # [out, groups]
    groups: IntArray  # [in]

    @property
    def weights(self) -> Float32Array:
        weights = (self.codes - self.zeros[:, self.groups]).astype(np.float32)
        weights *= self.scales.float().numpy()[:, self.groups]
        return weights


def rounded(
    rng: np.random.Generator,
    outputs: int,
    groups: IntArray,
    bits: int,
    *,
    is_symmetric: bool,
    dtype: torch.dtype = torch.float16,
) -> Rounded:
    """Each to the nearest, between the least and the largest of its group."""
    values = rng.standard_normal((outputs, groups.size)) * 0.1
    top, num_groups = 2**bits - 1, int(groups.max()) + 1
    scales = torch.empty((outputs, num_groups), dtype=dtype)
    zeros = np.full((outputs, num_groups), 2 ** (bits - 1))
    codes = np.empty(values.shape, np.int64)
    for group in range(num_groups):
        within = groups == group
        low, high = np.minimum(values[:, within].min(1), 0), np.maximum(values[:, within].max(1), 0)
        width = 2 * np.maximum(-low, high) if is_symmetric else high - low
        scales[:, group] = torch.from_numpy(width / top)
        scale = scales[:, group].double().numpy()
        if not is_symmetric:
            zeros[:, group] = np.clip(np.rint(-low / scale), 0, top)
        codes[:, within] = np.clip(np.rint(values[:, within] / scale[:, None]) + zeros[:, group, None], 0, top)
    return Rounded(codes, zeros, scales, groups)


def packed(numbers: IntArray, bits: int) -> npt.NDArray[np.uint32]:
    """[n, m] -> [words, m]: number i begins at bit i * bits of a column."""
    words = np.zeros((-(-len(numbers) * bits // 32), numbers.shape[1]), np.uint32)
    for index, row in enumerate(numbers):
        words[index * bits // 32] |= (row << index * bits % 32).astype(np.uint32)
    return words


def as_tensor(words: npt.NDArray[np.uint32]) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int32).copy())


def neighbours(inputs: int, group: int) -> IntArray:
    return np.arange(inputs) // (inputs if group == -1 else group)


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    is_symmetric: bool = True,
    version: int = 1,
    act_order: bool = False,
    g_idx: str = "written",
    dummy_zeros: bool = False,
    shift: int = 0,
) -> Writer:
    """g_idx: "written", "absent", or "zeros", as some tools leave it without an order. shift: of the mean, in steps."""

    def write(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, Float32Array]:
        groups = neighbours(inputs, group)
        groups = rng.permutation(groups) if act_order else groups
        matrix = rounded(rng, outputs, groups, bits, is_symmetric=is_symmetric)
        if not is_symmetric:
            matrix.zeros[0, 0] = 0  # in version 1 it borrows from its neighbour
            matrix.codes[...] = np.minimum(matrix.codes + shift, 2**bits - 1)
        zeros = packed(matrix.zeros, bits).T
        if version == 1:
            zeros = zeros - np.uint32(sum(1 << at for at in range(0, 32, bits)))
        tensors = {
            "qweight": as_tensor(packed(matrix.codes.T, bits)),
            "qzeros": as_tensor(np.zeros_like(zeros) if dummy_zeros else zeros),
            "scales": matrix.scales.T.contiguous(),
        }
        if g_idx != "absent":
            tensors["g_idx"] = torch.from_numpy((groups if g_idx == "written" else groups * 0).astype(np.int32))
        return tensors, matrix.weights

    return write


def awq(group: int = 32, *, is_gemv: bool = False, dtype: torch.dtype = torch.float16) -> Writer:
    """Zeros of both ends stand in the first row."""

    def write(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, Float32Array]:
        matrix = rounded(rng, outputs, neighbours(inputs, group), 4, is_symmetric=False, dtype=dtype)
        matrix.zeros[0, 0], matrix.zeros[1, 0] = 0, 15
        if not is_gemv:
            words = {"qweight": matrix.codes.T, "qzeros": matrix.zeros.T}
            tensors = {name: as_tensor(_interleaved(numbers)) for name, numbers in words.items()}
            return tensors | {"scales": matrix.scales.T.contiguous()}, matrix.weights
        zeros = np.pad(matrix.zeros, ((0, 0), (0, -matrix.zeros.shape[1] % 16)))
        scales = torch.zeros((outputs, zeros.shape[1]), dtype=dtype)
        scales[:, : matrix.scales.shape[1]] = matrix.scales
        return {
            "qweight": as_tensor(packed(matrix.codes.T, 4).T),
            "qzeros": as_tensor(packed(zeros.T, 4).T),
            "scales": scales,
        }, matrix.weights

    return write


def _interleaved(numbers: IntArray) -> npt.NDArray[np.uint32]:
    """[n, out] -> [n, out / 8]."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    for place, output in enumerate(AWQ_ORDER):
        words |= (numbers[:, output::8] << 4 * place).astype(np.uint32)
    return words


def compressed(
    bits: int = 4,
    group: int = 32,
    *,
    is_symmetric: bool = True,
    act_order: bool = False,
    g_idx: str = "",
    form: str = "",
) -> Writer:
    """g_idx: "unset" writes -1, as older versions did. form: "int8" for bytes instead of words."""

    def write(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, Float32Array]:
        groups = neighbours(inputs, group)
        groups = rng.permutation(groups) if act_order else groups
        matrix = rounded(rng, outputs, groups, bits, is_symmetric=is_symmetric, dtype=torch.bfloat16)
        middle = 2 ** (bits - 1)
        tensors = {"weight_scale": matrix.scales}
        if form == "int8":
            tensors["weight"] = torch.from_numpy((matrix.codes - middle).astype(np.int8))
        else:
            tensors["weight_packed"] = as_tensor(packed(matrix.codes.T, bits).T)
            tensors["weight_shape"] = torch.tensor([outputs, inputs])
        if not is_symmetric:
            plain = torch.from_numpy((matrix.zeros - middle).astype(np.int8))
            tensors["weight_zero_point"] = plain if form == "int8" else as_tensor(packed(matrix.zeros, bits))
        if act_order or g_idx:
            tensors["weight_g_idx"] = torch.from_numpy((groups if act_order else groups * 0 - 1).astype(np.int32))
        return tensors, matrix.weights

    return write


def float8(
    scales: str, block: tuple[int, int] = (128, 128), name: str = "weight_scale", dtype: torch.dtype = torch.float32
) -> Writer:
    """scales: one for "all", for "rows", or for "blocks", whose last ones are cut off; of dtype uint8 exponents."""

    def write(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, Float32Array]:
        numbers = torch.from_numpy(rng.standard_normal((outputs, inputs)) * 50).to(torch.float8_e4m3fn)
        shape = {"all": (), "one": (1,), "rows": (outputs, 1)}.get(scales, _blocks(block, outputs, inputs))
        if dtype == torch.uint8:
            exponents = torch.from_numpy(rng.integers(110, 120, shape).astype(np.uint8))
            stored, factors = exponents.view(torch.float8_e8m0fnu), 2.0 ** (exponents.float() - 127)
        else:
            stored = torch.from_numpy(rng.uniform(0.001, 0.005, shape)).to(dtype)
            factors = stored.float()
        if scales == "blocks":
            factors = factors.repeat_interleave(block[0], 0)[:outputs].repeat_interleave(block[1], 1)[:, :inputs]
        return {"weight": numbers, name: stored}, (numbers.float() * factors).numpy()

    return write


def _blocks(block: tuple[int, int], outputs: int, inputs: int) -> tuple[int, int]:
    return -(-outputs // block[0]), -(-inputs // block[1])


def fp4(kind: str) -> Writer:
    """E2M1: a sign, two bits of exponent, one of mantissa; two to a byte, the first in the low half.

    kind: "mx"; "nv" of compressed-tensors, whose scale of the whole divides, or "modelopt", whose multiplies.
    """
    sizes = [bits / 2 if bits < 2 else 2.0 ** (bits // 2 - 1) * (1 + bits % 2 / 2) for bits in range(8)]
    numbers = np.array([*sizes, *(-size for size in sizes)], np.float32)

    def write(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, Float32Array]:
        codes = rng.integers(0, 16, (outputs, inputs))
        octets = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
        group = 32 if kind == "mx" else 16
        shape = (outputs, inputs // group)
        if kind == "mx":
            exponents = rng.integers(118, 124, shape)
            stored = torch.from_numpy(exponents.astype(np.uint8))
            scales = np.float32(2.0) ** (exponents - 127).astype(np.float32)
            tensors = {"weight_packed": octets, "weight_scale": stored}
        else:
            stored = torch.from_numpy(rng.uniform(50, 400, shape)).to(torch.float8_e4m3fn)
            if kind == "nv":
                divisor = torch.tensor([4321.0])
                scales = (stored.float() / divisor).numpy()
                tensors = {"weight_packed": octets, "weight_scale": stored, "weight_global_scale": divisor}
            else:
                factor = torch.tensor(0.00023)
                scales = (stored.float() * factor).numpy()
                tensors = {"weight": octets, "weight_scale": stored, "weight_scale_2": factor}
                tensors["input_scale"] = torch.tensor(0.01)
        return tensors, numbers[codes] * np.repeat(scales, group, axis=1)

    return write


def bitsandbytes(kind: str = "nf4", *, is_nested: bool = False, storage: torch.dtype = torch.uint8) -> Writer:
    """A table of 16 numbers of its own; blocks of 64 of the flat matrix, the first of two numbers in the upper half."""

    def write(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, Float32Array]:
        size, end = outputs * inputs, f"weight.quant_state.bitsandbytes__{kind}"
        codes, table = rng.integers(0, 16, size), np.sort(rng.uniform(-1, 1, 16).astype(np.float32))
        state: dict[str, object] = {
            "quant_type": kind,
            "blocksize": 64,
            "dtype": "bfloat16",
            "shape": [outputs, inputs],
        }
        absmax = rng.uniform(0.1, 0.3, -(-size // 64)).astype(np.float32)
        tensors: Tensors = {}
        if is_nested:
            inner, map_of_256 = rng.integers(0, 256, absmax.size), rng.uniform(-1, 1, 256).astype(np.float32)
            of_blocks = rng.uniform(0.02, 0.05, -(-absmax.size // 256)).astype(np.float32)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.125}
            absmax = map_of_256[inner] * np.repeat(of_blocks, 256)[: absmax.size] + np.float32(0.125)
            tensors["weight.absmax"] = torch.from_numpy(inner.astype(np.uint8))
            tensors["weight.nested_absmax"] = torch.from_numpy(of_blocks)
            tensors["weight.nested_quant_map"] = torch.from_numpy(map_of_256)
        else:
            tensors["weight.absmax"] = torch.from_numpy(absmax)
        octets = torch.from_numpy((codes[::2] << 4 | codes[1::2]).astype(np.uint8))
        tensors |= {
            "weight": octets.view(storage).reshape(-1, 1),
            "weight.quant_map": torch.from_numpy(table),
            end: torch.from_numpy(np.frombuffer(json.dumps(state).encode(), np.uint8).copy()),
        }
        weights = table[codes] * np.repeat(absmax, 64)[:size]
        return tensors, weights.reshape(outputs, inputs)

    return write


def int8(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, Float32Array]:
    """LLM.int8: two products, the second with 1 / 127 as float32."""
    codes = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    scales = rng.uniform(0.1, 0.4, outputs).astype(np.float32)
    weights = codes.astype(np.float32) * scales[:, None] * np.float32(1 / 127)
    tensors = {"weight": codes, "SCB": scales, "weight_format": np.array(0, np.uint8)}
    return {name: torch.from_numpy(array) for name, array in tensors.items()}, weights


def plain(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, Float32Array]:
    """Not quantised; bfloat16."""
    weight = torch.from_numpy(rng.standard_normal((outputs, inputs)) * 0.1).bfloat16()
    return {"weight": weight}, weight.float().numpy()


def left_beside(name: str) -> Writer:
    """A matrix that a tool did not quantise, and a scale all the same, with whatever stood in memory."""

    def write(rng: np.random.Generator, outputs: int, inputs: int) -> tuple[Tensors, Float32Array]:
        tensors, weights = plain(rng, outputs, inputs)
        return tensors | {name: torch.full((1, 1), torch.nan)}, weights

    return write

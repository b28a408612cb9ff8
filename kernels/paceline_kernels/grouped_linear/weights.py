"""Weights of 4 or 8 bits whose inputs share scales in groups, where kernels for GPUs want them. Knows no product.

Words of 32 bits hold what stands for 16 outputs and some inputs, a tile, side by side: [outputs / 16, inputs / tile,
16 outputs, 16 words]. A tile has 128 inputs of 4 bits or 64 of 8. The codes at one place of all words of a row, a
plane, are those of 16 inputs next to each other, plane after plane: so a plane becomes an operand of a matrix
instruction number by number, and lies in one group. Scales and the like are [outputs / 16, groups, 16 outputs].

Apart from the operation, which imports its backends: these take such weights too.
"""

import enum
from dataclasses import dataclass

import torch

from paceline_kernels.arguments import check_tensor
from paceline_kernels.errors import KernelArgumentError

TILE_OUTPUTS, WORDS = 16, 16
_OP = "grouped_linear"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Codes(enum.Enum):
    """What a code is, and how many bits it has."""

    INT4 = "integer of 4 bits"
    INT8 = "integer of 8 bits"
    TABLE = "place of 4 bits in a table"
    FLOAT8 = "float8_e4m3fn"

    @property
    def num_bits(self) -> int:
        return 4 if self in (Codes.INT4, Codes.TABLE) else 8

    @property
    def tile_inputs(self) -> int:
        return WORDS * 32 // self.num_bits


@dataclass(frozen=True, slots=True)
class GroupedLayout:
    """All of a weight but its numbers.

    Weight = (number of the code - zero) * scale, or (number - middle) * scale + minimum.
    """

    num_outputs: int
    num_inputs: int
    group: int  # neighbours in the order of the codes; num_inputs or more: all of a row
    codes: Codes
    middle: int = 0  # the zero of integers without zeros; with zeros, about what these are

    @property
    def num_output_tiles(self) -> int:
        return -(-self.num_outputs // TILE_OUTPUTS)

    @property
    def num_tiles(self) -> int:
        """Of inputs."""
        return -(-self.num_inputs // self.codes.tile_inputs)

    @property
    def num_groups(self) -> int:
        return -(-self.num_inputs // self.group)

    def check(self) -> None:
        """Raise KernelArgumentError if groups and tiles do not lie in each other, or codes have no middle."""
        tile = self.codes.tile_inputs
        fits = self.group > 0 and self.group % WORDS == 0 and (tile % self.group == 0 or self.group % tile == 0)
        if not fits and not 0 < self.num_inputs <= self.group:
            sizes = f"groups of {self.group} among {self.num_inputs} inputs"
            raise KernelArgumentError(_OP, f"{sizes}: they must divide {tile} or be a multiple, and one of {WORDS}")
        if self.middle and self.codes not in (Codes.INT4, Codes.INT8):
            raise KernelArgumentError(_OP, f"a middle of {self.middle} belongs to integers")


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A matrix [out, in]; see the module."""

    layout: GroupedLayout
    words: torch.Tensor  # [out / 16, in / tile, 16, 16] int32
    scales: torch.Tensor  # [out / 16, groups, 16] bfloat16, float16 or float32
    zeros: torch.Tensor | None = None  # of the same shape, uint8
    minima: torch.Tensor | None = None  # of the same shape and one of the same types
    table: torch.Tensor | None = None  # [16], of the type that is computed with
    order: torch.Tensor | None = None  # [in] int64: which input each code is for

    def __post_init__(self) -> None:
        """Raises KernelArgumentError; here, because products would ask for every row of every layer."""
        layout, of_words = self.layout, (self.layout.num_tiles, TILE_OUTPUTS, WORDS)
        layout.check()
        check_tensor(_OP, "words", self.words, torch.int32, (layout.num_output_tiles, *of_words))
        of_groups = layout.num_output_tiles, layout.num_groups, TILE_OUTPUTS
        for name, numbers in (("scales", self.scales), ("minima", self.minima)):
            if numbers is not None:
                if numbers.dtype not in _FLOATS:
                    raise KernelArgumentError(_OP, f"{name} must be floats of 16 or 32 bits, not {numbers.dtype}")
                check_tensor(_OP, name, numbers, numbers.dtype, of_groups)
        if self.zeros is not None:
            check_tensor(_OP, "zeros", self.zeros, torch.uint8, of_groups)
        if (self.table is not None) != (layout.codes is Codes.TABLE):
            raise KernelArgumentError(_OP, "a table belongs to codes that are places in one, and only to them")
        if self.order is not None:
            check_tensor(_OP, "order", self.order, torch.int64, (layout.num_inputs,))

    @property
    def has_offsets(self) -> bool:
        """Whether products need the sums of x in each group."""
        return self.zeros is not None or self.minima is not None

    @property
    def is_plain(self) -> bool:
        """Whether a tile of words is in one group, without offsets."""
        return not self.has_offsets and self.layout.group >= min(self.layout.codes.tile_inputs, self.layout.num_inputs)

    def is_finite(self) -> torch.Tensor:
        """Whether all numbers are: one, on the device."""
        found = [each.isfinite().all() for each in self._tensors() if each.is_floating_point()]
        if self.layout.codes is Codes.FLOAT8:
            found.append(((self.words.view(torch.uint8) & 127) != 127).all())
        return torch.stack(found).all()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        tensors = (self.words, self.scales, self.zeros, self.minima, self.table, self.order)
        return [tensor for tensor in tensors if tensor is not None]


def new_grouped(
    layout: GroupedLayout,
    device: torch.device,
    scales_type: torch.dtype,
    *,
    has_zeros: bool = False,
    minima_type: torch.dtype | None = None,
    table: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> GroupedWeight:
    """A weight of zeros, for `pack_grouped` to write rows into.

    Raises KernelArgumentError for groups that kernels cannot have.
    """
    layout.check()
    of_groups = layout.num_output_tiles, layout.num_groups, TILE_OUTPUTS
    of_words = layout.num_output_tiles, layout.num_tiles, TILE_OUTPUTS, WORDS
    return GroupedWeight(
        layout,
        torch.zeros(of_words, dtype=torch.int32, device=device),
        torch.zeros(of_groups, dtype=scales_type, device=device),
        torch.zeros(of_groups, dtype=torch.uint8, device=device) if has_zeros else None,
        None if minima_type is None else torch.zeros(of_groups, dtype=minima_type, device=device),
        table,
        order,
    )


def pack_grouped(
    weight: GroupedWeight,
    places: slice | torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    minima: torch.Tensor | None = None,
) -> None:
    """Write some rows of a weight, on its device: rows of several matrices can be put one below the other.

    places: which rows. codes: [rows, in] uint8, or int8, which are less the middle; inputs in the order of the model.
    scales, zeros, minima: [rows, groups], of any types whose numbers those of the weight hold. Takes four times the
    codes' memory for a while.
    """
    layout = weight.layout
    rows = torch.arange(layout.num_outputs, device=codes.device)[places]
    tiles, within = rows // TILE_OUTPUTS, rows % TILE_OUTPUTS
    if codes.dtype == torch.int8:
        codes = codes.view(torch.uint8) + layout.middle
    if weight.order is not None:
        codes = codes[:, weight.order]
    num_tiles, num_bits = weight.words.shape[1], layout.codes.num_bits
    padded = torch.nn.functional.pad(codes, (0, num_tiles * layout.codes.tile_inputs - layout.num_inputs))
    planes = padded.view(codes.shape[0], num_tiles, 32 // num_bits, WORDS)
    words = planes[:, :, 0].int()
    for plane in range(1, planes.shape[2]):
        words |= planes[:, :, plane].int() << plane * num_bits
    weight.words[tiles, :, within] = words
    for to, numbers in ((weight.scales, scales), (weight.zeros, zeros), (weight.minima, minima)):
        if to is not None and numbers is not None:
            to[tiles, :, within] = numbers.to(to.dtype)


def unpack_grouped(weight: GroupedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [out, in], inputs in the order of the model, computed in `dtype`."""
    layout = weight.layout
    shifts = torch.arange(0, 32, layout.codes.num_bits, dtype=torch.int32, device=weight.words.device)
    planes = weight.words[:, :, :, None] >> shifts[:, None] & (1 << layout.codes.num_bits) - 1
    codes = planes.permute(0, 2, 1, 3, 4).flatten(2).flatten(0, 1)[: layout.num_outputs, : layout.num_inputs]
    numbers = _numbers(codes, weight, dtype)
    groups = torch.arange(layout.num_inputs, device=codes.device) // layout.group

    def spread(of_groups: torch.Tensor) -> torch.Tensor:
        return of_groups.transpose(1, 2).flatten(0, 1)[: layout.num_outputs, groups].to(dtype)

    numbers -= layout.middle if weight.zeros is None else spread(weight.zeros)
    numbers *= spread(weight.scales)
    if weight.minima is not None:
        numbers += spread(weight.minima)
    return numbers if weight.order is None else torch.empty_like(numbers).index_copy_(1, weight.order, numbers)


def _numbers(codes: torch.Tensor, weight: GroupedWeight, dtype: torch.dtype) -> torch.Tensor:
    if weight.table is not None:
        return weight.table.to(dtype)[codes]
    if weight.layout.codes is Codes.FLOAT8:
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    return codes.to(dtype)

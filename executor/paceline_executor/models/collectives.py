"""What ranks that share a model's layers do together: add up their parts of a product, and tell each other of logits.

Apart from the models, so that these know neither processes nor links.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.nn import functional

from paceline_executor.models.layers import DenseLinear, LayerReader, Linear
from paceline_executor.weights.sharded import scored_by
from paceline_executor.weights.shares import own_slices
from paceline_kernels.linear import Splits, unrounded_linear


class Collectives(Protocol):
    """Every rank calls the same ones in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def degree(self) -> int: ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Returns all ranks' parts, of one shape, by rank: [degree, *shape], new."""
        ...

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' parts, of one shape: of float32 as `sum_of_slices` makes it, of 16 bits in
        any order, rounded by each addition. It may be the part itself.
        """
        ...


@dataclass(frozen=True, slots=True)
class UnsummedLinear:
    """One rank's part of a matrix whose columns the ranks share.

    With Splits.FIXED, where weights are dense, it is not rounded before it is summed, so that the bits are those of one
    rank.
    """

    part: Linear  # without a bias

    @property
    def num_bytes(self) -> int:
        return self.part.num_bytes

    def __call__(self, x: torch.Tensor, splits: Splits) -> torch.Tensor:
        if splits is Splits.FIXED and isinstance(self.part, DenseLinear):
            return unrounded_linear(x, self.part.weight, self.part.slices)
        return self.part(x, splits)


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """The sum of the ranks' parts. The bias is the whole one's, added once."""

    part: UnsummedLinear
    bias: torch.Tensor | None
    collectives: Collectives

    @property
    def num_bytes(self) -> int:
        return self.part.num_bytes

    def __call__(self, x: torch.Tensor, splits: Splits) -> torch.Tensor:
        total = self.collectives.sum(self.part(x, splits))
        if self.bias is not None:
            total = total.add_(self.bias)
        return total.to(x.dtype)


@dataclass(frozen=True, slots=True)
class GatheredLinear:
    """Of the output matrix, whose rows the ranks share: logits of all tokens, for kernels that draw from all."""

    part: Linear
    vocab_size: int
    collectives: Collectives

    @property
    def num_bytes(self) -> int:
        return self.part.num_bytes

    def __call__(self, x: torch.Tensor, splits: Splits) -> torch.Tensor:
        part, degree = self.part(x, splits), self.collectives.degree
        sizes = [len(scored_by(rank, degree, self.vocab_size)) for rank in range(degree)]
        parts = self.collectives.gather(functional.pad(part, (0, max(sizes) - part.shape[1])))
        return torch.cat([one[:, :size] for one, size in zip(parts, sizes, strict=True)], dim=1)


def summed(reader: LayerReader, parts: tuple[str, ...], collectives: Collectives | None) -> Linear:
    """None: one rank has the whole matrix."""
    if collectives is None:
        return reader.linear(*parts)
    part = reader.weights.linear(reader.names(*parts))
    if isinstance(part, DenseLinear):
        part = replace(part, slices=own_slices(reader.weights.config))
    return SummedLinear(UnsummedLinear(part), reader.bias(*parts), collectives)

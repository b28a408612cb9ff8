"""What ranks that share a model's layers do together: add up their parts of a product.

Apart from the models, so that these know neither processes nor links.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline_executor.models.layers import LayerReader, Linear
from paceline_kernels.linear import Splits


class Collectives(Protocol):
    """Every rank calls the same ones in the same order."""

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' parts, of one shape: new, and the same bits on each of them."""
        ...


def add_up(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In one order, that of the ranks: neighbours first, then neighbouring sums. Returns a new tensor."""
    sums = list(parts)
    while len(sums) > 1:
        pairs = [sums[place] + sums[place + 1] for place in range(0, len(sums) - 1, 2)]
        sums = pairs + sums[2 * len(pairs) :]
    return sums[0]


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """Of a matrix whose columns the ranks share. The bias is the whole one's, added once."""

    part: Linear  # without a bias
    bias: torch.Tensor | None
    collectives: Collectives

    @property
    def num_bytes(self) -> int:
        return self.part.num_bytes

    def __call__(self, x: torch.Tensor, splits: Splits) -> torch.Tensor:
        total = self.collectives.sum(self.part(x, splits))
        return total if self.bias is None else total.add_(self.bias)


def summed(reader: LayerReader, parts: tuple[str, ...], collectives: Collectives | None) -> Linear:
    """None: one rank has the whole matrix."""
    if collectives is None:
        return reader.linear(*parts)
    return SummedLinear(reader.weights.linear(reader.names(*parts)), reader.bias(*parts), collectives)

"""What ranks that share a model's layers do together: add up their parts of a product, and tell each other of logits.

Apart from the models, so that these know neither processes nor links.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from paceline_executor.models.layers import DenseLinear, LayerReader, Linear, num_slices
from paceline_kernels.linear import Splits


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
        """Returns what `sum_of_slices` makes of all ranks' parts, of one shape: new."""
        ...


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
    part, config, degree = reader.weights.linear(reader.names(*parts)), reader.weights.config, collectives.degree
    if isinstance(part, DenseLinear):
        num_heads, intermediate_size = config.num_heads * degree, config.intermediate_size * degree
        whole = replace(config, num_heads=num_heads, intermediate_size=intermediate_size)
        part = replace(part, slices=max(1, num_slices(whole) // degree))
    return SummedLinear(part, reader.bias(*parts), collectives)

"""Where tokens go. Apart from the operations, which import their backends: these make and take it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Routes:
    """Where tokens go, in the order of their choice: the largest score first."""

    experts: torch.Tensor  # [num_tokens, top_k] int32, of one token no two alike
    weights: torch.Tensor  # [num_tokens, top_k] float32


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """How a token's sum is divided, so that ranks may share it with the same bits: by slices or by groups.

    Each part's sum is in the order of the choice; parts are added as `sum_of_slices` does. A GPU divides sums of floats
    with Splits.FIXED alone.
    """

    slices: int = 1  # of the intermediate size of each expert, of equal length
    groups: int = 1  # of whole experts, as many in each; slices or groups are 1
    first_expert: int = 0  # whose matrices come first; a choice of an expert without matrices adds nothing
    num_experts: int | None = None  # that tokens choose from, where it is not those with matrices


WHOLE = ExpertParts()

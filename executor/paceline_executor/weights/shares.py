"""What ranks share of a model, and in how many parts a layer's sums are made.

Of the model alone, so that no result depends on the ranks. Refuses to know which rank has what.
"""

from collections.abc import Iterable, Mapping

from paceline_executor.weights.checkpoint import ModelConfig

_WIDE = 256  # narrower slices of experts make slow products


def num_slices(config: ModelConfig) -> int:
    """The parts of the sums over a layer's heads, intermediate sizes and experts: as many as the most ranks that could
    share them out with the same bits.

    Each has whole heads, and a subtree of `sum_of_slices`. config: of the model or of one rank's part of it.
    """
    config = config.whole or config
    return _num_parts(config, shared_sizes(config).values())


def own_slices(config: ModelConfig) -> int:
    """Those of one rank's part."""
    degree = 1 if config.whole is None else config.whole.num_heads // config.num_heads
    return max(1, num_slices(config) // degree)


def shares_whole_experts(config: ModelConfig) -> bool:
    """Whether a part of a mixture's sum is that of some experts, because slices of all of them would be narrow."""
    config = config.whole or config
    experts = config.experts
    if experts is None:
        return False
    return experts.intermediate_size // _num_parts(config, _sizes(config, by_experts=False).values()) < _WIDE


def shared_sizes(config: ModelConfig) -> Mapping[str, int]:
    """What the number of ranks has to divide beside the heads: in words -> how many."""
    return _sizes(config, by_experts=shares_whole_experts(config))


def _sizes(config: ModelConfig, *, by_experts: bool) -> Mapping[str, int]:
    experts, sizes = config.experts, dict[str, int]()
    if experts is None or not all(experts.sparse_layers):
        sizes[f"gates and ups of {config.intermediate_size} outputs"] = config.intermediate_size
    if experts is not None and by_experts:
        sizes[f"{experts.routing.num_experts} experts"] = experts.routing.num_experts
    elif experts is not None:
        sizes[f"experts' gates and ups of {experts.intermediate_size} outputs"] = experts.intermediate_size
    if experts is not None and experts.shared_intermediate_size:
        size = experts.shared_intermediate_size
        sizes[f"a shared expert's of {size} outputs"] = size
    return sizes


def _num_parts(config: ModelConfig, sizes: Iterable[int]) -> int:
    divided = config.num_heads, *sizes
    return next(count for count in (8, 4, 2, 7, 5, 3, 1) if not any(size % count for size in divided))

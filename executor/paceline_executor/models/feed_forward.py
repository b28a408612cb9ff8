"""The two kinds of feed-forward network that a layer may have: one for all tokens, or a mixture of experts.

Knows the order of operations. Refuses to know how they are computed.
"""

from dataclasses import dataclass

import torch

from paceline_executor.models.collectives import Collectives, UnsummedLinear, summed
from paceline_executor.models.layers import (
    DOWN,
    GATE_UP,
    ExpertWeights,
    LayerReader,
    Linear,
    UnroundedLinear,
    bytes_of,
    gated_linear,
    normalised_linear,
)
from paceline_executor.weights.shares import own_slices, shares_whole_experts
from paceline_kernels.activation import Gate
from paceline_kernels.experts import ExpertParts, gated_experts, route
from paceline_kernels.linear import Splits
from paceline_kernels.rms_norm import rms_norm
from paceline_kernels.routing import Routing, Score

# A sigmoid as `route` takes it: on a CPU torch's has other bits in other batches.
_SHARED = Routing(num_experts=1, top_k=1, score=Score.SIGMOID, renormalises=False)


@dataclass(frozen=True, slots=True)
class GatedFeedForward:
    gate: Gate
    gate_up: Linear  # hidden -> 2 * intermediate: gates, then what they gate
    down: Linear  # intermediate -> hidden

    @property
    def num_bytes(self) -> int:
        """Of its matrices."""
        return self.gate_up.num_bytes + self.down.num_bytes

    def __call__(
        self, x: torch.Tensor, norm: torch.Tensor, eps: float, splits: Splits, stream: torch.Tensor
    ) -> torch.Tensor:
        """x is added to the stream, in place, and what goes through the network is their sum, normalised.

        x, stream: [num_tokens, hidden]. norm: [hidden]. Returns [num_tokens, hidden], new.
        """
        return self.of(normalised_linear(self.gate_up, x, norm, eps, splits, stream), splits)

    def of(self, gate_up: torch.Tensor, splits: Splits) -> torch.Tensor:
        """Takes the gates, and what they gate."""
        return gated_linear(self.down, gate_up, self.gate, splits)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """All tokens go through it."""

    network: GatedFeedForward
    share: UnroundedLinear | None  # hidden -> 1: its sigmoid multiplies what the network returns

    @property
    def num_bytes(self) -> int:
        return self.network.num_bytes + (0 if self.share is None else self.share.num_bytes)

    def __call__(self, x: torch.Tensor, splits: Splits) -> torch.Tensor:
        return self.network.of(self.network.gate_up(x, splits), splits)

    def weighted(self, fed: torch.Tensor, x: torch.Tensor, splits: Splits) -> torch.Tensor:
        """fed: what the network returns of x; of ranks, their sum."""
        return fed if self.share is None else fed * route(self.share(x, splits), _SHARED).weights


@dataclass(frozen=True, slots=True)
class MixtureFeedForward:
    """See GatedFeedForward."""

    gate: Gate
    routing: Routing
    router: UnroundedLinear  # hidden -> num_experts
    bias: torch.Tensor | None  # [num_experts] float32, of the choice
    gate_up: ExpertWeights  # [num_experts, 2 * intermediate, hidden]
    down: ExpertWeights  # [num_experts, hidden, intermediate]
    parts: ExpertParts
    shared: SharedExpert | None
    collectives: Collectives | None = None  # of ranks, each with some of the experts or a part of each

    @property
    def num_bytes(self) -> int:
        shared = 0 if self.shared is None else self.shared.num_bytes
        return self.router.num_bytes + bytes_of(self.gate_up) + bytes_of(self.down) + shared

    def __call__(
        self, x: torch.Tensor, norm: torch.Tensor, eps: float, splits: Splits, stream: torch.Tensor
    ) -> torch.Tensor:
        x = rms_norm(x, norm, eps, residual=stream)
        routes = route(self.router(x, splits), self.routing, self.bias)
        # What ranks add up is not rounded before, where bits are to be those of one rank.
        dtype = torch.float32 if self.collectives is not None and splits is Splits.FIXED else None
        matrices = self.gate_up, self.down, self.gate
        fed = [gated_experts(x, routes, *matrices, splits=splits, parts=self.parts, dtype=dtype)]
        if self.shared is not None:
            fed.append(self.shared(x, splits))
        if self.collectives is not None:  # of all ranks' in one go, before a weight that every rank has is applied
            fed = list(self.collectives.sum(torch.cat(fed)).to(x.dtype).chunk(len(fed)))
        # In place: the product with a float32 weight would be float32, too.
        return fed[0] if self.shared is None else fed[0].add_(self.shared.weighted(fed[1], x, splits))


def read_feed_forward(
    reader: LayerReader, gate: Gate, collectives: Collectives | None
) -> GatedFeedForward | MixtureFeedForward:
    """collectives: of ranks. Raises ModelCorruptError."""
    config = reader.weights.config
    experts = config.experts
    if experts is None or not experts.sparse_layers[reader.layer]:
        return GatedFeedForward(gate, reader.linear(*GATE_UP), summed(reader, DOWN, collectives))
    routing, num_parts = experts.routing, own_slices(config)
    parts = ExpertParts(num_parts)
    if shares_whole_experts(config):
        first = 0 if experts.held is None else experts.held.start
        parts = ExpertParts(groups=num_parts, first_expert=first, num_experts=routing.num_experts)
    gate_up, down = reader.weights.experts(reader.layer)
    return MixtureFeedForward(
        gate=gate,
        routing=routing,
        router=reader.unrounded_linear("mlp.gate"),
        bias=reader.vector("mlp.gate.e_score_correction_bias") if routing.has_bias else None,
        gate_up=gate_up,
        down=down,
        parts=parts,
        shared=_shared(reader, gate, collectives) if experts.shared_intermediate_size else None,
        collectives=collectives,
    )


def _shared(reader: LayerReader, gate: Gate, collectives: Collectives | None) -> SharedExpert:
    gate_up, down = (
        reader.linear(*(part.replace("mlp", "mlp.shared_expert") for part in parts)) for parts in (GATE_UP, DOWN)
    )
    experts = reader.weights.config.experts
    has_gate = experts is not None and experts.has_shared_gate
    network = GatedFeedForward(gate, gate_up, down if collectives is None else UnsummedLinear(down))
    return SharedExpert(network, reader.unrounded_linear("mlp.shared_expert_gate") if has_gate else None)

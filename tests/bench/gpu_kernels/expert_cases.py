"""Mixtures of experts of the size of real ones: a layer's networks, and the choice before. Knows no whole step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from gpu_kernels.case import Bound, Case, Place, Scale, Work, compared, mismatch_of, type_name
from gpu_kernels.product_cases import W4A16, Grouped
from paceline_kernels.activation import Gate
from paceline_kernels.experts import Routes, ScaledWeight
from paceline_kernels.experts import reference as experts_reference
from paceline_kernels.experts.triton import gated_experts, route
from paceline_kernels.gpu.splits import Splits
from paceline_kernels.grouped_linear import GroupedWeight, unpack_grouped
from paceline_kernels.routing import Routing, Score
from paceline_kernels.scaled_linear import quantize_rows

_Weight = torch.Tensor | ScaledWeight | GroupedWeight
_FP8 = torch.float8_e4m3fn
_COPY_TBPS = 4.2  # of an H200, for predictions
_FROM_MANY = 1024  # tokens, from which on products decide and not the read of weights


@dataclass(frozen=True, slots=True)
class Mixture:
    """Sizes of a model's layer."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def numbers_of_expert(self) -> int:
        return 3 * self.hidden * self.intermediate

    def experts_touched(self, num_tokens: int) -> float:
        """On average, of tokens that choose at random."""
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)


QWEN3_30B = Mixture("30B-A3B", 128, 8, 2048, 768)
MIXTRAL_8X7B = Mixture("8x7B", 8, 2, 4096, 14_336)
OLMOE = Mixture("OLMoE", 64, 8, 2048, 1024)
_TINY = Mixture("tiny", 6, 2, 100, 36)
# Of a step of 48 layers of 30B-A3B in bfloat16 at a context of 512, in ms by tokens: its bytes at that rate.
_STEP_FLOORS = {1: 1.46, 8: 6.25, 32: 13.0, 256: 17.5}


def cases(scale: Scale, place: Place) -> Iterator[Case]:
    if scale is Scale.ODD:
        yield route_case(place, 3, Routing(12, 3, Score.SIGMOID, has_bias=True, num_groups=4, top_groups=2))
        for num_tokens, splits in ((1, Splits.EVEN), (5, Splits.EVEN), (5, Splits.FIXED)):
            yield experts_case(place, num_tokens, _TINY, place.dtype, splits)
        yield from (experts_case(place, 5, _TINY, kind) for kind in (torch.int8, W4A16))
        return
    yield from (experts_case(place, num_tokens, QWEN3_30B, place.dtype) for num_tokens in (*_STEP_FLOORS, 2048))
    yield from (experts_case(place, num_tokens, MIXTRAL_8X7B, _FP8) for num_tokens in (1, 8, 32, 256))
    yield from (experts_case(place, num_tokens, QWEN3_30B, place.dtype, Splits.FIXED) for num_tokens in (1, 32))
    yield route_case(place, 256, Routing(QWEN3_30B.num_experts, QWEN3_30B.top_k))
    if scale is Scale.FULL:
        for num_tokens in (8, 32, 2048):
            yield from (experts_case(place, num_tokens, QWEN3_30B, kind) for kind in (_FP8, W4A16))
        yield from (experts_case(place, num_tokens, OLMOE, place.dtype) for num_tokens in (1, 32, 2048))
        yield route_case(place, 2048, Routing(256, 8, Score.SIGMOID, has_bias=True, num_groups=8, top_groups=4))


def route_case(place: Place, num_tokens: int, routing: Routing) -> Case:
    def build(seed: int) -> Work:
        # Of few different numbers, so that there are ties, none of which may be a matter of rounding.
        logits = place.integers(16, num_tokens, routing.num_experts, seed=seed).float() / 4
        bias = place.integers(4, routing.num_experts, seed=seed + 1).float() if routing.has_bias else None

        def mismatch(found: Routes) -> float:
            cpu_bias = None if bias is None else bias.cpu()
            expected = experts_reference.route(logits.cpu(), routing, cpu_bias)
            far = (found.weights.cpu() - expected.weights).abs().max().item()
            return mismatch_of((found.experts, expected.experts)) + far

        ours = partial(route, logits, routing, bias)
        return Work(ours, None, lambda way: mismatch(way(ours)))

    return Case(
        op="route",
        shape={"t": num_tokens, "e": routing.num_experts, "k": routing.top_k, "score": routing.score.value},
        build=build,
        num_bytes=num_tokens * (routing.num_experts * 4 + 8 * routing.top_k),
        allowed_error=1e-5,
    )


def experts_case(
    place: Place, num_tokens: int, mixture: Mixture, kind: torch.dtype | Grouped, splits: Splits = Splits.EVEN
) -> Case:
    """Tokens that choose at random, all with experts of their own. kind: of the weights."""
    gate_up_shape = mixture.num_experts, 2 * mixture.intermediate, mixture.hidden
    down_shape = mixture.num_experts, mixture.hidden, mixture.intermediate

    def build(seed: int) -> Work:
        x, logits = (place.normal(num_tokens, size, seed=seed) for size in (mixture.hidden, mixture.num_experts))
        routes = route(logits.float(), Routing(mixture.num_experts, mixture.top_k), None)
        gate_up, down = _weight(place, gate_up_shape, kind, seed + 2), _weight(place, down_shape, kind, seed + 3)
        return compared(
            lambda: gated_experts(x, routes, gate_up, down, Gate.SILU, splits),
            lambda: _expected(x, routes, _matrices(gate_up, gate_up_shape), _matrices(down, down_shape)),
        )

    bytes_per_number = kind.itemsize if isinstance(kind, torch.dtype) else kind.codes.num_bits / 8 + 2 / kind.group
    touched_bytes = mixture.experts_touched(num_tokens) * mixture.numbers_of_expert * bytes_per_number
    predicted = f"{touched_bytes / _COPY_TBPS / 1e6:.1f} us by its bytes"
    if mixture is QWEN3_30B and kind == place.dtype and num_tokens in _STEP_FLOORS:
        predicted += f", a step {_STEP_FLOORS[num_tokens]:g} ms"
    weight_name = type_name(kind) if isinstance(kind, torch.dtype) else str(kind)
    return Case(
        op="experts",
        shape={
            "t": num_tokens,
            "model": mixture.name,
            "weight": weight_name,
            **({"splits": splits.value} if splits is Splits.FIXED else {}),
        },
        bound=Bound.MEMORY if num_tokens < _FROM_MANY else Bound.PRODUCTS,
        num_bytes=round(touched_bytes) + 2 * num_tokens * mixture.hidden * place.dtype.itemsize,
        num_flops=2 * num_tokens * mixture.top_k * mixture.numbers_of_expert,
        build=build,
        allowed_error=2 * place.rounding,  # numbers are rounded between both products, too
        predicted=predicted,
    )


def _weight(place: Place, shape: tuple[int, int, int], kind: torch.dtype | Grouped, seed: int) -> _Weight:
    """Of about unit gain."""
    if isinstance(kind, Grouped):
        return kind.weight(place, shape[0] * shape[1], shape[2], seed)
    weight = place.normal(*shape, seed=seed)
    weight /= shape[2] ** 0.5
    if kind == place.dtype:
        return weight
    rows = quantize_rows(weight.flatten(0, 1), kind)
    return ScaledWeight(rows.values.view(shape), rows.scales.view(shape[:2]))


def _matrices(weight: _Weight, shape: tuple[int, int, int]) -> Callable[[int], torch.Tensor]:
    """What finds the matrix of an expert, in float64."""
    if isinstance(weight, torch.Tensor):
        return lambda expert: weight[expert].double()
    if isinstance(weight, ScaledWeight):
        return lambda expert: weight.values[expert].double() * weight.scales[expert, :, None]
    matrices = unpack_grouped(weight, torch.float32).view(shape)
    return lambda expert: matrices[expert].double()


def _expected(
    x: torch.Tensor, routes: Routes, gate_up: Callable[[int], torch.Tensor], down: Callable[[int], torch.Tensor]
) -> torch.Tensor:
    """In float64, expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in sorted({*routes.experts.flatten().tolist()}):
        tokens, choices = torch.nonzero(routes.experts == expert, as_tuple=True)
        gates, ups = functional.linear(x[tokens].double(), gate_up(expert)).chunk(2, dim=1)
        made = functional.linear(functional.silu(gates) * ups, down(expert))
        out[tokens] += made * routes.weights[tokens, choices, None].double()
    return out

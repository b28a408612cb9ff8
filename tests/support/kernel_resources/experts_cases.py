"""How the kernels of mixtures are launched, at the sizes of three models: each line of the launch table and kind of
weights, for both products apart, because one kernel multiplies in both.
"""

from collections.abc import Iterator
from functools import partial

import torch

from gpu_kernels.case import Place
from gpu_kernels.expert_cases import MIXTRAL_8X7B, OLMOE, QWEN3_30B, Mixture
from gpu_kernels.product_cases import BLOCKS, FORMS, W4A16, Grouped
from kernel_resources.case import Case, meta, type_name
from paceline_kernels.activation import Gate
from paceline_kernels.experts import ExpertParts, Routes, route
from paceline_kernels.experts.triton import apart
from paceline_kernels.experts.triton.combining import combine
from paceline_kernels.experts.triton.few_slots import launch_few_slots
from paceline_kernels.experts.triton.grouping import SlotTiles, group
from paceline_kernels.experts.triton.groups import launch_expert_groups
from paceline_kernels.experts.triton.launches import FEW_SLOTS, FIXED, TILES, ExpertsLaunch, group_tiles_launch
from paceline_kernels.experts.triton.tiles import launch_expert_tiles
from paceline_kernels.gpu.architecture import Architecture
from paceline_kernels.routing import Routing, Score
from paceline_kernels.scaled_linear import ScaledWeight

_BFLOAT16, _INT8, _FP8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
_MODELS = (QWEN3_30B, MIXTRAL_8X7B, OLMOE)
_SMALLEST = Mixture("smallest", 2, 1, 1, 1)  # Triton makes constants of sizes that are 1
_TOKENS = 256


def cases(architecture: Architecture, *, has_fp8: bool) -> Iterator[Case]:
    yield from _routes()
    for model in _MODELS:
        routes, products = _routes_of(model, _TOKENS), meta(_TOKENS * model.top_k, model.hidden)
        yield Case(f"experts {model.name} group", partial(group, routes.experts, model.num_experts, 64))
        yield Case(f"experts {model.name} combine", partial(combine, products, routes, model.num_experts))
    types = (_BFLOAT16, _INT8, _FP8) if has_fp8 else (_BFLOAT16, _INT8)
    for dtype in types:
        yield from _few_slots(QWEN3_30B, dtype)
        for up_to, launch in TILES[architecture, dtype.itemsize].items():
            yield from _tiles(QWEN3_30B, dtype, Gate.SILU, min(up_to, 256), launch)
    for form in FORMS:
        for slots_per_expert in (8, 64):
            yield from _groups(QWEN3_30B, form, slots_per_expert, architecture)
    for model in (MIXTRAL_8X7B, OLMOE):
        *_, launch = TILES[architecture, _BFLOAT16.itemsize].values()
        yield from _tiles(model, _BFLOAT16, Gate.GELU_TANH, 256, launch)
    for model, parts in ((QWEN3_30B, ExpertParts(groups=8)), (MIXTRAL_8X7B, ExpertParts(slices=8))):
        yield from _divided(model, parts, architecture)
    yield from _few_slots(_SMALLEST, _BFLOAT16)
    yield from _tiles(_SMALLEST, _BFLOAT16, Gate.SILU, 8, TILES[architecture, _BFLOAT16.itemsize][8])


def _routes() -> Iterator[Case]:
    bias = meta(256, dtype=torch.float32)
    of_groups = Routing(256, 8, Score.SIGMOID, scaling=2.5, has_bias=True, num_groups=8, top_groups=4)
    yield Case("route 256 in groups", partial(route, _logits(256), of_groups, bias))
    yield Case("route 512", partial(route, _logits(512), Routing(512, 10)))
    yield Case("route a shared gate", partial(route, _logits(1), Routing(1, 1, Score.SIGMOID, renormalises=False)))
    yield Case("route 32 of chosen", partial(route, _logits(32), Routing(32, 4, Score.SOFTMAX_OF_CHOSEN)))
    for model in (*_MODELS, _SMALLEST):
        routing = Routing(model.num_experts, model.top_k, renormalises=model is not OLMOE)
        yield Case(f"route {model.name}", partial(route, _logits(model.num_experts), routing))


def _logits(num_experts: int) -> torch.Tensor:
    return meta(_TOKENS, num_experts, dtype=torch.float32)


def _few_slots(model: Mixture, dtype: torch.dtype) -> Iterator[Case]:
    x, gated, experts = meta(1, model.hidden), meta(model.top_k, model.intermediate), _routes_of(model, 1).experts
    gate_up, down = map(apart, _weights(model, dtype))
    name = f"experts {model.name} one token {type_name(dtype)}"
    of_gate_up, of_down = (x, *gate_up, experts, Gate.SILU, FEW_SLOTS), (gated, *down, experts, None, FEW_SLOTS)
    yield Case(f"{name} gate up", partial(launch_few_slots, *of_gate_up))
    yield Case(f"{name} down", partial(launch_few_slots, *of_down))


def _tiles(
    model: Mixture, dtype: torch.dtype, gate: Gate, slots_per_expert: int, launch: ExpertsLaunch
) -> Iterator[Case]:
    num_tokens, size = slots_per_expert * model.num_experts // model.top_k, launch.gate_up.tokens
    num_slots = num_tokens * model.top_k
    tiles = _slot_tiles(num_slots, model, size)
    name = f"experts {model.name} {slots_per_expert} {type_name(dtype)}"
    (values, scales), (down, down_scales) = map(apart, _weights(model, dtype))
    x, gated = meta(num_tokens, model.hidden), meta(num_slots, model.intermediate)
    of_gate_up = x, values, scales, tiles, num_slots, gate, launch.gate_up
    of_down = gated, down, down_scales, tiles, num_slots, None, launch.down
    yield Case(f"{name} gate up", partial(launch_expert_tiles, *of_gate_up))
    yield Case(f"{name} down", partial(launch_expert_tiles, *of_down))


def _groups(model: Mixture, form: Grouped, slots_per_expert: int, architecture: Architecture) -> Iterator[Case]:
    num_slots = slots_per_expert * model.num_experts
    place, is_plain = Place(meta(1).device, _BFLOAT16), form in (W4A16, BLOCKS)
    launch = group_tiles_launch(architecture, num_slots, model.num_experts, is_plain=is_plain, is_fixed=False)
    gate_up = form.weight(place, 2 * model.num_experts * model.intermediate, model.hidden, 0)
    down = form.weight(place, model.num_experts * model.hidden, model.intermediate, 0)
    x, gated = meta(num_slots // model.top_k, model.hidden), meta(num_slots, model.intermediate)
    tiles, name = _slot_tiles(num_slots, model, launch.tokens), f"experts {model.name} {slots_per_expert} {form}"
    of_gate_up = x, gate_up, tiles, num_slots, Gate.SILU, model.intermediate, launch
    of_down = gated, down, tiles, num_slots, None, model.hidden, launch
    yield Case(f"{name} gate up", partial(launch_expert_groups, *of_gate_up))
    yield Case(f"{name} down", partial(launch_expert_groups, *of_down))


def _divided(model: Mixture, parts: ExpertParts, architecture: Architecture) -> Iterator[Case]:
    """With fixed splits, as ranks share it."""
    launch, num_slots = TILES[architecture, _BFLOAT16.itemsize][FIXED].down, _TOKENS * model.top_k
    gated, (_, down) = meta(num_slots, model.intermediate), _weights(model, _BFLOAT16)
    tiles, name = _slot_tiles(num_slots, model, launch.tokens), f"experts {model.name} divided"
    if parts.slices > 1:
        of_down = gated, *apart(down), tiles, num_slots, None, launch, parts.slices
        yield Case(f"{name} down", partial(launch_expert_tiles, *of_down))
    products, routes = meta(parts.slices * num_slots, model.hidden), _routes_of(model, _TOKENS)
    yield Case(f"{name} combine", partial(combine, products, routes, model.num_experts, parts, torch.float32))


def _slot_tiles(num_slots: int, model: Mixture, size: int) -> SlotTiles:
    words, max_tiles = partial(meta, dtype=torch.int32), num_slots // size + model.num_experts
    return SlotTiles(words(max_tiles * size), words(max_tiles), words(1), size)


def _routes_of(model: Mixture, num_tokens: int) -> Routes:
    shape = num_tokens, model.top_k
    return Routes(meta(*shape, dtype=torch.int32), meta(*shape, dtype=torch.float32))


def _weights(model: Mixture, dtype: torch.dtype) -> tuple[torch.Tensor | ScaledWeight, torch.Tensor | ScaledWeight]:
    shapes = (
        (model.num_experts, 2 * model.intermediate, model.hidden),
        (model.num_experts, model.hidden, model.intermediate),
    )
    gate_up, down = (meta(*shape, dtype=dtype) for shape in shapes)
    if dtype == _BFLOAT16:
        return gate_up, down
    scales = (meta(*shape[:2], dtype=torch.float32) for shape in shapes)
    return ScaledWeight(gate_up, next(scales)), ScaledWeight(down, next(scales))

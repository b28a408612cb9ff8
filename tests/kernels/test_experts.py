"""route and gated_experts: right against float64, and the same bits for a token whatever stands around it."""

import math

import pytest
import torch

from kernel_rig.tensors import int32, normal, placed
from paceline_kernels.activation import Gate
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.experts import Routes, ScaledWeight, Splits, gated_experts, reference, route
from paceline_kernels.grouped_linear import Codes, GroupedLayout, new_grouped, pack_grouped, unpack_grouped
from paceline_kernels.routing import Routing, Score
from paceline_kernels.scaled_linear import quantize_rows

slow = pytest.mark.slow
NAN, INFINITY = float("nan"), float("inf")
SIGMOID, OF_CHOSEN = Score.SIGMOID, Score.SOFTMAX_OF_CHOSEN
GROUPED = Routing(12, 3, SIGMOID, scaling=2.5, has_bias=True, num_groups=4, top_groups=2)
ROUTINGS = [
    Routing(7, 1, scaling=1.5),
    Routing(1, 1, SIGMOID, renormalises=False),
    Routing(5, 5, renormalises=False),
    Routing(9, 2, OF_CHOSEN, renormalises=False),
    GROUPED,
    *(
        pytest.param(routing, marks=slow)
        for routing in (
            Routing(9, 3, OF_CHOSEN),
            Routing(9, 9, SIGMOID, renormalises=False),
            Routing(9, 4, has_bias=True),
            Routing(8, 2, SIGMOID, num_groups=8, top_groups=3),
            Routing(8, 2, num_groups=2, top_groups=2),
            Routing(160, 6, renormalises=False, scaling=16.0, num_groups=8, top_groups=3),
            Routing(512, 10),
        )
    ),
]
# (tokens, hidden, intermediate, experts, top_k), of which few slots, and tiles of one slot and of several are there.
SHAPES = [
    (1, 40, 24, 6, 2),
    (9, 33, 19, 5, 3),
    *(pytest.param(shape, marks=slow) for shape in ((1, 1, 1, 2, 1), (3, 600, 130, 20, 3), (140, 65, 70, 3, 3))),
    pytest.param((2049, 24, 20, 4, 2), marks=slow),
]
SPLITS = pytest.mark.parametrize("splits", Splits)
INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
# Of results of about 1: what is rounded to 16 bits is so up to three times.
ROUNDING = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 3e-6}


def random_logits(num_tokens, routing):
    """(logits with ties, the bias of the routing): other scores are apart by more than rounding may change."""
    logits = (normal(num_tokens, routing.num_experts, seed=5) * 4).round() / 4
    return logits, normal(routing.num_experts, seed=6) if routing.has_bias else None


def optionally(place, tensor):
    return None if tensor is None else place(tensor)


def problem(shape, dtype):
    """(x, routes at random, gate_up and down of unit gain)."""
    num_tokens, hidden, intermediate, num_experts, top_k = shape
    routes = reference.route(normal(num_tokens, num_experts, seed=1), Routing(num_experts, top_k))
    gate_up = normal(num_experts, 2 * intermediate, hidden, seed=2) / hidden**0.5
    down = normal(num_experts, hidden, intermediate, seed=3) / intermediate**0.5
    return normal(num_tokens, hidden).to(dtype), routes, gate_up.to(dtype), down.to(dtype)


def chosen(*experts, weights=None):
    """Routes of tokens that choose these experts, with a weight of 1 each if nothing else is said."""
    experts = torch.tensor(experts, dtype=torch.int32)
    return Routes(experts, torch.ones(experts.shape) if weights is None else torch.tensor(weights))


def assert_close(ours, expected):
    bound = ROUNDING[ours.dtype]
    torch.testing.assert_close(ours.cpu().float(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_routes_equal_the_reference(place, routing):
    """Also where scores are equal."""
    logits, bias = random_logits(5, routing)
    ours, expected = route(place(logits), routing, optionally(place, bias)), reference.route(logits, routing, bias)
    assert torch.equal(ours.experts.cpu(), expected.experts)
    torch.testing.assert_close(ours.weights.cpu(), expected.weights, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("routing", [Routing(6, 3), Routing(6, 6, OF_CHOSEN), Routing(6, 2, SIGMOID, num_groups=3)])
def test_of_equal_scores_the_lowest_number_is_chosen(place, routing):
    ours = route(place(torch.zeros(2, 6)), routing)
    assert ours.experts.tolist() == [list(range(routing.top_k))] * 2


@pytest.mark.parametrize("routing", [Routing(12, 3), Routing(12, 3, OF_CHOSEN), GROUPED], ids=str)
def test_nan_among_its_logits_makes_the_weights_of_a_token_nan_and_no_other_ones(place, routing):
    logits, bias = random_logits(3, routing)
    bias = optionally(place, bias)
    clean = route(place(logits), routing, bias)
    logits[1, 4] = NAN
    ours = route(place(logits), routing, bias)
    assert ours.weights[1].isnan().all()
    assert len({*ours.experts[1].tolist()} & {*range(12)}) == 3
    for found, expected in ((ours.experts, clean.experts), (ours.weights, clean.weights)):
        assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_infinite_logits_are_the_limits_of_finite_ones(place):
    """A softmax over infinity is none, hence NaN."""
    logits = place(torch.tensor([[-INFINITY, 1.0, -INFINITY, 1.0], [-INFINITY, INFINITY, 0.0, 2.0]]))
    of_all, of_sigmoid = (route(logits, Routing(4, 3, score)) for score in (Score.SOFTMAX, SIGMOID))
    assert of_all.experts[0].tolist() == [1, 3, 0]
    assert of_all.weights[0].tolist() == [0.5, 0.5, 0.0]
    assert of_all.weights[1].isnan().all()
    assert of_sigmoid.experts.tolist() == [[1, 3, 0], [1, 3, 2]]
    weights = torch.tensor([1.0, 1 / (1 + math.exp(-2)), 0.5])
    torch.testing.assert_close(of_sigmoid.weights[1].cpu(), weights / weights.sum())
    of_chosen = route(logits, Routing(4, 2, OF_CHOSEN))
    assert of_chosen.experts.tolist() == [[1, 3], [1, 3]]
    assert of_chosen.weights[0].tolist() == [0.5, 0.5]
    assert of_chosen.weights[1].isnan().all()


@pytest.mark.parametrize("routing", [Routing(12, 3), GROUPED], ids=str)
def test_a_token_chooses_in_any_batch_what_it_chooses_alone(place, routing):
    logits, bias = normal(6, 12), optionally(place, random_logits(1, routing)[1])
    together = route(place(logits), routing, bias)
    for token in range(6):
        alone = route(place(logits[token : token + 1]), routing, bias)
        assert torch.equal(alone.experts[0], together.experts[token])
        assert torch.equal(alone.weights[0], together.weights[token])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@SPLITS
def test_gated_experts_equal_the_reference(place, dtype, shape, splits):
    x, routes, gate_up, down = problem(shape, dtype)
    gate = Gate.SILU if splits is Splits.EVEN else Gate.GELU_TANH
    ours = gated_experts(place(x), placed(place, routes), place(gate_up), place(down), gate, splits=splits)
    assert_close(ours, reference.gated_experts(x, routes, gate_up, down, gate))


def of_8_bits(weight, weight_type):
    """(weights with a scale per output, the numbers they stand for)"""
    rows = quantize_rows(weight.flatten(0, 1), weight_type)
    made = ScaledWeight(rows.values.view(weight.shape), rows.scales.view(weight.shape[:2]))
    return made, made.values.double() * made.scales.double()[..., None]


@pytest.mark.parametrize("weight_type", [INT8, FLOAT8], ids=str)
@pytest.mark.parametrize(
    "shape", [SHAPES[0], (7, 50, 34, 4, 2), pytest.param((70, 130, 65, 5, 2), marks=slow)], ids=str
)
def test_gated_experts_of_8_bits_equal_the_reference(gpu, place, dtype, shape, weight_type):
    """With stored numbers as they are: what rounding the weights cost is no part of it."""
    x, routes, *weights = problem(shape, dtype)
    (gate_up, wide_gate_up), (down, wide_down) = (of_8_bits(weight, weight_type) for weight in weights)
    ours = gated_experts(place(x), *(placed(place, each) for each in (routes, gate_up, down)), Gate.SILU)
    assert_close(ours, reference.gated_experts(x, routes, wide_gate_up, wide_down, Gate.SILU))


def in_groups(shape, codes, group, *, dtype=None, has_zeros=False, has_minima=False, order=None):
    """(random weights in groups, the numbers they stand for [experts, out, in])"""
    (num_experts, num_out, num_in), generator = shape, torch.Generator().manual_seed(sum(shape))
    is_integer, gain = codes in (Codes.INT4, Codes.INT8), 0.25 if codes.num_bits == 4 else 0.015
    layout = GroupedLayout(num_experts * num_out, num_in, group, codes, 1 << codes.num_bits - 1 if is_integer else 0)
    table, minima_type = None, torch.float32 if has_minima else None
    if codes is Codes.TABLE:
        table = (normal(16, seed=4) * 4).to(dtype)
    options = {"has_zeros": has_zeros, "minima_type": minima_type, "table": table, "order": order}
    made = new_grouped(layout, torch.device("cpu"), torch.float32, **options)

    def integers(*size):
        return torch.randint(1 << codes.num_bits, size, generator=generator).to(torch.uint8)

    of_groups = layout.num_outputs, layout.num_groups
    scales = gain * (0.5 + torch.rand(of_groups, generator=generator)) / num_in**0.5
    pack_grouped(made, slice(None), integers(layout.num_outputs, num_in), scales, integers(*of_groups), -scales * 2)
    return made, unpack_grouped(made, torch.float64).view(shape)


@pytest.mark.parametrize(
    "form",
    [
        (Codes.INT4, 128, {}),
        (Codes.INT4, 32, {"has_zeros": True}),
        pytest.param((Codes.INT8, 32, {"has_minima": True}), marks=slow),
        pytest.param((Codes.TABLE, 64, {}), marks=slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(7, 150, 41, 3, 2), pytest.param((70, 40, 151, 3, 2), marks=slow)], ids=str)
def test_gated_experts_in_groups_equal_the_reference(gpu, place, exact, form, shape):
    """Experts begin anywhere in a tile of words."""
    codes, group, options = *form[:2], form[2] | {"dtype": exact}
    _, hidden, intermediate, num_experts, _ = shape
    x, routes, *_ = problem(shape, exact)
    gate_up, wide_gate_up = in_groups((num_experts, 2 * intermediate, hidden), codes, group, **options)
    down, wide_down = in_groups((num_experts, hidden, intermediate), codes, group, **options)
    ours = gated_experts(place(x), *(placed(place, each) for each in (routes, gate_up, down)), Gate.SILU)
    assert_close(ours, reference.gated_experts(x, routes, wide_gate_up, wide_down, Gate.SILU))


def test_weights_in_groups_that_do_not_fit_are_refused(gpu, place, exact):
    x, routes, _, wide = problem((1, 32, 16, 3, 2), exact)
    gate_up, down = (in_groups(shape, Codes.INT4, 32)[0] for shape in ((3, 32, 32), (3, 32, 16)))
    ordered, _ = in_groups((3, 32, 32), Codes.INT4, 32, order=torch.arange(32))
    short, _ = in_groups((2, 32, 32), Codes.INT4, 32)
    for weights, wrong in (
        ((short, down), r"no number of experts has weights \[64, 32\] and \[96, 16\]"),
        ((ordered, down), "gate_up must have its inputs in the order of the model"),
        ((gate_up, wide), "gate_up may be grouped on a GPU, where both weights are"),
    ):
        with pytest.raises(KernelArgumentError, match=wrong):
            gated_experts(place(x), placed(place, routes), *(placed(place, each) for each in weights), Gate.SILU)


@SPLITS
def test_all_tokens_may_choose_one_expert_and_the_others_are_not_read(place, exact, splits):
    x, _, gate_up, down = problem((70, 20, 12, 5, 1), exact)
    routes = chosen(*[[3]] * 70)
    expected = reference.gated_experts(x, routes, gate_up, down, Gate.SILU)
    others = [expert for expert in range(5) if expert != 3]
    gate_up[others], down[others] = NAN, NAN
    ours = gated_experts(place(x), placed(place, routes), place(gate_up), place(down), Gate.SILU, splits=splits)
    assert_close(ours, expected)


def assert_alone_as_together(place, x, routes, weights, tokens):
    """A token has the same bits at any place, whatever the others choose."""
    weights = [placed(place, weight) for weight in weights]

    def of(some):
        its_routes = Routes(place(routes.experts[some]), place(routes.weights[some]))
        return gated_experts(place(x[some]), its_routes, *weights, Gate.SILU, splits=Splits.FIXED)

    together = of(slice(None))
    assert torch.equal(of(torch.arange(len(x) - 1, -1, -1)).flip(0), together)
    for token in tokens:
        assert torch.equal(of(slice(token, token + 1))[0], together[token])


@pytest.mark.usefixtures("_products_by_row")
def test_with_fixed_splits_a_token_has_the_same_bits_in_any_batch(place, exact):
    x, routes, *weights = problem((67, 40, 24, 6, 2), exact)
    assert_alone_as_together(place, x, routes, weights, (0, 33, 66))


@pytest.mark.usefixtures("_products_by_row")
@pytest.mark.parametrize("kind", [pytest.param("8 bits", marks=slow), "groups"])
def test_with_fixed_splits_narrow_weights_keep_a_tokens_bits(gpu, place, exact, kind):
    x, routes, gate_up, down = problem((30, 40, 24, 2, 2), exact)
    weights = [in_groups(weight.shape, Codes.INT4, 32)[0] for weight in (gate_up, down)]
    if kind == "8 bits":
        weights = [of_8_bits(weight, INT8)[0] for weight in (gate_up, down)]
    assert_alone_as_together(place, x, routes, weights, (17,))


def test_with_fixed_splits_a_token_is_in_a_tile_of_as_many_slots_as_any(gpu, place, exact, monkeypatch):
    """With tiles of other sizes the interpreter has the same bits, too."""
    from paceline_kernels.experts import triton as kernels

    sizes, group = [], kernels.group
    monkeypatch.setattr(kernels, "group", lambda *args: sizes.append(args[2]) or group(*args))
    x, routes, *weights = problem((1, 40, 24, 2, 2), exact)
    for gate_up, down in (weights, [in_groups(weight.shape, Codes.INT4, 64)[0] for weight in weights]):
        gate_up, down = placed(place, gate_up), placed(place, down)
        gated_experts(place(x), placed(place, routes), gate_up, down, Gate.SILU, splits=Splits.FIXED)
    assert sizes == [64, 64]


@SPLITS
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_what_experts_make_is_added_in_the_order_of_the_choice(place, exact, num_tokens, splits):
    """Any other order of 2**24 + 1 - 2**24 would leave the 1."""
    x, gate_up = torch.ones(num_tokens, 1).to(exact), torch.full((4, 2, 1), 32.0).to(exact)
    routes = chosen(*[[2, 0, 3]] * num_tokens, weights=[[2.0**24, 1.0, -(2.0**24)]] * num_tokens)
    down = torch.full((4, 1, 1), 2.0**-10).to(exact)
    ours = gated_experts(place(x), placed(place, routes), place(gate_up), place(down), Gate.SILU, splits=splits)
    assert ours.tolist() == [[0.0]] * num_tokens


@SPLITS
@pytest.mark.parametrize("spoilt", [NAN, INFINITY])
def test_a_token_does_not_feel_what_others_hold(place, exact, splits, spoilt):
    x, routes, gate_up, down = problem((6, 20, 12, 3, 2), exact)
    routes, gate_up, down = placed(place, routes), place(gate_up), place(down)
    clean = gated_experts(place(x), routes, gate_up, down, Gate.SILU, splits=splits)
    x[2, 5] = spoilt
    ours = gated_experts(place(x), routes, gate_up, down, Gate.SILU, splits=splits)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(ours[others], clean[others])
    assert not ours[2].isfinite().all()


@pytest.mark.parametrize("num_tokens", [1, 6])
@pytest.mark.parametrize("missing", [-1, pytest.param(3, marks=slow), 2**30])
def test_an_expert_that_is_not_there_adds_nothing(place, exact, num_tokens, missing):
    """No other token notices."""
    x, routes, gate_up, down = problem((num_tokens, 20, 12, 3, 2), exact)
    gate_up, down = place(gate_up), place(down)
    clean = gated_experts(place(x), placed(place, routes), gate_up, down, Gate.SILU)
    routes.experts[0, 1] = missing
    ours = gated_experts(place(x), placed(place, routes), gate_up, down, Gate.SILU)
    first = Routes(routes.experts[:1, :1], routes.weights[:1, :1])
    assert_close(ours[:1], reference.gated_experts(x[:1], first, gate_up.cpu(), down.cpu(), Gate.SILU))
    assert torch.equal(ours[1:], clean[1:])


def test_no_tokens_are_computed(place, exact):
    x, routes, gate_up, down = problem((0, 20, 12, 3, 2), exact)
    assert route(place(torch.zeros(0, 3)), Routing(3, 2)).experts.shape == (0, 2)
    ours = gated_experts(place(x), placed(place, routes), place(gate_up), place(down), Gate.SILU)
    assert ours.shape == (0, 20)


def grouped_by_hand(experts, num_experts, size):
    """([slots of a tile], [expert of a tile])"""
    tiles = []
    for expert in range(num_experts):
        own = [slot for slot, one in enumerate(experts) if one == expert]
        tiles += [(own[start : start + size], expert) for start in range(0, len(own), size)]
    return [slots + [len(experts)] * (size - len(slots)) for slots, _ in tiles], [expert for _, expert in tiles]


@pytest.mark.parametrize("num_slots", [1, 7, 100])
def test_slots_are_grouped_in_their_order_into_tiles_of_one_expert(gpu, place, monkeypatch, num_slots):
    """Those of no expert into none; in blocks as in one."""
    from paceline_kernels.experts.triton import grouping

    monkeypatch.setattr(grouping, "_FEW", 16)
    monkeypatch.setattr(grouping, "_BLOCK", 32)
    experts = torch.randint(-1, 6, (num_slots, 1), generator=torch.Generator().manual_seed(0)).int()
    tiles = grouping.group(place(experts), 5, 16)
    slots, of_tiles = grouped_by_hand(experts.flatten().tolist(), 5, 16)
    (num_tiles,) = tiles.num_tiles.tolist()
    assert tiles.slots.tolist()[: num_tiles * 16] == [slot for tile in slots for slot in tile]
    assert tiles.experts.tolist()[:num_tiles] == of_tiles
    assert len(of_tiles) == num_tiles <= tiles.max_tiles


@pytest.mark.parametrize("first", [1, 17])
def test_as_many_tiles_are_launched_as_there_may_be(gpu, place, first):
    """All experts have one slot more than tiles that are full."""
    from paceline_kernels.experts.triton.grouping import group

    tiles = group(place(int32(*[0] * first, 1, 2, 3)[:, None]), 4, 16)
    assert tiles.num_tiles.tolist() == [tiles.max_tiles] == [4 + first // 16]


@pytest.mark.parametrize(
    ("num_slots", "num_experts", "tokens"), [(64, 8, 16), (65, 8, 32), (384, 8, 64), (385, 8, 128), (8, 128, 16)]
)
def test_tiles_have_about_as_many_slots_as_an_expert(num_slots, num_experts, tokens):
    launches = pytest.importorskip("paceline_kernels.experts.triton.launches")
    for architecture in launches.Architecture:
        for dtype in (torch.bfloat16, INT8):
            launch = launches.tiles_launch(architecture, dtype, num_slots, num_experts, is_fixed=False)
            assert (launch.gate_up.tokens, launch.down.tokens) == (tokens, tokens)
            fixed = launches.tiles_launch(architecture, dtype, num_slots, num_experts, is_fixed=True)
            assert (fixed.gate_up.tokens, fixed.down.tokens) == (64, 64)


def test_tiles_of_weights_in_groups_have_few_slots_or_many():
    """Many, whatever the number of slots, with fixed splits."""
    launches = pytest.importorskip("paceline_kernels.experts.triton.launches")
    for (architecture, is_plain), (few, many) in launches.GROUP_TILES.items():
        for num_slots, is_fixed, launch in ((64, False, few), (65, False, many), (1, True, many)):
            found = launches.group_tiles_launch(architecture, num_slots, 8, is_plain=is_plain, is_fixed=is_fixed)
            assert found == launch


def test_tiles_are_made_where_slots_would_read_much_twice():
    """A token has no expert twice."""
    launches = pytest.importorskip("paceline_kernels.experts.triton.launches")
    takes = launches.takes_few_slots
    assert [takes(num_tokens, 8, 128) for num_tokens in (1, 8, 9)] == [True, True, False]
    assert [takes(num_tokens, 2, 8) for num_tokens in (1, 2, 3)] == [True, True, False]
    assert takes(1, 4, 4)


@pytest.mark.parametrize(
    ("logits", "routing", "bias", "wrong"),
    [
        (torch.zeros(2, 4), Routing(5, 2), None, "logits must have shape"),
        (torch.zeros(2, 4).double(), Routing(4, 2), None, r"logits must be torch\.float32"),
        (torch.zeros(2, 4), Routing(4, 2), torch.zeros(4), "a bias belongs to a routing that has one"),
        (torch.zeros(2, 4), Routing(4, 2, has_bias=True), None, "a bias belongs to a routing that has one"),
        (torch.zeros(2, 4), Routing(4, 2, has_bias=True), torch.zeros(3), "bias must have shape"),
    ],
)
def test_what_the_docstring_of_route_rules_out_is_refused(logits, routing, bias, wrong):
    with pytest.raises(KernelArgumentError, match=wrong):
        route(logits, routing, bias)


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"x": torch.zeros(2, 5)}, "x must have shape"),
        ({"dtype": torch.float16}, "the result must be of the type of x or torch.float32, not"),
        ({"routes": chosen([0, 1])}, r"routes\.experts must have shape"),
        ({"routes": Routes(int32(0, 1)[:, None], torch.zeros(2))}, r"routes\.weights must have shape"),
        ({"gate_up": torch.zeros(3, 5, 4)}, "as many gates as it gates, not 5 in all"),
        ({"down": torch.zeros(2, 4, 3)}, "down must have shape"),
        ({"down": torch.zeros(3, 4, 3).half()}, r"down must be torch\.float32"),
        ({"down": of_8_bits(torch.ones(3, 4, 3), INT8)[0]}, r"on a GPU torch\.float8_e4m3fn or torch\.int8"),
    ],
)
def test_what_the_docstring_of_gated_experts_rules_out_is_refused(changed, wrong):
    """Compiled code never sees it."""
    right = {"x": torch.zeros(2, 4), "routes": chosen([0, 1], [2, 0])}
    right |= {"gate_up": torch.zeros(3, 6, 4), "down": torch.zeros(3, 4, 3), "gate": Gate.SILU}
    with pytest.raises(KernelArgumentError, match=wrong):
        gated_experts(**(right | changed))


def test_scales_that_do_not_fit_their_weights_are_refused(gpu, place, exact):
    x, routes, gate_up, down = problem((1, 20, 12, 3, 2), exact)
    scaled = placed(place, ScaledWeight(of_8_bits(gate_up, INT8)[0].values, torch.ones(3, 20)))
    with pytest.raises(KernelArgumentError, match="scales of gate_up must have shape"):
        gated_experts(place(x), placed(place, routes), scaled, place(down), Gate.SILU)


def test_a_device_without_an_implementation_is_named():
    with pytest.raises(UnsupportedDeviceError, match="route has no implementation for device 'meta'"):
        route(torch.zeros(1, 4, device="meta"), Routing(4, 2))
    x, routes, gate_up, down = problem((1, 20, 12, 3, 2), torch.float32)
    with pytest.raises(UnsupportedDeviceError, match="gated_experts has no implementation for device 'meta'"):
        gated_experts(x.to("meta"), routes, gate_up, down, Gate.SILU)

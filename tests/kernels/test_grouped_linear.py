"""grouped_linear: right against float64 in every form of weights, at odd sizes; a row has the same bits anywhere."""

import re
from dataclasses import dataclass

import pytest
import torch

from kernel_rig.tensors import normal, placed
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.gpu.architecture import Architecture
from paceline_kernels.grouped_linear import (
    Codes,
    GroupedLayout,
    GroupedWeight,
    Splits,
    grouped_linear,
    new_grouped,
    pack_grouped,
    unpack_grouped,
)

slow = pytest.mark.slow
SPLITS = pytest.mark.parametrize("splits", Splits)
# Of results of about 1, by the type of x, as for `linear`.
ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 4e-6}


@dataclass(frozen=True)
class Form:
    """What files of a kind have."""

    codes: Codes
    group: int
    has_zeros: bool = False
    has_minima: bool = False
    has_order: bool = False


ALL_OF_A_ROW = 1 << 20
FORMS = {
    "AWQ": Form(Codes.INT4, 128, has_zeros=True),
    "GPTQ with act order": Form(Codes.INT4, 32, has_zeros=True, has_order=True),
    "GPTQ by row": Form(Codes.INT4, ALL_OF_A_ROW),
    "GPTQ of 8 bits": Form(Codes.INT8, 32, has_zeros=True),
    "W4A16": Form(Codes.INT4, 64),
    "large groups": Form(Codes.INT4, 256),
    "Q4_K": Form(Codes.INT4, 32, has_minima=True),
    "Q5_1": Form(Codes.INT8, 32, has_minima=True),
    "Q6_K": Form(Codes.INT8, 16),
    "LLM.int8": Form(Codes.INT8, ALL_OF_A_ROW),
    "NF4": Form(Codes.TABLE, 64),
    "NVFP4": Form(Codes.TABLE, 16),
    "float8 blocks": Form(Codes.FLOAT8, 128),
}
FEW = ["AWQ", "GPTQ with act order", "Q4_K", "Q6_K", "float8 blocks"]
EVERY = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
SOME = pytest.mark.parametrize("form", [FORMS[name] for name in FEW], ids=FEW)


@dataclass(frozen=True)
class Canonical:
    """Weights as a file has them, and what they are."""

    weight: GroupedWeight
    matrix: torch.Tensor  # [out, in] float64


def canonical(form, num_out, num_in, dtype, rows_at_once=7):
    """Random weights of nearly unit gain, packed some rows at a time."""
    generator = torch.Generator().manual_seed(num_in)
    num_groups, middle = -(-num_in // form.group), 0
    if form.codes in (Codes.INT4, Codes.INT8) and not form.has_minima:
        middle = 8 if form.codes is Codes.INT4 else 128
    codes = torch.randint(1 << form.codes.num_bits, (num_out, num_in), generator=generator).to(torch.uint8)
    if form.codes is Codes.FLOAT8:
        codes[codes & 127 == 127] = 0  # NaN
    table = normal(16, seed=5).to(dtype) if form.codes is Codes.TABLE else None
    if form.codes is Codes.FLOAT8:
        numbers = codes.view(torch.float8_e4m3fn).double()
    else:
        numbers = codes.double() if table is None else table.double()[codes.int()]
    gain = 1 / ((numbers - middle).std() * num_in**0.5)
    scales = (gain * (0.5 + torch.rand(num_out, num_groups, generator=generator))).half()
    order = torch.randperm(num_in, generator=generator) if form.has_order else None
    zeros = minima = None
    if form.has_zeros:
        zeros = torch.randint(1 << form.codes.num_bits, scales.shape, generator=generator).to(torch.uint8)
    if form.has_minima:
        minima = (torch.rand(scales.shape, generator=generator) * -scales * (numbers.std() * 3)).float()
    groups = torch.arange(num_in) // form.group
    groups = groups if order is None else torch.empty_like(groups).index_copy_(0, order, groups)
    matrix = (numbers - (middle if zeros is None else zeros.double()[:, groups])) * scales.double()[:, groups]
    weight = new_grouped(
        GroupedLayout(num_out, num_in, form.group, form.codes, middle),
        torch.device("cpu"),
        torch.float16,
        has_zeros=form.has_zeros,
        minima_type=torch.float32 if form.has_minima else None,
        table=table,
        order=order,
    )
    for first in range(0, num_out, rows_at_once):
        rows = slice(first, first + rows_at_once)
        of_groups = [None if each is None else each[rows] for each in (scales, zeros, minima)]
        pack_grouped(weight, rows, codes[rows], *of_groups)
    return Canonical(weight, matrix if minima is None else matrix + minima.double()[:, groups])


def assert_close(ours, expected):
    """Equal but for the rounding of our type."""
    bound = ROUNDING[ours.dtype] * max(1.0, expected.abs().max().item() / 4)
    torch.testing.assert_close(ours.cpu().double(), expected, rtol=ROUNDING[ours.dtype], atol=bound)


@EVERY
def test_what_was_packed_some_rows_at_a_time_is_what_was_given(form):
    made = canonical(form, 50, 200, torch.float32)
    assert torch.equal(unpack_grouped(made.weight, torch.float64), made.matrix)


def test_signed_codes_are_numbers_under_a_middle_of_128():
    weight = new_grouped(GroupedLayout(3, 40, 40, Codes.INT8, 128), torch.device("cpu"), torch.float32)
    codes = torch.randint(-128, 128, (3, 40), dtype=torch.int8)
    pack_grouped(weight, slice(3), codes, torch.ones(3, 1))
    assert torch.equal(unpack_grouped(weight, torch.float32), codes.float())


@pytest.mark.parametrize("name", ["W4A16", "float8 blocks"])
def test_a_number_that_is_not_finite_shows(name):
    """In a scale, or as the code of a float8."""
    weight = canonical(FORMS[name], 16, 128, torch.float32).weight
    assert weight.is_finite()
    (weight.scales.fill_(torch.inf) if name == "W4A16" else weight.words[0, 0, 3, 5].fill_(0x7F0000))
    assert not weight.is_finite()


@EVERY
@SPLITS
def test_every_form_equals_the_reference(place, dtype, form, splits):
    """Where neither outputs nor inputs fill a tile, and the last group is shorter."""
    made = canonical(form, 35, 300, dtype)
    x, bias = normal(3, 300).to(dtype), normal(35, seed=2).to(dtype)
    ours = grouped_linear(place(x), placed(place, made.weight), place(bias), splits=splits)
    assert_close(ours, x.double() @ made.matrix.T + bias.double())


@SOME
@pytest.mark.parametrize(
    ("num_tokens", "num_out", "num_in"),
    [
        (1, 16, 1300),
        pytest.param(9, 33, 256, marks=slow),
        (20, 48, 256),
        (34, 70, 384),
        pytest.param(70, 130, 300, marks=slow),
    ],
)
def test_any_number_of_rows_equals_the_reference(gpu, place, dtype, form, num_tokens, num_out, num_in):
    """By each line of the launch tables, with several steps and with less than one."""
    made = canonical(form, num_out, num_in, dtype)
    x, ours = normal(num_tokens, num_in).to(dtype), placed(place, made.weight)
    for splits in Splits:
        assert_close(grouped_linear(place(x), ours, splits=splits), x.double() @ made.matrix.T)


@EVERY
def test_many_rows_are_multiplied_by_widened_weights(gpu, place, dtype, form, monkeypatch):
    monkeypatch.setattr("paceline_kernels.grouped_linear.triton.MAX_TILE_ROWS", {False: 39, True: 39})
    made = canonical(form, 35, 300, dtype)
    x = normal(40, 300).to(dtype)
    expected = x.double() @ made.matrix.to(dtype).double().T
    assert_close(grouped_linear(place(x), placed(place, made.weight)), expected)


@SOME
@pytest.mark.usefixtures("_products_by_row")
def test_with_fixed_splits_a_row_has_the_same_bits_in_any_batch(gpu, place, form):
    made = canonical(form, 20, 300, torch.float16)
    x, ours = normal(300, 300).half(), placed(place, made.weight)
    outs = [grouped_linear(place(x[-rows:]), ours, splits=Splits.FIXED)[-1] for rows in (1, 7, 64, 300)]
    for out in outs:
        assert torch.equal(out, outs[0])


def test_on_a_cpu_a_row_has_the_same_bits_in_any_batch(threads):
    made = canonical(FORMS["AWQ"], 20, 300, torch.float32)
    x = normal(30, 300)
    alone = torch.cat([grouped_linear(row[None], made.weight) for row in x])
    assert torch.equal(grouped_linear(x, made.weight), alone)


@SPLITS
def test_a_row_does_not_feel_what_its_neighbours_hold(place, dtype, splits):
    made = canonical(FORMS["AWQ"], 20, 140, dtype)
    x, ours = normal(5, 140).to(dtype), placed(place, made.weight)
    clean = grouped_linear(place(x), ours, splits=splits)
    x[1], x[3] = float("nan"), float("inf")
    assert torch.equal(grouped_linear(place(x), ours, splits=splits)[[0, 2, 4]], clean[[0, 2, 4]])


@SPLITS
def test_nothing_to_multiply_launches_nothing(place, exact, splits):
    ours = placed(place, canonical(FORMS["W4A16"], 20, 140, exact).weight)
    assert grouped_linear(place(torch.zeros(0, 140).to(exact)), ours, splits=splits).shape == (0, 20)


@pytest.mark.parametrize(
    ("architecture", "num_tokens", "num_outputs", "kind"),
    [
        (Architecture.SM_90, 8, 4096, "few"),
        (Architecture.SM_90, 16, 28_672, "few"),
        (Architecture.SM_90, 32, 4096, "few"),
        (Architecture.SM_90, 17, 28_672, "tiles"),
        (Architecture.SM_80, 33, 4096, "tiles"),
    ],
)
def test_few_rows_have_a_launch_of_their_own(architecture, num_tokens, num_outputs, kind):
    launches = pytest.importorskip("paceline_kernels.grouped_linear.triton.launches")
    launch = launches.few_rows_launch(architecture, num_tokens, num_outputs, is_plain=True)
    assert (launch is None) == (kind == "tiles")


def run_ptx(code, registers):
    """What the few instructions of a pair's code leave in $0, by the manual of PTX."""
    for line in re.sub(r"[{};]", "\n", code).split("\n"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        to, *names = [part.strip() for part in rest.split(",")]
        values = [registers[each] if each in registers else int(each, 0) for each in names]
        registers[to] = INSTRUCTIONS[name](*values)
    return registers["$0"]


def permuted(a, b, selector):
    octets = [value >> 8 * place & 255 for value in (a, b) for place in range(4)]
    return sum(octets[selector >> 4 * place & 7] << 8 * place for place in range(4))


def looked_up(a, b, c, table):
    """lop3: each bit by the three at its place."""
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))


def multiplied(kind):
    """fma of two numbers of 16 bits each."""

    def fma(*values):
        halves = [torch.tensor([value & 0xFFFF, value >> 16], dtype=torch.uint16) for value in values]
        a, b, c = (pair.view(kind).double() for pair in halves)
        low, high = (a * b + c).to(kind).view(torch.uint16).tolist()
        return high << 16 | low

    return fma


INSTRUCTIONS = {
    "prmt.b32": permuted,
    "lop3.b32": looked_up,
    "fma.rn.bf16x2": multiplied(torch.bfloat16),
    "fma.rn.f16x2": multiplied(torch.float16),
    "shr.u32": lambda a, count: a >> count,
    "and.b32": lambda a, b: a & b,
    "mov.b32": lambda a: a,
}


def registers_of(table):
    """What stands for it, each twice, for two words: low bytes of four numbers, then high ones."""
    octets = table.view(torch.uint8).view(4, 4, 2).permute(2, 0, 1).contiguous().view(torch.int32)
    return {
        f"${3 + place}": int(value) & 0xFFFFFFFF for place, value in enumerate(octets.flatten().repeat_interleave(2))
    }


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("codes", [Codes.INT4, Codes.FLOAT8, Codes.TABLE], ids=str)
def test_two_words_become_two_numbers_of_a_plane(kind, codes):
    """What the interpreter leaves out: code of the GPU's own, for every code at every place of both words."""
    planes = pytest.importorskip("paceline_kernels.grouped_linear.triton.planes")
    num_bits, num_codes = codes.num_bits, 1 << codes.num_bits
    middle, table, all_codes = 0, normal(16).to(kind), torch.arange(num_codes, dtype=torch.uint8)
    if codes is Codes.INT4:
        middle, numbers = 8, all_codes.double() - 8
    else:
        numbers = (table if codes is Codes.TABLE else all_codes.view(torch.float8_e4m3fn)).double()
    for plane in range(32 // num_bits):
        code = planes.code_of_pair(codes.name, plane, middle, kind == torch.bfloat16)
        for pair in zip(range(num_codes), reversed(range(num_codes)), strict=True):
            others = 0xA5A5A5A5 & ~(num_codes - 1 << plane * num_bits)
            words = {name: others | value << plane * num_bits for name, value in zip(("$1", "$2"), pair, strict=True)}
            made = run_ptx(code, words | registers_of(table))
            made = torch.tensor([made & 0xFFFF, made >> 16], dtype=torch.uint16).view(kind).double()
            expected = numbers[list(pair)]
            assert torch.equal(made[~expected.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize(
    ("num_inputs", "group", "codes"),
    [(96, 24, Codes.INT4), (960, 96, Codes.INT4), (192, 96, Codes.INT8), (64, 0, Codes.INT8)],
)
def test_groups_that_lie_across_tiles_are_refused(num_inputs, group, codes):
    with pytest.raises(KernelArgumentError, match=f"groups of {group} among {num_inputs} inputs"):
        new_grouped(GroupedLayout(16, num_inputs, group, codes), torch.device("cpu"), torch.float16)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"words": torch.zeros(1, 1, 16, 16)}, r"words must be torch\.int32"),
        ({"scales": torch.zeros(1, 2, 16)}, r"scales must have shape \[1, 1, 16\]"),
        ({"scales": torch.zeros(1, 1, 16, dtype=torch.float64)}, "scales must be floats of 16 or 32 bits"),
        ({"zeros": torch.zeros(1, 1, 16)}, r"zeros must be torch\.uint8"),
        ({"table": torch.zeros(16)}, "a table belongs to codes"),
        ({"order": torch.zeros(3, dtype=torch.int64)}, "order must have shape"),
    ],
)
def test_what_a_weight_cannot_be_made_of_is_refused(change, wrong):
    parts = {"words": torch.zeros(1, 1, 16, 16, dtype=torch.int32), "scales": torch.zeros(1, 1, 16)}
    with pytest.raises(KernelArgumentError, match=wrong):
        GroupedWeight(GroupedLayout(16, 64, 64, Codes.INT8), **parts | change)


def test_what_the_docstring_rules_out_is_refused():
    weight = canonical(FORMS["NF4"], 3, 64, torch.float16).weight
    with pytest.raises(KernelArgumentError, match="x must have shape"):
        grouped_linear(torch.zeros(1, 65), weight)
    with pytest.raises(KernelArgumentError, match=r"table must be torch\.float32"):
        grouped_linear(torch.zeros(1, 64), weight)
    with pytest.raises(UnsupportedDeviceError, match="grouped_linear has no implementation for device 'meta'"):
        grouped_linear(torch.zeros(1, 64, device="meta"), weight)

"""Of a tile of words and some rows of x: what a product adds to its sums. Knows tiles, codes and groups, not programs.

Apart, because products of few rows and of tiles, and the widening of weights, are made with it.

A plane's 16 numbers are one step of a matrix instruction, whose operand has them where their words are: no number
changes its thread. What takes the time with 4 bits is to make numbers of codes, hence two at a time in three
instructions, where a compiler would take seven.
"""

from typing import Any

import triton
import triton.language as tl
from triton import knobs

from paceline_kernels.grouped_linear.weights import GroupedWeight

TILE_OUTPUTS, WORDS = tl.constexpr(16), tl.constexpr(16)
TILE_WORDS = tl.constexpr(256)
_TWO_TO_120 = tl.constexpr(2.0**120)
_IS_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


def arguments_of(weight: GroupedWeight) -> dict[str, Any]:
    """What all kernels take of a weight, by their names for it."""
    layout = weight.layout
    return {
        "words": weight.words,
        "scales": weight.scales,
        "zeros": weight.zeros,
        "minima": weight.minima,
        "table": weight.table,
        "num_inputs": layout.num_inputs,
        "num_outputs": layout.num_outputs,
        "num_tiles": layout.num_tiles,
        "num_groups": layout.num_groups,
        "CODES": layout.codes.name,
        "MIDDLE": layout.middle,
        "GROUP": layout.group if layout.num_groups > 1 else 0,
    }


@triton.constexpr_function
def bits_of(codes):
    return 4 if codes in ("INT4", "TABLE") else 8


@triton.constexpr_function
def code_of_pair(codes, plane, middle, is_bfloat16):
    """Two words -> two numbers of 16 bits, of the codes at one place.

    INT4: the bits of 128 or 1024 with the code in the lowest ones, less 128 or 1024 + middle. FLOAT8: its bits but the
    sign where those of the type begin, which makes a number 2**120 or 2**8 times too small, and none is too small.
    TABLE: the bytes of eight registers (`bytes_of_table`), found by four codes of a word at a time. The assembler does
    once what the codes of several planes have in common.
    """
    if codes == "TABLE":
        return _code_of_places(plane)
    if codes == "INT4":
        kind, one, base = ("bf16x2", 0x3F80, 0x4300) if is_bfloat16 else ("f16x2", 0x3C00, 0x6400)
        factor, summand = one, base + middle | 0x8000
        steps = f"""
    prmt.b32 pair, $1, $2, {0x5410 if plane < 4 else 0x7632:#x};
    shr.u32 pair, pair, {plane % 4 * 4};
    lop3.b32 pair, pair, 0x000f000f, {base << 16 | base:#x}, 0xea;"""
    else:
        kind, factor, shift, bits = ("bf16x2", 0x7B80, 4, 0x07F0) if is_bfloat16 else ("f16x2", 0x5C00, 1, 0x3F80)
        summand = 0x8000  # which changes nothing, not even a zero's sign
        steps = f"""
    prmt.b32 twice, $1, $2, {0x4400 + 0x1111 * plane:#x};
    shr.u32 pair, twice, {shift};
    and.b32 pair, pair, {bits << 16 | bits:#x};
    lop3.b32 pair, twice, 0x80008000, pair, 0xea;"""
    return f"""{{
    .reg .b32 pair, twice, factor, summand;{steps}
    mov.b32 factor, {factor << 16 | factor:#x};
    mov.b32 summand, {summand << 16 | summand:#x};
    fma.rn.{kind} $0, pair, factor, summand;
    }}"""


@triton.constexpr_function
def _code_of_places(plane):
    both = f"{0x5410 if plane % 2 == 0 else 0x7632:#x}"
    return f"""{{
    .reg .b32 codes, within, upper, low, high, other, first, second;
    {_numbers_of_places("first", "$1", plane)}
    {_numbers_of_places("second", "$2", plane)}
    prmt.b32 $0, first, second, {both};
    }}"""


@triton.constexpr_function
def _numbers_of_places(to, word, plane):
    """Low and high bytes of four codes' numbers, of one or the other half of the table by the codes' highest bits; then
    the two numbers among which the plane's is.
    """
    return f"""
    shr.u32 codes, {word}, {plane // 4 * 16};
    and.b32 within, codes, 0x7777;
    shr.u32 codes, codes, 1;
    and.b32 codes, codes, 0x4444;
    prmt.b32 upper, 0, 0xffffffff, codes;
    prmt.b32 low, $3, $5, within;
    prmt.b32 other, $7, $9, within;
    lop3.b32 low, other, low, upper, 0xe4;
    prmt.b32 high, $11, $13, within;
    prmt.b32 other, $15, $17, within;
    lop3.b32 high, other, high, upper, 0xe4;
    prmt.b32 {to}, low, high, {0x5140 if plane % 4 < 2 else 0x7362:#x};"""


@triton.jit
def bytes_of_table(table):
    """Its low bytes and its high bytes, four in a register, a tuple; where it is interpreted, the table itself."""
    if _IS_INTERPRETED:
        return table
    else:
        found = ()
        for byte in tl.static_range(2):
            for first in tl.static_range(0, 16, 4):
                register = 0
                for place in tl.static_range(4):
                    number = tl.load(table + first + place).to(tl.int16, bitcast=True).to(tl.int32)
                    register |= (number >> 8 * byte & 255) << 8 * place
                found += (register,)  # type: ignore[assignment]
        return found


@triton.jit
def numbers_of_plane(words, table, PLANE: tl.constexpr, CODES: tl.constexpr, MIDDLE: tl.constexpr, TYPE: tl.constexpr):
    """Of words [..., 16]: the numbers less the middle [..., 16] of x's type, exactly. No float8 is NaN.

    table: what `bytes_of_table` makes of it.
    """
    BITS: tl.constexpr = bits_of(CODES)
    if CODES == "INT8":
        # The bits of 2**23 as a float, plus n, are those of 2**23 + n.
        bits = (words >> PLANE * BITS & 255) | 0x4B000000
        return (bits.to(tl.float32, bitcast=True) - (8388608.0 + MIDDLE)).to(TYPE)
    elif not _IS_INTERPRETED:
        code: tl.constexpr = code_of_pair(CODES, PLANE, MIDDLE, tl.bfloat16 == TYPE)
        operands: tl.constexpr = "=r" + ",r" * (18 if CODES == "TABLE" else 2)
        registers = (words,)
        if CODES == "TABLE":
            registers += table
        if tl.bfloat16 == TYPE:  # as a constant argument the type itself is not taken
            return tl.inline_asm_elementwise(code, operands, registers, tl.bfloat16, True, 2)
        else:
            return tl.inline_asm_elementwise(code, operands, registers, tl.float16, True, 2)
    elif CODES == "TABLE":
        return tl.load(table + (words >> PLANE * BITS & 15))
    elif CODES == "FLOAT8":
        codes = words >> PLANE * BITS
        bits = ((codes & 127) << 20) | ((codes & 128) << 24)
        return (bits.to(tl.float32, bitcast=True) * _TWO_TO_120).to(TYPE)
    else:
        return ((words >> PLANE * BITS & 15) - MIDDLE).to(TYPE)


@triton.jit
def of_spans(
    numbers, places, first_input, num_groups, inside, SPAN: tl.constexpr, SPANS: tl.constexpr, GROUP: tl.constexpr
):
    """Scales or the like of the SPANS groups that inputs from `first_input` on lie in, a tuple; none where there are no
    numbers. A group of 0 is a row's only one.

    places: of the outputs' numbers of the first group. They are loaded a step before they are needed, because nothing
    else keeps the reads of what is added after a product in flight.
    """
    found = ()
    if numbers is not None:
        for span in tl.static_range(SPANS):
            group = (first_input + span * SPAN) // GROUP if GROUP else first_input * 0
            places_now = numbers + places + group * 16
            found += (tl.load(places_now, mask=inside & (group < num_groups), other=0),)  # type: ignore[assignment]
    return found

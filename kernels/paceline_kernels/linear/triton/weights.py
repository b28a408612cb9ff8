"""What products do to weights and sums: make of 8 bits what matrix instructions take, and of sums a result.

Knows numbers and types; not tiles. Apart, because both tilings are made with it.
"""

import triton
import triton.language as tl


@triton.jit
def widened(weights, DOT_TYPE: tl.constexpr):
    """Weights as numbers of x's type, exactly: float16 and bfloat16 hold all that 8 bits do."""
    # Both ways go by float32, whose conversions are fast: an instruction from int8, or one from float8 to bfloat16 for
    # every number, would have a quarter of the others' rate.
    if weights.dtype == tl.int8:
        # The bits of 1.5 * 2**23 as a float, plus n, are those of 1.5 * 2**23 + n.
        return ((weights.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0).to(DOT_TYPE)
    elif weights.dtype == tl.float8e4nv:
        return weights.to(tl.float16).to(tl.float32).to(DOT_TYPE)
    else:
        return weights


@triton.jit
def store_products(out, sums, scales, bias, outputs, tokens, num_outputs, num_tokens):
    """Scale sums [OUTPUTS, TOKENS], add the bias, round once and write what lies inside of out, turned."""
    output_inside = outputs < num_outputs
    if scales is not None:
        sums *= tl.load(scales + outputs, mask=output_inside, other=0.0)[:, None]
    if bias is not None:
        sums += tl.load(bias + outputs, mask=output_inside, other=0.0).to(tl.float32)[:, None]
    places = out + tokens.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    tl.store(places, sums.to(out.dtype.element_ty), mask=output_inside[:, None] & (tokens < num_tokens)[None, :])

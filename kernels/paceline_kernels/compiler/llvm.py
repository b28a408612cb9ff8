"""Emits LLVM instructions: the loops, loads and vector operations that the SIMD kernels are put together from.

Knows llvmlite's builder. It refuses to know what is computed. Addresses and offsets are int64, in bytes where a name
says address and in elements where it says index; bounds are the caller's to keep.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8
FLOAT_BYTES = 4

FLOAT = ir.FloatType()
HALF = ir.HalfType()
INT8 = ir.IntType(8)
INT16 = ir.IntType(16)
INT32 = ir.IntType(32)
INT64 = ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)

# llvmlite has no types: this stands for its builder and its values.
Ir = Any

_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY


def operation(returned: Ir, *kinds: Ir) -> Callable[[Callable[..., Ir]], Any]:
    """Lets compiled code call what a function emits, which takes a builder and values of these types of numba's."""

    def made(emit: Callable[..., Ir]) -> Any:  # noqa: ANN401
        def generate(context: Ir, builder: Ir, _signature: Ir, arguments: Ir) -> Ir:
            value = emit(builder, *arguments)
            return context.get_dummy_value() if returned is types.void else value

        typed: Any = functools.wraps(emit)(lambda _context, *_kinds: (returned(*kinds), generate))
        # numba makes one tuple of arguments that have no parameters of their own.
        names = [f"_{i}" for i in range(1 + len(kinds))]
        typed.__signature__ = inspect.Signature([inspect.Parameter(name, _POSITIONAL) for name in names])
        return intrinsic(typed)

    return made


def constant(value: int) -> Ir:
    """An int64."""
    return ir.Constant(INT64, value)


def call(builder: Ir, name: str, returned: Ir, arguments: list[Ir]) -> Ir:
    """Call a function of LLVM's, or of the C library's, by its name."""
    function_type = ir.FunctionType(returned, [argument.type for argument in arguments])
    insert: Any = cgutils.get_or_insert_function
    return builder.call(insert(builder.module, function_type, name), arguments)


def fma(builder: Ir, a: Ir, b: Ir, c: Ir) -> Ir:
    """a * b + c with one rounding, for scalars and vectors."""
    suffix = "f32" if a.type == FLOAT else f"v{a.type.count}f32"
    return call(builder, f"llvm.fma.{suffix}", a.type, [a, b, c])


def load(builder: Ir, pointer: Ir, index: Ir, kind: Ir) -> Ir:
    """The value of this kind at element `index` of what `pointer` points to; no alignment is assumed."""
    return builder.load(builder.bitcast(builder.gep(pointer, [index]), kind.as_pointer()), align=1)


def prefetch_line(builder: Ir, pointer: Ir, index: Ir) -> None:
    """Ask for the cache line of element `index`, soon to be read; any address will do."""
    hints = [INT32(0), INT32(3), INT32(1)]  # a read, to be kept in all caches, of data
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [builder.gep(pointer, [index]), *hints])


def load_floats(builder: Ir, pointer: Ir, index: Ir, kind: Ir) -> Ir:
    """The same as float32: `kind` is FLOAT or VECTOR, the elements may be stored as float32, float16 or int8."""
    stored = pointer.type.pointee
    count = None if kind == FLOAT else kind.count
    value = load(builder, pointer, index, stored if count is None else ir.VectorType(stored, count))
    if stored == HALF:
        return builder.fpext(value, kind)
    return builder.sitofp(value, kind) if stored == INT8 else value


def store(builder: Ir, value: Ir, pointer: Ir, index: Ir) -> None:
    """Put the value at element `index` of what `pointer` points to."""
    target = builder.bitcast(builder.gep(pointer, [index]), value.type.as_pointer())
    builder.store(value, target, align=1)


def pointers(builder: Ir, address: Ir, stride: Ir, count: int, element: Ir = FLOAT) -> list[Ir]:
    """The starts of `count` rows of elements that lie `stride` elements apart."""
    first = builder.inttoptr(address, element.as_pointer())
    return [builder.gep(first, [builder.mul(stride, constant(i))]) for i in range(count)]


def splat(builder: Ir, scalar: Ir, kind: Ir) -> Ir:
    """A vector of this kind with the scalar in every lane; the scalar itself where the kind is no vector."""
    if scalar.type == kind:
        return scalar
    undefined = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(undefined, scalar, INT32(0))
    return builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(INT32, kind.count), [0] * kind.count))


def opaque(builder: Ir, value: int) -> Ir:
    """A constant that the optimiser does not see through: a loop that runs so often stays a loop.

    Unrolled as a whole, the sums of a tile are put into another order, and more values live than there are registers.
    """
    return builder.asm(ir.FunctionType(INT64, [INT64]), "", "=r,0", [constant(value)], side_effect=True)


def combine_lanes(builder: Ir, vector: Ir, combine: Callable[[Ir, Ir], Ir]) -> Ir:
    """Halve the vector until one lane is left, combining lane i with lane i + half."""
    half = vector.type.count // 2
    undefined = ir.Constant(vector.type, ir.Undefined)
    if half == 1:
        return combine(builder.extract_element(vector, INT32(0)), builder.extract_element(vector, INT32(1)))
    low = ir.Constant(ir.VectorType(INT32, half), list(range(half)))
    high = ir.Constant(ir.VectorType(INT32, half), list(range(half, 2 * half)))
    parts = [builder.shuffle_vector(vector, undefined, mask) for mask in (low, high)]
    return combine_lanes(builder, combine(parts[0], parts[1]), combine)


def loop(
    builder: Ir, start: Ir, stop: Ir, step: int, carried: list[Ir], body: Callable[[Ir, list[Ir]], list[Ir]]
) -> list[Ir]:
    """Emit `for index in range(start, stop, step): carried = body(index, carried)`; returns the final values."""
    before = builder.block
    head, inside, done = (builder.append_basic_block(name) for name in ("head", "inside", "done"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(INT64)
    index.add_incoming(start, before)
    values = [builder.phi(value.type) for value in carried]
    for value, initial in zip(values, carried, strict=True):
        value.add_incoming(initial, before)
    builder.cbranch(builder.icmp_signed("<", index, stop), inside, done)
    builder.position_at_end(inside)
    for value, following in zip(values, body(index, values), strict=True):
        value.add_incoming(following, builder.block)
    index.add_incoming(builder.add(index, constant(step)), builder.block)
    builder.branch(head)
    builder.position_at_end(done)
    return values

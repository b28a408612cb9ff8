"""Arrays whose references compiled code does not count.

numba counts a reference in and out wherever an array is handed on or cut. The count of an array that several workers
use is a cache line that all of them write to, fifteen times in a piece of a gate. An array without an owner has no
count. Whoever handed it in must keep it for as long as it is used, as callers do with their arguments.
"""

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline_kernels.compiler.llvm import Ir


def _typed_borrowed(_context: Ir, value: Ir) -> Ir:
    """The same array, or tuple of arrays and numbers, without an owner."""

    def generate(context: Ir, builder: Ir, signature: Ir, args: Ir) -> Ir:
        return _without_owner(context, builder, signature.args[0], args[0])

    return value(value), generate


def _without_owner(context: Ir, builder: Ir, kind: Ir, value: Ir) -> Ir:
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value=value)
        for owner in ("meminfo", "parent"):
            setattr(array, owner, _null(getattr(array, owner).type))
        return array._getvalue()  # noqa: SLF001 - numba has no other way
    if isinstance(kind, types.BaseTuple):
        for i, part in enumerate(kind):
            bare = _without_owner(context, builder, part, builder.extract_value(value, i))
            value = builder.insert_value(value, bare, i)
    return value


def _null(kind: Ir) -> Ir:
    make: Any = cgutils.get_null_value
    return make(kind)


borrowed: Any = intrinsic(_typed_borrowed)

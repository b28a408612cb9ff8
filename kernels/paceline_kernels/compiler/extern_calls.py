"""Compiled functions that compiled callers find by name when they are loaded, as they would one of a library.

numba puts a copy of what a function calls into it and optimises the copy again, so that the inside of a parallel loop
is compiled four times: by itself, as the loop's body, in what starts the body, and where the loop stands. A function
that is called by name exists once. The name holds the types of its arguments: a caller of other types finds nothing,
and never what would take its arguments for something else.

Knows numba's way to call a function. It refuses to know what functions compute, and where they are kept.
"""

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import llvmlite.binding
from numba import types
from numba.core import cgutils, sigutils
from numba.extending import intrinsic

from paceline_kernels.compiler.llvm import Ir

Kinds = tuple[Ir, ...]
"""Types as numba has them, one for each argument."""

_Function = TypeVar("_Function", bound=Callable[..., object])


def called_by_name(function: Callable[..., None]) -> Any:  # noqa: ANN401
    """A compiled function, for compiled callers that are `linked_to` it."""

    def typed(_context: Ir, *arguments: Ir) -> Ir:
        def generate(context: Ir, builder: Ir, signature: Ir, values: Ir) -> Ir:
            kinds, convention = signature.args[0].types, context.call_conv
            kind = convention.get_function_type(types.none, kinds)
            callee = cgutils.get_or_insert_function(builder.module, kind, _name(function, kinds))
            parts = cgutils.unpack_tuple(builder, values[0])
            status, _ = convention.call_function(builder, callee, types.none, kinds, parts)
            with cgutils.if_unlikely(builder, status.is_error):
                convention.return_status_propagate(builder, status)
            return context.get_dummy_value()

        return types.void(types.StarArgTuple(arguments)), generate

    return intrinsic(typed)


def linked_to(function: Callable[..., None], kinds_of: Callable[[Kinds], Kinds]) -> Callable[[_Function], _Function]:
    """Have a compiled function find this one: it is made ready whenever the other is compiled, or read from disk.

    `kinds_of` tells the types of this one's arguments from those of the other's.
    """

    def link(caller: _Function) -> _Function:
        dispatcher: Any = caller
        compile_caller = dispatcher.compile

        def compile_both(signature: Ir) -> Ir:
            _publish(function, kinds_of(sigutils.normalize_signature(signature)[0]))
            return compile_caller(signature)

        dispatcher.compile = compile_both
        return caller

    return link


def _publish(function: Callable[..., None], kinds: Kinds) -> None:
    dispatcher: Any = function
    dispatcher.compile(kinds)
    found = dispatcher.overloads[kinds]
    address = found.library.get_pointer_to_function(found.fndesc.llvm_func_name)
    llvmlite.binding.add_symbol(_name(function, kinds), address)


def _name(function: Callable[..., None], kinds: Kinds) -> str:
    digest = hashlib.blake2b(repr([str(kind) for kind in kinds]).encode(), digest_size=16).hexdigest()
    return f"{function.__module__}.{function.__qualname__}.{digest}"

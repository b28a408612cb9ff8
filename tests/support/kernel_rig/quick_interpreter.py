"""Triton's interpreter with less to do for each operation of a kernel: the same results in a third of the time.

It gives every value a type and a shape made anew, and renames all of its language for every function that a kernel
calls. Here types are made once, and the language is renamed where it is not. Knows the release of Triton that
`pyproject.toml` names. Refuses to know what operations compute.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import _LangPatchScope

_core: Any = tl.core
_interpreter: Any = interpreter

_semantic: Any = interpreter.TritonSemantic
_builder: Any = interpreter.interpreter_builder

PLAIN = [
    (owner, name, getattr(owner, name))
    for owner, name in (
        (_core.block_type, "__init__"),
        (_core.tensor, "__init__"),
        (_semantic, "broadcast_impl_value"),
        (_interpreter, "_get_np_dtype"),
        (_interpreter, "_patch_lang"),
        (_builder, "options"),
    )
]
"""What `quicken` replaces: where, by what name, and what was there."""

_new_block_type, _, _broadcast_any, _find_numpy_type, _rename_language, _options = (old for *_, old in PLAIN)
_block_types: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
_numpy_types: dict[str, np.dtype[Any]] = {}


def quicken() -> None:
    """For this process. A second call changes nothing."""
    # Else sums and products are computed twice, for an assertion that is off.
    options = replace(_options, sanitize_overflow=False)
    quick = (_block_type, _tensor, _broadcast, _numpy_type, _language_renamed_once, options)
    for (owner, name, _), new in zip(PLAIN, quick, strict=True):
        setattr(owner, name, new)


def _block_type(self: tl.block_type, element_ty: tl.dtype, shape: Sequence[int | tl.constexpr]) -> None:
    sizes = tuple(getattr(size, "value", size) for size in shape)
    known = _block_types.get((element_ty.name, sizes))
    if known is None:
        _new_block_type(self, element_ty, shape)
        _block_types[element_ty.name, sizes] = dict(self.__dict__)
    else:
        self.__dict__.update(known)


def _tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:  # noqa: A002, its name in Triton
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape(tuple(type.shape) if type.is_block() else ())


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _broadcast(self: interpreter.TritonSemantic, one: tl.tensor, other: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Of blocks of one shape there is nothing to do."""
    if one.type.is_block() and other.type.is_block() and one.type.shape.values == other.type.shape.values:
        return one, other
    both: tuple[tl.tensor, tl.tensor] = _broadcast_any(self, one, other)
    return both


def _numpy_type(dtype: tl.dtype) -> np.dtype[Any]:
    name: str = dtype.scalar.name
    if name not in _numpy_types:
        _numpy_types[name] = _find_numpy_type(dtype)
    return _numpy_types[name]


def _language_renamed_once(function: FunctionType) -> _LangPatchScope:
    """Operations that are renamed are no built-ins any more."""
    if any(_core.is_builtin(language.load) for language in _languages(function)):
        renamed: _LangPatchScope = _rename_language(function)
        return renamed
    return _LangPatchScope()


@functools.cache
def _languages(function: FunctionType) -> tuple[ModuleType, ...]:
    """What it knows Triton's operations by."""
    return tuple(one for one in function.__globals__.values() if one is tl or one is _core)

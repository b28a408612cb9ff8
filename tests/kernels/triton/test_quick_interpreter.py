"""The quick interpreter computes what Triton's own does, and refuses what that refuses."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from kernel_rig.quick_interpreter import PLAIN

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@triton.jit
def _wrapped(number):
    return number * 2147483647 + tl.program_id(0)


@triton.jit
def _operations(x, out, width: tl.constexpr, rows: tl.constexpr):
    columns, lines = tl.arange(0, width), tl.arange(0, rows)
    block = tl.load(x + lines[:, None] * width + columns[None, :], mask=columns[None, :] < width - 1, other=-1.0)
    product = tl.dot(block, tl.trans(block))
    sums = tl.sum(product, axis=1) + tl.max(block, axis=1).to(tl.float16).to(tl.float32)
    best = tl.argmax(block, axis=1) + _wrapped(lines)
    found = tl.where(best > 0, sums, -sums) + tl.cumsum(sums, axis=0)
    tl.store(out + tl.program_id(0) * rows + lines, found)


@triton.jit
def _mismatched(x, width: tl.constexpr):
    tl.store(x + tl.arange(0, width), tl.arange(0, width) + tl.arange(0, 2 * width))


def results():
    """Of all operations, and what is said of shapes that do not fit."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    out = torch.full((2, 16), float("nan"))
    _operations[(2,)](x, out, width=32, rows=16)
    with pytest.raises(InterpreterError) as refusal:
        _mismatched[(1,)](x, width=8)
    return out, str(refusal.value)


def test_the_quick_interpreter_computes_and_refuses_as_the_plain_one(monkeypatch):
    quick, refused = results()
    for owner, name, plain in PLAIN:
        assert getattr(owner, name) != plain
        monkeypatch.setattr(owner, name, plain)
    expected, sentence = results()
    assert torch.equal(quick, expected)
    assert not quick.isnan().any()
    assert refused == sentence

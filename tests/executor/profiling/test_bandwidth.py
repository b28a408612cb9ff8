"""What kernels achieved, from the events of a trace and the bytes that are known."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_executor.profiling.bandwidth import ATTENTION, LINEAR, achieved, context_bytes, kernel_times, kind_of
from paceline_kernels.warm_up.triton_kernels import KERNELS as KERNELS_BY_NAME

KERNELS = Path(importlib.util.find_spec("paceline_kernels").origin).parent


def kernel(name, microseconds):
    """As torch.profiler writes one."""
    return {"ph": "X", "cat": "kernel", "name": name, "ts": 1.0, "dur": microseconds, "pid": 0, "tid": 7}


def test_bytes_per_second_are_of_all_kernels_of_a_kind():
    events = [
        kernel("attend_splits", 30.0),
        kernel("fold_partials", 10.0),
        kernel("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", 40.0),
        kernel("nvjet_hsh_128x64_64x11_1x2_h_bz_TNT", 60.0),
        kernel("rms_norm_kernel", 500.0),
        {"ph": "X", "cat": "cpu_op", "name": "aten::gemm", "ts": 1.0, "dur": 9.0},
        {"ph": "M", "name": "process_name", "args": {}},
    ]
    rates = achieved(kernel_times(events), {ATTENTION: 8_000, LINEAR: 300_000, "other": 5})
    assert rates == pytest.approx({ATTENTION: 8_000 / 40e-6, LINEAR: 300_000 / 100e-6})


@pytest.mark.parametrize(("folder", "kind"), [("attention", ATTENTION), ("linear", LINEAR), ("grouped_linear", LINEAR)])
def test_the_kernels_that_are_launched_here_are_known_by_name(folder, kind):
    """Those of the operation, as they stand in its files; a new one has to be of its kind, too."""
    sources = "".join(file.read_text() for file in (KERNELS / folder / "triton").glob("*.py"))
    launched = set(re.findall(r"^ +(\w+)\[.+\]\(", sources, re.MULTILINE))
    assert launched
    assert {kind_of(name) for name in launched} == {kind}


def test_no_other_kernel_is_taken_for_one_of_these():
    ours = r"\.(attention|(grouped_)?linear)\."
    others = [name.rpartition(".")[2] for name in KERNELS_BY_NAME if not re.search(ours, name)]
    assert "gate_and_multiply_kernel" in others
    assert {kind_of(name) for name in others} == {None}


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 50)), max_size=6),
    st.lists(st.none() | st.integers(1, 100), min_size=1, max_size=3),
)
def test_context_bytes_are_those_of_the_positions_that_some_token_sees(rows, windows):
    """Counted one by one: a token at position p sees p and the window - 1 positions before it."""
    lens = [context + count - 1 for context, count in rows]
    counts = [count for _, count in rows]
    seen = sum(
        len({at for p in range(end - count, end) for at in range(max(0, p - (window or end) + 1), p + 1)})
        for window in windows
        for end, count in zip(lens, counts, strict=True)
    )
    columns = (np.array(column, dtype=np.int32) for column in (lens, counts))
    assert context_bytes(*columns, windows, 3) == 3 * seen

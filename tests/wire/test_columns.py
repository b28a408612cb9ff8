"""Columns on the plan stream: little-endian int32 values in one bytes field."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.v1.plan_pb2 import AttachRequest, BatchPlan

int32s = st.integers(min_value=-(2**31), max_value=2**31 - 1)


def column(values):
    """A column as this machine writes it: numpy's explicit little-endian type."""
    return np.asarray(values, dtype="<i4").tobytes()


def test_a_column_is_little_endian_on_every_machine():
    """The bytes are fixed by the protocol, not by the processor."""
    assert column([1, -2, 0x01020304]) == b"\x01\x00\x00\x00\xfe\xff\xff\xff\x04\x03\x02\x01"


@given(values=st.lists(int32s, max_size=50))
def test_a_column_arrives_as_it_was_sent(values):
    """Every int32 value survives the message, in order."""
    sent = BatchPlan(rows=column(values)).SerializeToString()
    arrived = BatchPlan.FromString(sent).rows
    assert [int.from_bytes(arrived[i : i + 4], "little", signed=True) for i in range(0, len(arrived), 4)] == values
    assert np.frombuffer(arrived, dtype="<i4").tolist() == values


def test_a_plan_of_256_decoding_rows_stays_small():
    """The steady state costs two columns and a few numbers: at most 3 kB for 256 rows that each get a block."""
    rows = list(range(256))
    plan = BatchPlan(
        incarnation=2**63, epoch=2**40, step_id=2**40, rows=column(rows), num_scheduled_tokens=column([1] * 256)
    )
    plan.grants.rows = column(rows[:16])
    plan.grants.indices = column([127] * 16)
    plan.grants.block_ids = column([2**30] * 16)
    plan.predicted_ns = 10**7
    assert len(AttachRequest(plan=plan).SerializeToString()) <= 3000

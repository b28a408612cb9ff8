"""When an executor takes itself for the cause of steps that fail: at the third request that fails alone."""

from hypothesis import given
from hypothesis import strategies as st

from executor_rig.plans import placement, plan
from paceline_executor.errors import DeviceError
from paceline_executor.limits import RowLimits
from paceline_executor.link.failure_attribution import MAX_BLAMED, FailureAttribution
from paceline_executor.rows.table import RowTable

LIMITS = RowLimits(
    num_rows=5, max_model_len=16, max_num_batched_tokens=20, num_blocks=12, block_size=4, vocab_size=1000
)
STEPS = st.lists(st.tuples(st.sets(st.integers(0, 4), min_size=1, max_size=2), st.integers(0, 3)), max_size=30)


def end_by_the_executor(steps):
    """At which step the executor's rule ends the process; None: at none."""
    table, rule = RowTable(LIMITS), FailureAttribution()
    table.launch(plan(place=[placement(row, [1, 2], name=f"request-{row}") for row in range(5)]), 0)
    for number, (rows, luck) in enumerate(steps):
        step = plan([(row, 1) for row in sorted(rows)], step_id=number + 2)
        try:
            if luck:
                rule.failed(step, table)
            else:
                rule.succeeded(step)
        except DeviceError:
            return number
    return None


def end_by_counting(steps):
    """The same, from all that has happened since a step last succeeded."""
    for number in range(len(steps)):
        since = [rows for rows, luck in steps[: number + 1]]
        succeeded = [place for place, (_, luck) in enumerate(steps[: number + 1]) if not luck]
        alone = {min(rows) for rows in since[succeeded[-1] + 1 if succeeded else 0 :] if len(rows) == 1}
        if len(alone) > MAX_BLAMED:
            return number
    return None


@given(STEPS)
def test_an_executor_ends_at_the_third_request_that_fails_alone_since_a_step_succeeded(steps):
    assert end_by_the_executor(steps) == end_by_counting(steps)

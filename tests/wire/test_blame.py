"""When an executor takes itself for the cause of steps that fail: its own rule and the simulator's come to the same."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.values import RecordId
from paceline_executor.errors import DeviceError
from paceline_executor.link.failure_attribution import FailureAttribution
from paceline_executor.rows.limits import RowLimits
from paceline_executor.rows.table import RowTable
from paceline_executor.testing.plans import placement, plan
from paceline_scheduler.simulator.failures import Blame

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


def end_by_the_simulator(steps):
    """The same by the simulator's rule."""
    rule = Blame()
    for number, (rows, luck) in enumerate(steps):
        if not luck:
            rule.is_nobodys()
        elif rule.is_executors([RecordId("", f"request-{row}", 0) for row in sorted(rows)]):
            return number
    return None


@given(STEPS)
def test_both_rules_end_an_executor_at_the_same_step(steps):
    """Whatever fails and succeeds, in whatever order."""
    assert end_by_the_executor(steps) == end_by_the_simulator(steps)

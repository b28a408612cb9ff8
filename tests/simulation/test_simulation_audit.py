"""What the simulation's auditor tells of plans that an executor runs, though a scheduler must not send them."""

from dataclasses import replace

import pytest

from both_sides.audited import AuditedRows, Kind
from executor_rig.hash_runner import HashRule
from executor_rig.plans import int32, placement, plan
from paceline.plan.values import RecordId
from paceline_executor.errors import PlanError, StepFailedError
from paceline_executor.limits import RowLimits
from paceline_executor.runner.step_times import StepTimeCurve

LIMITS = RowLimits(
    num_rows=3,
    max_model_len=24,
    max_num_batched_tokens=16,
    num_blocks=8,
    block_size=4,
    vocab_size=1000,
    max_num_draft_tokens=8,
)
PROMPT = (1, 2, 3, 4, 5)
FIRST, SECOND = b"k" * 16, b"l" * 16
CELLS = [(0, 0, 3), (0, 1, 4)]


class Audited:
    """An executor's rows with the auditor, and what it tells."""

    def __init__(self, num_right=lambda num_drafts: 1):
        self.told, self.failing = [], set()
        kind = Kind(LIMITS, "hash", HashRule(1000), lambda num_drafts: num_right(num_drafts) + 1, StepTimeCurve())
        self.table = AuditedRows(kind, self.failing, {}, self.told)
        self.audit, self.engine = self.table.audit, self.table.loaded.engine

    def run(self, *plans):
        """Let plans arrive together and then run; returns the rules they break."""
        for each in plans:
            self.audit.arrives(each, self.table)
        for each in plans:
            self.engine.collect(self.engine.launch(each))
        return self.rules()

    def result(self, each):
        """Let a plan arrive and run; returns what came of it."""
        self.audit.arrives(each, self.table)
        return self.engine.collect(self.engine.launch(each))

    def rules(self):
        """The rules that were broken, without where; and forget them."""
        rules = [sentence.partition(":")[0] for sentence in self.told]
        self.told.clear()
        return rules


def of(tenant, new, **changes):
    return replace(new, record_id=RecordId(tenant, new.record_id.request_id), **changes)


@pytest.fixture
def executor():
    """One on which a request of the tenant "" has computed a block and a token, and got another."""
    executor = Audited()
    assert executor.run(plan([(0, 5)], place=[placement(0, PROMPT)], grants=CELLS)) == []
    return executor


def test_a_plan_that_keeps_all_rules_is_not_told_of(executor):
    assert executor.run(plan([(0, 1)], tags=[(3, FIRST)])) == []
    sharing = placement(1, PROMPT, num_cached_tokens=4)
    assert executor.run(plan([(1, 1)], place=[sharing], shared=[(1, 0, 3)], grants=[(1, 1, 5)])) == []


def test_a_row_is_used_again_only_when_its_release_is_confirmed(executor):
    """The release runs before the placement, but who sent both could not know that."""
    again = plan([(0, 5)], place=[placement(0, PROMPT, name="another")], grants=CELLS)
    assert executor.run(plan(preempt=[0]), again) == ["row reuse before confirmation"]


def test_a_request_is_placed_again_only_when_it_has_left_its_row(executor):
    again = placement(1, PROMPT, name="request-0", output=executor.table.states()[0].output_token_ids)
    plans = plan(preempt=[0]), plan([(1, 6)], place=[replace(again, attempt=2)], grants=[(1, 0, 5), (1, 1, 6)])
    assert executor.run(*plans) == ["placement of a request that has not left its row"]


def test_a_block_is_tagged_when_it_is_full(executor):
    filling = plan([(0, 1)]), plan([(0, 1)]), plan([(0, 1)])
    assert executor.run(*filling, plan(tags=[(4, FIRST)])) == ["tag of a block before the result that filled it"]
    assert executor.run(plan(tags=[(4, SECOND)])) == []


def test_a_tag_stands_for_one_contents(executor):
    executor.run(plan([(0, 1)]), plan([(0, 1)]), plan([(0, 1)]))
    assert executor.run(plan(tags=[(3, FIRST), (4, FIRST)])) == ["one key for two contents"]


def test_a_tagged_block_belongs_to_somebody(executor):
    executor.run(plan(preempt=[0]))
    assert executor.run(plan(tags=[(3, FIRST)])) == ["tag of a released block"]


def test_only_tagged_blocks_are_shared(executor):
    sharing = placement(1, PROMPT, num_cached_tokens=4)
    told = executor.run(plan([(1, 1)], place=[sharing], shared=[(1, 0, 3)], grants=[(1, 1, 5)]))
    assert told == ["share of a block without a tag", "share across tenants"]


def test_no_block_is_shared_across_tenants(executor):
    """Not even with the same tokens."""
    executor.run(plan(tags=[(3, FIRST)]))
    sharing = of("red", placement(1, PROMPT, num_cached_tokens=4))
    told = executor.run(plan([(1, 1)], place=[sharing], shared=[(1, 0, 3)], grants=[(1, 1, 5)]))
    assert told == ["share across tenants"]


def test_what_is_cached_are_the_tokens_of_the_row(executor):
    executor.run(plan(tags=[(3, FIRST)]))
    sharing = placement(1, (1, 2, 9, 4, 5), num_cached_tokens=4)
    told = executor.run(plan([(1, 1)], place=[sharing], shared=[(1, 0, 3)], grants=[(1, 1, 5)]))
    assert told == ["shared blocks hold the row's tokens"]


def test_a_slot_is_read_only_when_it_was_written(executor):
    told = executor.run(
        plan([(1, 1)], place=[placement(1, PROMPT, num_cached_tokens=4)], grants=[(1, 0, 5), (1, 1, 6)])
    )
    assert told == ["shared blocks hold the row's tokens", "read of an unwritten slot"]


def test_a_request_goes_on_with_the_output_it_had(executor):
    executor.run(plan(preempt=[0]))
    again = placement(1, PROMPT, name="request-0")
    told = executor.run(plan([(1, 5)], place=[again], grants=[(1, 0, 5), (1, 1, 6)]))
    assert told == ["an attempt is higher than the one before", "a request continues with the output it had"]


def test_a_tagged_block_is_not_written_to(executor):
    executor.run(plan([(0, 1)]), plan([(0, 1)]))
    assert executor.run(plan([(0, 1)], tags=[(4, FIRST)]))[-1] == "write to a tagged block"


def test_a_request_that_cannot_run_is_told_of(executor):
    told = executor.run(plan(place=[placement(1, PROMPT, max_tokens=0)]))
    assert told == ["at least one token is left to generate", "a request that can run"]


def test_what_an_executor_refuses_is_told_of(executor):
    before = executor.table.states()
    with pytest.raises(PlanError):
        executor.run(plan([(0, 1), (1, 1)], tags=[(3, FIRST)]))
    assert executor.rules() == ["row 1 is scheduled but holds no request"]
    assert repr(executor.table.states()) == repr(before)
    assert executor.table.num_tagged_blocks == 0


def test_a_step_with_a_failing_request_fails_and_what_it_was_granted_holds_nothing(executor):
    executor.failing.add(RecordId("", "request-0"))
    with pytest.raises(StepFailedError):
        executor.run(plan([(0, 1)], grants=[(0, 2, 5)]))
    assert executor.rules() == []
    assert not executor.audit._is_full(5)


def test_drafts_bring_more_tokens_and_the_same_ones(executor):
    drafting = replace(plan([(0, 4)], grants=[(0, 2, 5)]), num_draft_tokens=int32([3]))
    assert executor.run(drafting) == []
    (row,) = executor.table.states()
    plainly = Audited()
    plainly.run(plan([(0, 5)], place=[placement(0, PROMPT)], grants=[*CELLS, (0, 2, 5)]))
    plainly.run(*(plan([(0, 1)]) for _ in range(row.output_token_ids.size - 1)))
    assert row.output_token_ids.tolist() == plainly.table.states()[0].output_token_ids.tolist()
    assert row.num_computed_tokens == 4 + row.output_token_ids.size


@pytest.mark.parametrize("num_right", range(3))
def test_right_drafts_are_the_tokens_that_come_anyway_and_wrong_ones_fill_nothing(num_right):
    """From none to both; a block with a wrong draft in it cannot be tagged."""
    executor, plainly = Audited(lambda num_drafts: num_right), Audited()
    for each in (executor, plainly):
        each.run(plan([(0, 5)], place=[placement(0, PROMPT)], grants=CELLS))
    result = executor.result(replace(plan([(0, 3)]), num_draft_tokens=int32([2])))
    plainly.run(*(plan([(0, 1)]) for _ in range(3)))
    (row,), (whole,) = executor.table.states(), plainly.table.states()
    assert result.num_accepted.tolist() == [num_right + 1]
    assert result.num_draft_tokens.tolist() == [2]
    assert row.output_token_ids.tolist() == whole.output_token_ids[: 2 + num_right].tolist()
    assert row.num_computed_tokens == 6 + num_right
    assert executor.audit._is_full(4) == (num_right == 2)
    assert executor.rules() == []

"""A plan that breaks a rule of the protocol is a loud error of the simulated executor, never a silent result."""

import dataclasses

import pytest

from paceline.plan.values import (
    NO_GRANTS,
    BatchPlan,
    BlockGrants,
    BlockTags,
    FinalRelease,
    FinishReason,
    Release,
    RowFinish,
)
from paceline_scheduler.simulator.tokens import AcceptanceRule
from paceline_scheduler.simulator.violations import PlanViolationError
from paceline_scheduler.testing.requests import column, expected_output, make_executor, make_placement, make_request

KEY = bytes(range(16))


def grants(*triples):
    """Write (row, index, block) down as columns."""
    return BlockGrants(*(column(*values) for values in zip(*triples, strict=True))) if triples else NO_GRANTS


class Driven:
    """An executor with blocks of 4 slots, and a way to write plans down in short."""

    def __init__(self, **options) -> None:
        self.executor = make_executor(**options)
        self.description, _ = self.executor.attach("x")
        self.step_id = 0

    def plan(self, scheduled=(), **changes):
        """Return the next plan; `scheduled` are (row, tokens)."""
        self.step_id += 1
        rows, counts = zip(*scheduled, strict=True) if scheduled else ((), ())
        head = (self.description.incarnation, self.description.epoch, self.step_id)
        return BatchPlan(*head, column(*rows), column(*counts), 0, **changes)

    def step(self, scheduled=(), **changes):
        """Run the next plan."""
        return self.executor.execute(self.plan(scheduled, **changes))

    def place(self, row, request, **changes):
        """Return the first placement of a request."""
        first = make_placement(row, request)
        return dataclasses.replace(first, **changes)

    def with_prompt_of_5_computed(self):
        """Row 0 holds 5 prompt tokens and 1 output token, in blocks 10 and 11."""
        request = make_request(5, 8)
        self.step([(0, 5)], new_requests=(self.place(0, request),), grants=grants((0, 0, 10), (0, 1, 11)))
        return request


def violation(rule):
    """Expect the rule to be broken."""
    return pytest.raises(PlanViolationError, match=f"^{rule}")


def test_a_plan_of_another_epoch_or_a_gap_is_refused():
    """Incarnation, epoch and step_id are checked before anything else."""
    driven = Driven()
    with violation("a plan names the epoch"):
        driven.executor.execute(dataclasses.replace(driven.plan(), epoch=7))
    with violation("no gap between plans"):
        driven.executor.execute(dataclasses.replace(driven.plan(), step_id=9))


def test_a_row_writes_only_into_blocks_granted_to_it():
    """Without a grant there is no slot."""
    driven = Driven()
    with violation("write to a block that was not granted"):
        driven.step([(0, 5)], new_requests=(driven.place(0, make_request(5)),), grants=grants((0, 0, 10)))


def test_a_block_in_use_is_not_granted_again():
    """Two rows never own one block."""
    driven = Driven()
    driven.with_prompt_of_5_computed()
    with violation("grant of a block in use"):
        driven.step(new_requests=(driven.place(1, make_request(2)),), grants=grants((1, 0, 10)))


def test_a_block_released_in_a_plan_may_be_granted_in_it():
    """Plan order is device order."""
    driven = Driven()
    driven.with_prompt_of_5_computed()
    other = make_request(2, 1)
    result = driven.step(
        [(1, 2)],
        releases=(Release(0, None),),
        new_requests=(driven.place(1, other),),
        grants=grants((1, 0, 10)),
    )
    assert result.finishes.tolist() == [RowFinish.LENGTH]


def test_a_row_is_reused_only_after_its_release_has_run():
    """Until the result confirms a release, the row and the request stay where they are."""
    driven = Driven()
    request = driven.with_prompt_of_5_computed()
    driven.executor.receive(driven.plan(releases=(Release(0, None),)))
    with violation("row reuse before confirmation"):
        driven.executor.receive(driven.plan(new_requests=(driven.place(0, make_request(2)),)))
    with violation("placement of a request that has not left its row"):
        driven.executor.receive(dataclasses.replace(driven.plan(new_requests=(driven.place(1, request),)), step_id=3))


def test_nothing_is_scheduled_beyond_the_known_tokens():
    """A row with one uncomputed token runs one token."""
    driven = Driven()
    driven.with_prompt_of_5_computed()
    with violation("no row is scheduled beyond its known tokens"):
        driven.step([(0, 2)])


@pytest.mark.parametrize(
    ("num_scheduled", "drafts", "rule"),
    [
        (3, (), "no row is scheduled beyond its known tokens"),
        (3, (1,), "no row is scheduled beyond its known tokens"),
        (3, (3,), "drafts follow a token that is none"),
        (3, (-1,), "drafts follow a token that is none"),
        (3, (2, 0), "columns have the same length"),
        (8, (7,), "no row is scheduled beyond its last token"),
        (4, (3,), "write to a block that was not granted"),
    ],
)
def test_drafts_follow_the_last_known_token_in_blocks_of_the_row(num_scheduled, drafts, rule):
    """Row 0 knows the token at position 5, may compute position 11 as its last one, and has blocks up to 7."""
    driven = Driven()
    driven.with_prompt_of_5_computed()
    with violation(rule):
        driven.step([(0, num_scheduled)], num_draft_tokens=column(*drafts))


def test_no_draft_follows_a_chunk_that_ends_before_the_last_known_token():
    """What comes next is known."""
    driven = Driven()
    place = driven.place(0, make_request(7))
    with violation("drafts follow the last known token"):
        driven.step([(0, 5)], new_requests=(place,), grants=grants((0, 0, 0), (0, 1, 1)), num_draft_tokens=column(2))


@pytest.mark.parametrize("seed", range(12))
def test_accepted_drafts_are_the_tokens_that_come_anyway_and_refused_ones_fill_nothing(seed):
    """From none to three tokens, as the seed says; a block with a refused draft in it cannot be tagged."""
    driven = Driven(acceptance=AcceptanceRule(seed))
    request = driven.with_prompt_of_5_computed()
    result = driven.step([(0, 3)], num_draft_tokens=column(2))
    (num_accepted,) = result.num_accepted.tolist()
    assert 0 <= num_accepted <= 3
    assert result.num_draft_tokens.tolist() == [2 if num_accepted else 0]
    assert tuple(result.token_ids.tolist()) == expected_output(request)[1 : 1 + num_accepted]
    assert driven.executor.rows[0].num_computed_tokens == 5 + num_accepted
    assert driven.executor.blocks.is_full(11) == (num_accepted == 3)


def test_only_full_blocks_are_tagged_and_only_after_their_result():
    """A tag in the plan right behind the chunk that fills the block is too early."""
    driven = Driven()
    driven.with_prompt_of_5_computed()
    with violation("tag of a block before the result that filled it"):
        driven.step(tags=BlockTags.of([(11, KEY)]))
    early = Driven()
    chunk = early.plan([(0, 5)], new_requests=(early.place(0, make_request(5)),), grants=grants((0, 0, 10), (0, 1, 11)))
    early.executor.receive(chunk)
    with violation("tag of a block before the result that filled it"):
        early.executor.receive(early.plan(tags=BlockTags.of([(10, KEY)])))


def test_a_released_block_is_never_tagged():
    """It may be granted to somebody else by then."""
    driven = Driven()
    driven.with_prompt_of_5_computed()
    driven.step(releases=(Release(0, None),))
    with violation("tag of a released block"):
        driven.step(tags=BlockTags.of([(10, KEY)]))


def test_a_tagged_block_is_shared_inside_its_tenant_and_never_written():
    """Hits start computing behind the shared blocks; another tenant gets none."""
    driven = Driven()
    request = driven.with_prompt_of_5_computed()
    driven.step(tags=BlockTags.of([(10, KEY)]))
    twin = make_request(list(request.prompt_token_ids), 1, seed=request.sampling.seed)
    placed = driven.place(1, twin, num_cached_tokens=4)
    result = driven.step([(1, 1)], new_requests=(placed,), shared=grants((1, 0, 10)), grants=grants((1, 1, 20)))
    assert result.token_ids.tolist() == [int(driven.executor.rows[0].token_ids[5])]
    stranger = make_request(list(request.prompt_token_ids), 1, tenant="other")
    with violation("share across tenants"):
        placed = driven.place(2, stranger, num_cached_tokens=4)
        driven.step([(2, 1)], new_requests=(placed,), shared=grants((2, 0, 10)), grants=grants((2, 1, 21)))


def test_a_write_grant_clears_the_tag():
    """What was cached there cannot be hit any more."""
    driven = Driven()
    driven.with_prompt_of_5_computed()
    driven.step(tags=BlockTags.of([(10, KEY)]))
    driven.step(releases=(Release(0, FinalRelease(1, FinishReason.STOP)),))
    assert list(driven.executor.snapshot().tags) == [(10, KEY)]
    driven.step(new_requests=(driven.place(1, make_request(2)),), grants=grants((1, 0, 10)))
    assert list(driven.executor.snapshot().tags) == []


def test_a_row_that_ended_returns_nothing_more():
    """Plans written before the end was known write nothing and return 0; the row says how it ended."""
    driven = Driven()
    driven.step([(0, 2)], new_requests=(driven.place(0, make_request(2, 1)),), grants=grants((0, 0, 10)))
    result = driven.step([(0, 1)])
    assert result.num_accepted.tolist() == [0]
    assert result.finishes.tolist() == [RowFinish.LENGTH]


def test_one_row_can_fail_alone():
    """Its neighbour goes on."""
    driven = Driven()
    first, second = make_request(2), make_request(2)
    driven.step(new_requests=(driven.place(0, first), driven.place(1, second)), grants=grants((0, 0, 10), (1, 0, 11)))
    driven.executor.fail_row(first.key, "NUMERIC_FAULT", "no usable number")
    result = driven.step([(0, 2), (1, 2)])
    assert [(error.row, error.reason, error.message) for error in result.errors] == [
        (0, "NUMERIC_FAULT", "no usable number")
    ]
    assert result.num_accepted.tolist() == [0, 1]


def test_a_final_release_cuts_the_record_and_a_preemption_does_not():
    """The record is what a client may ask for again."""
    driven = Driven()
    driven.with_prompt_of_5_computed()
    driven.step([(0, 1)])
    driven.step(releases=(Release(0, FinalRelease(1, FinishReason.STOP)),))
    (record,) = driven.executor.snapshot().rows
    assert record.row is None
    assert len(record.output_token_ids) == 1
    assert record.released == FinalRelease(1, FinishReason.STOP)
    driven.step(forget=(record.record_id,))
    assert driven.executor.snapshot().rows == ()


def test_attaching_drops_plans_that_did_not_run_and_begins_an_epoch():
    """The snapshot is the state of the last finished step."""
    driven = Driven()
    request = driven.with_prompt_of_5_computed()
    driven.executor.receive(driven.plan(releases=(Release(0, None),)))
    description, snapshot = driven.executor.attach("x")
    assert description.epoch == 2
    assert driven.executor.num_plans_waiting == 0
    assert [(row.record_id, row.row, row.num_computed_tokens) for row in snapshot.rows] == [(request.key, 0, 5)]


def test_a_restart_is_another_incarnation_that_knows_nothing():
    """Weights come back, requests do not."""
    driven = Driven()
    driven.with_prompt_of_5_computed()
    driven.executor.restart()
    description, snapshot = driven.executor.attach("x")
    assert (description.incarnation, description.epoch) == (driven.description.incarnation + 1, 1)
    assert snapshot.rows == ()


def test_step_times_lie_on_the_line_between_the_measured_points():
    """And beyond them on the line through the last two."""
    config = make_executor().config
    assert config.step_ns(1) == 1_000_000
    assert config.step_ns(64) == 4_000_000
    assert config.step_ns(127) == 7_000_000
    assert config.step_ns(0) == 0

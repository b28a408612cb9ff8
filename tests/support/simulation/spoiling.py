"""Plans that no executor may take, made of sound ones.

Each way changes one thing that an executor has to notice before anything has taken effect.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from paceline.plan.codec import encode_request
from paceline.plan.values import (
    KEY_BYTES,
    BatchPlan,
    BlockCopies,
    BlockGrants,
    BlockTags,
    Int32Array,
    NewRequest,
    Release,
)
from simulation.mangling import Arrivals, plans_in
from simulation.network import Call, Inbox
from simulation.scenario import FEWEST_BLOCKS

_FAR = 5_000  # no row, block or index of any simulated executor
_BEYOND = 10_000  # no row of any executor that there may be


class PlanSpoiler:
    """Changes plans, each in another way, so that no executor may take them; who gets one must be as it was before."""

    def __init__(self, random: Random, tell: Callable[[str], None]) -> None:
        self._random = random
        self._tell = tell
        self._unused = list(_WAYS_TO_SPOIL)

    def __call__(self, call: Call, inbox: Inbox, message: object) -> Arrivals | None:
        """Return a spoilt plan, or None: the message, as it should."""
        plans = plans_in(call, inbox, message)
        ways = [way for way in self._unused if plans and way(plans[-1]) is not None]
        if not ways:
            return None
        call.tampered(len(plans))
        way = self._random.choice(ways)
        self._unused.remove(way)
        self._tell(f"step {plans[-1].step_id} of {call.method} {call.number} is spoilt: {way.__name__.strip('_')}")
        spoilt = way(plans[-1])
        assert spoilt is not None, "it was one of the ways"
        return [(0.0, encode_request(*plans[:-1], spoilt))]


def _cells_of_no_row(plan: BatchPlan) -> BatchPlan | None:
    return _with_grants(plan, lambda grants: replace(grants, rows=grants.rows + _FAR))


def _blocks_that_are_none(plan: BatchPlan) -> BatchPlan | None:
    return _with_grants(plan, lambda grants: replace(grants, block_ids=grants.block_ids + _FAR))


def _cells_beyond_the_table(plan: BatchPlan) -> BatchPlan | None:
    return _with_grants(plan, lambda grants: replace(grants, indices=grants.indices + _FAR))


def _a_gap_in_the_table(plan: BatchPlan) -> BatchPlan | None:
    return _with_grants(plan, lambda grants: replace(grants, indices=grants.indices + 1))


def _blocks_granted_twice(plan: BatchPlan) -> BatchPlan | None:
    return _with_grants(plan, lambda grants: BlockGrants(*(np.tile(column, 2) for column in _columns(grants))))


def _a_cell_granted_twice(plan: BatchPlan) -> BatchPlan | None:
    """With a block of its own each time, which no other cell has."""

    def twice(grants: BlockGrants) -> BlockGrants:
        free = [block for block in range(FEWEST_BLOCKS) if block not in grants.block_ids]
        more = np.resize(np.array(free, dtype=np.int32), len(grants.block_ids))
        return BlockGrants(
            np.tile(grants.rows, 2), np.tile(grants.indices, 2), np.concatenate([grants.block_ids, more])
        )

    return _with_grants(plan, twice)


def _a_column_cut(plan: BatchPlan) -> BatchPlan | None:
    return _with_grants(plan, lambda grants: replace(grants, rows=grants.rows[1:]))


def _a_row_twice(plan: BatchPlan) -> BatchPlan | None:
    twice = np.tile(plan.rows, 2), np.tile(plan.num_scheduled_tokens, 2)
    return replace(plan, rows=twice[0], num_scheduled_tokens=twice[1]) if plan.rows.size else None


def _rows_that_are_none(plan: BatchPlan) -> BatchPlan | None:
    return replace(plan, rows=plan.rows + _FAR) if plan.rows.size else None


def _rows_beyond_the_protocol(plan: BatchPlan) -> BatchPlan | None:
    return replace(plan, rows=plan.rows + _BEYOND) if plan.rows.size else None


def _rows_with_nothing_to_compute(plan: BatchPlan) -> BatchPlan | None:
    return replace(plan, num_scheduled_tokens=plan.num_scheduled_tokens * 0) if plan.rows.size else None


def _tokens_beyond_the_step(plan: BatchPlan) -> BatchPlan | None:
    return replace(plan, num_scheduled_tokens=plan.num_scheduled_tokens + _FAR) if plan.rows.size else None


def _tokens_beyond_the_known(plan: BatchPlan) -> BatchPlan | None:
    """A row computes its last token, as most do, and one more."""
    return replace(plan, num_scheduled_tokens=plan.num_scheduled_tokens + 8) if plan.rows.size else None


def _fewer_lengths_than_rows(plan: BatchPlan) -> BatchPlan | None:
    return replace(plan, num_scheduled_tokens=plan.num_scheduled_tokens[1:]) if plan.rows.size else None


def _drafts_alone(plan: BatchPlan) -> BatchPlan | None:
    return replace(plan, num_draft_tokens=plan.num_scheduled_tokens) if plan.rows.size else None


def _drafts_below_none(plan: BatchPlan) -> BatchPlan | None:
    return replace(plan, num_draft_tokens=plan.num_scheduled_tokens * 0 - 1) if plan.rows.size else None


def _a_release_of_no_row(plan: BatchPlan) -> BatchPlan | None:
    return replace(plan, releases=(*plan.releases, Release(_FAR, None)))


def _a_release_twice(plan: BatchPlan) -> BatchPlan | None:
    return replace(plan, releases=(*plan.releases, *plan.releases)) if plan.releases else None


def _a_release_beyond_the_output(plan: BatchPlan) -> BatchPlan | None:
    spoilt = [
        replace(release, final=replace(release.final, num_output_tokens=_FAR))
        for release in plan.releases
        if release.final is not None
    ]
    return replace(plan, releases=tuple(spoilt)) if spoilt else None


def _a_request_on_two_rows(plan: BatchPlan) -> BatchPlan | None:
    more = tuple(replace(new, row=(new.row + 1) % 2) for new in plan.new_requests)
    return replace(plan, new_requests=(*plan.new_requests, *more)) if more else None


def _a_request_on_a_row_in_use(plan: BatchPlan) -> BatchPlan | None:
    in_use = set(plan.rows.tolist()) - {new.row for new in plan.new_requests}
    moved = tuple(replace(new, row=min(in_use)) for new in plan.new_requests if in_use)
    return replace(plan, new_requests=moved) if moved else None


def _a_request_on_a_row_released_now(plan: BatchPlan) -> BatchPlan | None:
    moved = tuple(replace(new, row=plan.releases[0].row) for new in plan.new_requests if plan.releases)
    return replace(plan, new_requests=moved) if moved else None


def _a_request_without_a_name(plan: BatchPlan) -> BatchPlan | None:
    nameless = tuple(replace(new, record_id=replace(new.record_id, request_id="")) for new in plan.new_requests)
    return replace(plan, new_requests=nameless) if nameless else None


def _all_tokens_cached(plan: BatchPlan) -> BatchPlan | None:
    cached = tuple(_with_cached(new, _FAR) for new in plan.new_requests)
    return replace(plan, new_requests=cached) if cached else None


def _nothing_left_to_compute(plan: BatchPlan) -> BatchPlan | None:
    cached = tuple(_with_cached(new, _num_known(new)) for new in plan.new_requests)
    return replace(plan, new_requests=cached) if cached else None


def _cached_tokens_in_blocks_of_nobody(plan: BatchPlan) -> BatchPlan | None:
    cached = tuple(_with_cached(new, _num_known(new) - 1) for new in plan.new_requests)
    is_long = any(new.num_cached_tokens for new in cached)
    nothing = np.zeros(0, dtype=np.int32)
    return replace(plan, new_requests=cached, grants=BlockGrants(nothing, nothing, nothing)) if is_long else None


def _with_cached(new: NewRequest, num_cached: int) -> NewRequest:
    """Without log-probabilities of the prompt, with which the request would fail alone."""
    return replace(new, num_cached_tokens=num_cached, num_prompt_logprobs=None)


def _num_known(new: NewRequest) -> int:
    return len(new.prompt_token_ids) + len(new.output_token_ids)


def _a_tag_of_no_block(plan: BatchPlan) -> BatchPlan | None:
    return replace(plan, tags=BlockTags.of([(_FAR, bytes(KEY_BYTES))]))


def _a_copy_without_a_grant(plan: BatchPlan) -> BatchPlan | None:
    free = [block for block in range(FEWEST_BLOCKS) if block not in plan.grants.block_ids]
    copy = np.array(free[:1], dtype=np.int32)
    return None if not free else replace(plan, copies=BlockCopies(copy, copy))


def _with_grants(plan: BatchPlan, spoil: Callable[[BlockGrants], BlockGrants]) -> BatchPlan | None:
    return replace(plan, grants=spoil(plan.grants)) if plan.grants.rows.size else None


def _columns(grants: BlockGrants) -> tuple[Int32Array, ...]:
    return grants.rows, grants.indices, grants.block_ids


_WAYS_TO_SPOIL = (
    _cells_of_no_row,
    _blocks_that_are_none,
    _cells_beyond_the_table,
    _a_gap_in_the_table,
    _blocks_granted_twice,
    _a_cell_granted_twice,
    _a_column_cut,
    _a_row_twice,
    _rows_that_are_none,
    _rows_beyond_the_protocol,
    _rows_with_nothing_to_compute,
    _tokens_beyond_the_step,
    _tokens_beyond_the_known,
    _fewer_lengths_than_rows,
    _drafts_alone,
    _drafts_below_none,
    _a_release_of_no_row,
    _a_release_twice,
    _a_release_beyond_the_output,
    _a_request_on_two_rows,
    _a_request_on_a_row_in_use,
    _a_request_on_a_row_released_now,
    _a_request_without_a_name,
    _nothing_left_to_compute,
    _cached_tokens_in_blocks_of_nobody,
    _all_tokens_cached,
    _a_tag_of_no_block,
    _a_copy_without_a_grant,
)

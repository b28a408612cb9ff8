"""Plans that no executor may take, made of sound ones: each part of a plan is changed in a way or two.

An executor has to notice it before anything has taken effect. tests/executor/rows/test_refusals.py has all other ways.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np

from paceline.plan.codec import encode_request
from paceline.plan.values import KEY_BYTES, BatchPlan, BlockCopies, BlockGrants, BlockTags
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


def _blocks_granted_twice(plan: BatchPlan) -> BatchPlan | None:
    grants = plan.grants
    twice = BlockGrants(*(np.tile(column, 2) for column in (grants.rows, grants.indices, grants.block_ids)))
    return replace(plan, grants=twice) if grants.rows.size else None


def _a_gap_in_the_table(plan: BatchPlan) -> BatchPlan | None:
    gap = replace(plan.grants, indices=plan.grants.indices + 1)
    return replace(plan, grants=gap) if plan.grants.rows.size else None


def _rows_beyond_the_protocol(plan: BatchPlan) -> BatchPlan | None:
    return replace(plan, rows=plan.rows + _BEYOND) if plan.rows.size else None


def _tokens_beyond_the_known(plan: BatchPlan) -> BatchPlan | None:
    """A row computes its last token, as most do, and one more."""
    return replace(plan, num_scheduled_tokens=plan.num_scheduled_tokens + 8) if plan.rows.size else None


def _drafts_alone(plan: BatchPlan) -> BatchPlan | None:
    return replace(plan, num_draft_tokens=plan.num_scheduled_tokens) if plan.rows.size else None


def _a_release_twice(plan: BatchPlan) -> BatchPlan | None:
    return replace(plan, releases=(*plan.releases, *plan.releases)) if plan.releases else None


def _a_request_on_a_row_in_use(plan: BatchPlan) -> BatchPlan | None:
    in_use = set(plan.rows.tolist()) - {new.row for new in plan.new_requests}
    moved = tuple(replace(new, row=min(in_use)) for new in plan.new_requests if in_use)
    return replace(plan, new_requests=moved) if moved else None


def _all_tokens_cached(plan: BatchPlan) -> BatchPlan | None:
    """Without log-probabilities of the prompt, with which the request would fail alone."""
    cached = (replace(new, num_cached_tokens=_FAR, num_prompt_logprobs=None) for new in plan.new_requests)
    return replace(plan, new_requests=tuple(cached)) if plan.new_requests else None


def _a_tag_of_no_block(plan: BatchPlan) -> BatchPlan | None:
    return replace(plan, tags=BlockTags.of([(_FAR, bytes(KEY_BYTES))]))


def _a_copy_without_a_grant(plan: BatchPlan) -> BatchPlan | None:
    free = [block for block in range(FEWEST_BLOCKS) if block not in plan.grants.block_ids]
    copy = np.array(free[:1], dtype=np.int32)
    return None if not free else replace(plan, copies=BlockCopies(copy, copy))


_WAYS_TO_SPOIL = (
    _blocks_granted_twice,
    _a_gap_in_the_table,
    _rows_beyond_the_protocol,
    _tokens_beyond_the_known,
    _drafts_alone,
    _a_release_twice,
    _a_request_on_a_row_in_use,
    _all_tokens_cached,
    _a_tag_of_no_block,
    _a_copy_without_a_grant,
)

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
_NO_GRANTS = BlockGrants(*[np.zeros(0, dtype=np.int32)] * 3)

_Spoil = Callable[[BatchPlan], BatchPlan | None]
"""Returns None where a plan has nothing that could be spoilt in this way."""


class PlanSpoiler:
    """Changes plans, each in another way, so that no executor may take them; who gets one must be as it was before."""

    def __init__(self, random: Random, tell: Callable[[str], None]) -> None:
        self._random = random
        self._tell = tell
        self._unused = list(_WAYS_TO_SPOIL)

    def __call__(self, call: Call, inbox: Inbox, message: object) -> Arrivals | None:
        """Return a spoilt plan, or None: the message, as it should."""
        plans = plans_in(call, inbox, message)
        ways = [way for way in self._unused if plans and _WAYS_TO_SPOIL[way](plans[-1]) is not None]
        if not ways:
            return None
        call.tampered(len(plans))
        way = self._random.choice(ways)
        self._unused.remove(way)
        self._tell(f"step {plans[-1].step_id} of {call.method} {call.number} is spoilt: {way}")
        spoilt = _WAYS_TO_SPOIL[way](plans[-1])
        assert spoilt is not None, "it was one of the ways"
        return [(0.0, encode_request(*plans[:-1], spoilt))]


def _of_grants(spoil: Callable[[BlockGrants], BlockGrants]) -> _Spoil:
    return lambda plan: replace(plan, grants=spoil(plan.grants)) if plan.grants.rows.size else None


def _of_rows(spoil: Callable[[BatchPlan], BatchPlan]) -> _Spoil:
    return lambda plan: spoil(plan) if plan.rows.size else None


def _of_lengths(spoil: Callable[[Int32Array], Int32Array]) -> _Spoil:
    """Of how many tokens rows compute."""
    return _of_rows(lambda plan: replace(plan, num_scheduled_tokens=spoil(plan.num_scheduled_tokens)))


def _of_each_request(spoil: Callable[[NewRequest], NewRequest]) -> _Spoil:
    return lambda plan: replace(plan, new_requests=tuple(map(spoil, plan.new_requests))) if plan.new_requests else None


def _with_cached(new: NewRequest, num_cached: int) -> NewRequest:
    """Without log-probabilities of the prompt, with which the request would fail alone."""
    return replace(new, num_cached_tokens=num_cached, num_prompt_logprobs=None)


def _num_known(new: NewRequest) -> int:
    return len(new.prompt_token_ids) + len(new.output_token_ids)


def _columns(grants: BlockGrants) -> tuple[Int32Array, ...]:
    return grants.rows, grants.indices, grants.block_ids


def _granted_twice(grants: BlockGrants) -> BlockGrants:
    """With a block of its own each time, which no other cell has."""
    free = [block for block in range(FEWEST_BLOCKS) if block not in grants.block_ids]
    more = np.resize(np.array(free, dtype=np.int32), len(grants.block_ids))
    return BlockGrants(np.tile(grants.rows, 2), np.tile(grants.indices, 2), np.concatenate([grants.block_ids, more]))


def _a_row_twice(plan: BatchPlan) -> BatchPlan:
    return replace(plan, rows=np.tile(plan.rows, 2), num_scheduled_tokens=np.tile(plan.num_scheduled_tokens, 2))


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


def _cached_tokens_in_blocks_of_nobody(plan: BatchPlan) -> BatchPlan | None:
    cached = tuple(_with_cached(new, _num_known(new) - 1) for new in plan.new_requests)
    is_long = any(new.num_cached_tokens for new in cached)
    return replace(plan, new_requests=cached, grants=_NO_GRANTS) if is_long else None


def _a_copy_without_a_grant(plan: BatchPlan) -> BatchPlan | None:
    free = [block for block in range(FEWEST_BLOCKS) if block not in plan.grants.block_ids]
    copy = np.array(free[:1], dtype=np.int32)
    return None if not free else replace(plan, copies=BlockCopies(copy, copy))


_WAYS_TO_SPOIL: dict[str, _Spoil] = {
    "cells of no row": _of_grants(lambda grants: replace(grants, rows=grants.rows + _FAR)),
    "blocks that are none": _of_grants(lambda grants: replace(grants, block_ids=grants.block_ids + _FAR)),
    "cells beyond the table": _of_grants(lambda grants: replace(grants, indices=grants.indices + _FAR)),
    "a gap in the table": _of_grants(lambda grants: replace(grants, indices=grants.indices + 1)),
    "blocks granted twice": _of_grants(lambda grants: BlockGrants(*(np.tile(each, 2) for each in _columns(grants)))),
    "a cell granted twice": _of_grants(_granted_twice),
    "a column cut": _of_grants(lambda grants: replace(grants, rows=grants.rows[1:])),
    "a row twice": _of_rows(_a_row_twice),
    "rows that are none": _of_rows(lambda plan: replace(plan, rows=plan.rows + _FAR)),
    "rows beyond the protocol": _of_rows(lambda plan: replace(plan, rows=plan.rows + _BEYOND)),
    "rows with nothing to compute": _of_lengths(lambda lengths: lengths * 0),
    "tokens beyond the step": _of_lengths(lambda lengths: lengths + _FAR),
    "tokens beyond the known": _of_lengths(lambda lengths: lengths + 8),  # most rows compute their last token
    "fewer lengths than rows": _of_lengths(lambda lengths: lengths[1:]),
    "drafts alone": _of_rows(lambda plan: replace(plan, num_draft_tokens=plan.num_scheduled_tokens)),
    "drafts below none": _of_rows(lambda plan: replace(plan, num_draft_tokens=plan.num_scheduled_tokens * 0 - 1)),
    "a release of no row": lambda plan: replace(plan, releases=(*plan.releases, Release(_FAR, None))),
    "a release twice": lambda plan: replace(plan, releases=plan.releases * 2) if plan.releases else None,
    "a release beyond the output": _a_release_beyond_the_output,
    "a request on two rows": _a_request_on_two_rows,
    "a request on a row in use": _a_request_on_a_row_in_use,
    "a request on a row released now": _a_request_on_a_row_released_now,
    "a request without a name": _of_each_request(
        lambda new: replace(new, record_id=replace(new.record_id, request_id=""))
    ),
    "nothing left to compute": _of_each_request(lambda new: _with_cached(new, _num_known(new))),
    "cached tokens in blocks of nobody": _cached_tokens_in_blocks_of_nobody,
    "all tokens cached": _of_each_request(lambda new: _with_cached(new, _FAR)),
    "a tag of no block": lambda plan: replace(plan, tags=BlockTags.of([(_FAR, bytes(KEY_BYTES))])),
    "a copy without a grant": _a_copy_without_a_grant,
}

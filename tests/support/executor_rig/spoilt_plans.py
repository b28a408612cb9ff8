"""Sound plans with a mistake in them, drawn at random: what a scheduler that has gone wrong may send.

Refuses to know what the rows hold, so some spoilt plans are sound all the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from executor_rig.plans import int32, placement, record
from paceline.plan.values import (
    BatchPlan,
    BlockCopies,
    BlockGrants,
    BlockTags,
    FinalRelease,
    FinishReason,
    NewRequest,
    Release,
)
from paceline_executor.limits import RowLimits
from paceline_executor.runner.interface import Int32Array

_NAMES = ("", "request-0", "request-1", "request-2")


@dataclass(frozen=True, slots=True)
class Spoiler:
    """Changes, leaves out, adds or doubles something in a plan; now and then two things."""

    limits: RowLimits
    random: Random

    def spoil(self, sound: BatchPlan) -> BatchPlan:
        kinds = (
            self._grants,
            self._shared,
            self._grant_as_shared,
            self._copies,
            self._schedule,
            self._drafts,
            self._tags,
            self._releases,
            self._placements,
            self._placements,
        )
        spoilt = sound
        for _ in range(self.random.choice((1, 1, 2))):
            spoilt = self.random.choice(kinds)(spoilt)
        return spoilt

    def _grants(self, plan: BatchPlan) -> BatchPlan:
        return replace(plan, grants=self._cells(plan.grants))

    def _shared(self, plan: BatchPlan) -> BatchPlan:
        return replace(plan, shared=self._cells(plan.shared))

    def _grant_as_shared(self, plan: BatchPlan) -> BatchPlan:
        return replace(plan, grants=plan.shared, shared=plan.grants)

    def _copies(self, plan: BatchPlan) -> BatchPlan:
        num_blocks = self.limits.num_blocks
        lines = self._lines((plan.copies.sources, plan.copies.destinations), (num_blocks, num_blocks))
        return replace(plan, copies=BlockCopies(*lines))

    def _schedule(self, plan: BatchPlan) -> BatchPlan:
        bounds = (self.limits.num_rows, self.limits.max_num_batched_tokens + 4)
        rows, num_tokens = self._lines((plan.rows, plan.num_scheduled_tokens), bounds)
        return replace(plan, rows=rows, num_scheduled_tokens=num_tokens)

    def _drafts(self, plan: BatchPlan) -> BatchPlan:
        if not self.limits.max_num_draft_tokens:
            return plan
        drafts = plan.num_draft_tokens.tolist() or [0] * plan.rows.size
        if drafts:
            drafts[self.random.randrange(len(drafts))] = self._value(self.limits.max_num_draft_tokens + 2)
        return replace(plan, num_draft_tokens=int32(drafts))

    def _tags(self, plan: BatchPlan) -> BatchPlan:
        keys = bytes(self.random.choice((16, 16, 16, 15)))
        return replace(plan, tags=BlockTags(int32([self._value(self.limits.num_blocks)]), keys))

    def _releases(self, plan: BatchPlan) -> BatchPlan:
        final = self.random.choice((None, FinalRelease(self.random.randrange(10), FinishReason.STOP)))
        return replace(plan, releases=(*plan.releases, Release(self._value(self.limits.num_rows), final)))

    def _placements(self, plan: BatchPlan) -> BatchPlan:
        another = placement(self.random.randrange(self.limits.num_rows), range(12), name="another")
        one = self.random.choice(plan.new_requests or (another,))
        kept = (other for other in plan.new_requests if other is not one or self.random.random() < 0.5)
        return replace(plan, new_requests=(*kept, self._placement(one)))

    def _placement(self, one: NewRequest) -> NewRequest:
        match self.random.randrange(3):
            case 0:
                return replace(one, row=self._value(self.limits.num_rows))
            case 1:
                return replace(one, record_id=record(self.random.choice(_NAMES)))
            case _:
                num_known = one.prompt_token_ids.size + one.output_token_ids.size
                return replace(one, num_cached_tokens=self.random.choice((0, num_known - 1, num_known)))

    def _cells(self, cells: BlockGrants) -> BlockGrants:
        bounds = (self.limits.num_rows, self.limits.max_blocks_per_row, self.limits.num_blocks)
        return BlockGrants(*self._lines((cells.rows, cells.indices, cells.block_ids), bounds))

    def _lines(self, columns: Sequence[Int32Array], bounds: Sequence[int]) -> list[Int32Array]:
        """Changed in one place, doubled but for one place or left out, or with a value missing."""
        lines = list(zip(*(column.tolist() for column in columns), strict=False))  # a value may be missing already
        kind = self.random.choice(("change", "change", "double", "leave out", "cut"))
        place = self.random.randrange(len(bounds))
        line = list(self.random.choice(lines)) if lines else [self._value(bound) for bound in bounds]
        if lines and kind in ("change", "leave out"):
            lines.remove(tuple(line))
        if kind in ("change", "double"):
            line[place] = self._value(bounds[place])
            lines.append(tuple(line))
        spoilt = [list(column) for column in zip(*lines, strict=True)] or [[] for _ in bounds]
        if kind == "cut":
            spoilt[place] = spoilt[place][1:]
        return [int32(column) for column in spoilt]

    def _value(self, bound: int) -> int:
        return self.random.choice((-1, bound)) if self.random.random() < 0.1 else self.random.randrange(bound)

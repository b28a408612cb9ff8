"""Prompt lookup on a device. Apart from `device_steps`, which has any drafter."""

from paceline_executor.limits import RowLimits
from paceline_executor.runner.device_steps import DeviceDrafter, Drafting
from paceline_executor.runner.row_words import RowWords
from paceline_kernels.prompt_lookup import lookup_drafts
from paceline_kernels.step_inputs import PlanColumns


class LookupDrafter:
    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts

    def draft(self, rows: RowWords, plan: PlanColumns) -> None:
        lookup_drafts(rows.state, rows.draws, plan, self._max_drafts, rows.min_chance)


def drafting_of(limits: RowLimits, drafter: DeviceDrafter | None = None) -> Drafting:
    max_drafts = limits.max_num_draft_tokens
    return Drafting(drafter or LookupDrafter(max_drafts), max_drafts) if max_drafts else Drafting()

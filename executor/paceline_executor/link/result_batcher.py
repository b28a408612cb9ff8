"""Which results leave at once, and which wait for the one behind them.

A message costs its two processes as much as a good part of a short step. A scheduler that sends more than two plans
ahead says that steps are short: then half of what it has sent is enough to run while it plans on.

Refuses to know when plans came.
"""

from collections import deque

import numpy as np

from paceline.plan.values import BatchPlan, StepResult


class ResultBatcher:
    def __init__(self) -> None:
        self._to_do: deque[BatchPlan] = deque()
        self._held: list[StepResult] = []

    def expect(self, plan: BatchPlan) -> None:
        self._to_do.append(plan)

    def holds(self, done: StepResult, *, together: bool) -> bool:
        """Take a result; return whether it waits, which none does unless `together`. One does while enough plans are
        unanswered and the next step decodes the same rows: should that step break the executor, the oldest unanswered
        step has the right rows.
        """
        plan = self._to_do.popleft()
        self._held.append(done)
        return together and len(self._held) < len(self._to_do) and _goes_on(plan, self._to_do[0])

    def held(self) -> tuple[StepResult, ...]:
        """They leave now."""
        held, self._held = tuple(self._held), []
        return held


def _goes_on(plan: BatchPlan, following: BatchPlan) -> bool:
    """Both decode the same rows."""
    return np.array_equal(plan.rows, following.rows) and _decodes(plan) and _decodes(following)


def _decodes(plan: BatchPlan) -> bool:
    """Each row computes its last token, and drafts behind it."""
    num_tokens, num_drafts = plan.num_scheduled_tokens, plan.num_draft_tokens
    return bool((num_tokens == (1 + num_drafts if num_drafts.size == num_tokens.size else 1)).all())

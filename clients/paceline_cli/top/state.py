"""What is known of a scheduler now: its last answers, and what happened between the last two of them.

Knows no terminal and no connection. Times are seconds of the caller's clock.
"""

from dataclasses import dataclass

from paceline_cli.top.values import Executor, Overview, Step, Sums
from paceline_cli.top.window import Window


@dataclass(frozen=True, slots=True)
class Rates:
    """What an executor did between two answers: seconds of a step, tokens and starved seconds per second. None: there
    was no step, so there is nothing to tell.
    """

    step_s: float | None = None
    predicted_s: float | None = None
    planning_s: float | None = None
    tokens_per_s: float = 0.0
    starved_share: float = 0.0


class TopState:
    """Told what comes in; everything else reads it."""

    def __init__(self) -> None:
        self.overview = Overview()
        self.rates: dict[str, Rates] = {}
        self.first_tokens = Window()
        self.gaps = Window()
        self.num_unseen_steps = 0
        self.trouble = ""
        self.server = ""
        self.updated_s: float | None = None

    def answered(self, server: str, overview: Overview, now_s: float) -> None:
        """Take an answer of the scheduler at an address."""
        if self.updated_s is not None and overview.scheduler_id == self.overview.scheduler_id:
            before = {executor.address: executor.sums for executor in self.overview.executors}
            seconds = now_s - self.updated_s
            self.rates = {one.address: _rates(one, before.get(one.address), seconds) for one in overview.executors}
        else:
            self.rates = {}  # another scheduler's sums have begun anew
        self.server, self.overview, self.updated_s, self.trouble = server, overview, now_s, ""

    def stepped(self, step: Step, now_s: float) -> None:
        for seconds in step.first_tokens_s:
            self.first_tokens.add(now_s, seconds)
        for seconds, count in step.gaps_s:
            self.gaps.add(now_s, seconds, count)
        self.num_unseen_steps += step.num_dropped

    def lost(self, trouble: str) -> None:
        """There is no scheduler to ask: what was known stays, and says how old it is."""
        self.trouble = trouble

    @property
    def tokens_per_s(self) -> float:
        return sum(rates.tokens_per_s for rates in self.rates.values())


def _rates(executor: Executor, before: Sums | None, seconds: float) -> Rates:
    now = executor.sums
    if before is None or seconds <= 0 or now.num_steps <= before.num_steps:
        return Rates()
    num_steps = now.num_steps - before.num_steps
    return Rates(
        step_s=max(0.0, now.busy_s - before.busy_s) / num_steps,
        predicted_s=max(0.0, now.predicted_s - before.predicted_s) / num_steps,
        planning_s=max(0.0, now.planning_s - before.planning_s) / num_steps,
        tokens_per_s=max(0, now.num_output_tokens - before.num_output_tokens) / seconds,
        starved_share=min(1.0, max(0.0, now.starved_s - before.starved_s) / seconds),
    )

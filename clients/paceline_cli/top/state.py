"""What is known of a scheduler now: its last answers, and what happened between the last two of them.

Knows no terminal and no connection. Times are seconds of the caller's clock.
"""

import operator

from paceline_cli.top.values import Overview, Step, Sums
from paceline_cli.top.window import Window


class TopState:
    """Told what comes in; everything else reads it."""

    def __init__(self) -> None:
        self.overview = Overview()
        self.seconds = 1.0
        self.work: dict[str, Sums] = {}
        """What each executor did in the seconds between the last two answers, by its address."""
        self.first_tokens = Window()
        self.gaps = Window()
        self.num_unseen_steps = 0
        self.trouble = ""
        self.server = ""
        self.updated_s = 0.0

    def answered(self, server: str, overview: Overview, now_s: float) -> None:
        """Take an answer of the scheduler at an address."""
        is_another = overview.scheduler_id != self.overview.scheduler_id  # whose sums have begun anew
        before = {} if is_another else {executor.address: executor.sums for executor in self.overview.executors}
        self.seconds = max(0.001, now_s - self.updated_s)
        self.work = {
            one.address: Sums(*map(operator.sub, one.sums, before.get(one.address, one.sums)))
            for one in overview.executors
        }
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
        return sum(work.num_output_tokens for work in self.work.values()) / self.seconds

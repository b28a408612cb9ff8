"""What clients would have seen: times, tokens, refusals. Knows events of the core, not where they come from."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.plan.values import BatchPlan, FinishReason
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.events import Effects, Event, Resume, StepFinished, Submit

_DONE = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True)
class Tally:
    """A ReplayObserver. Times are in seconds."""

    first_tokens_s: list[float] = field(default_factory=list)
    intervals_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_preemptions: int = 0
    num_refusals: int = 0
    num_steps: int = 0
    first_token_at_s: float | None = None
    last_token_at_s: float = 0.0

    def saw(self, core: Core, event: Event[Any], now: float, effects: Effects[Any]) -> None:
        del core
        if isinstance(event, StepFinished):
            self.num_steps += 1
            self.num_preemptions += effects.reply.num_preempted
        for tokens in effects.tokens:
            self.num_tokens += len(tokens.token_ids)
            if len(tokens.token_ids):
                self.first_token_at_s = now if self.first_token_at_s is None else self.first_token_at_s
                self.last_token_at_s = now
            self.first_tokens_s += tokens.first_tokens_s.values()
            if len(tokens.intervals_s):
                self.intervals_s += np.repeat(*tokens.gaps()).tolist()
        for ended in effects.ended:
            if ended.reason in _DONE and ended.times is not None:
                self.whole_s.append(ended.times.total_s)

    def refused(self, core: Core, event: Event[Any], now: float, error: str) -> None:
        del core, now, error
        if isinstance(event, Submit | Resume):
            self.num_refusals += 1

    def planned(self, core: Core, address: str, now: float, plan: BatchPlan | None) -> None: ...

    @property
    def tokens_per_s(self) -> float:
        span_s = self.last_token_at_s - (self.first_token_at_s or 0.0)
        return self.num_tokens / span_s if span_s > 0 else 0.0

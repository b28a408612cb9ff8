"""How requests ended, for observers. Apart from `outputs`, which only those get that listen."""

from typing import NamedTuple

from paceline.plan.values import FinishReason
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.phases import PhaseTimes
from paceline_scheduler.core.request import Request


class EndedRequest(NamedTuple):
    """`times` and `first_token_s` are None where a former scheduler knew them; `executor` is where it ran last.
    `is_abandoned`: nobody came back to it.
    """

    request: Request
    reason: FinishReason
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    times: PhaseTimes | None
    first_token_s: float | None
    executor: str
    is_abandoned: bool

    @property
    def seconds_per_token(self) -> float | None:
        """From the first token on, also off rows. Returns None if there are not two, or their time is not known."""
        if self.times is None or self.first_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.times.total_s - self.first_token_s) / (self.num_output_tokens - 1)


def ended_request(live: LiveRequest) -> EndedRequest:
    assert live.final is not None, "it is over"
    return EndedRequest(
        request=live.request,
        reason=live.final.reason,
        num_output_tokens=live.final.num_output_tokens,
        num_cached_tokens=live.num_prompt_cached_tokens or 0,
        num_preemptions=live.preemptions.count,
        times=live.phases.whole_times(),
        first_token_s=live.phases.first_token_s,
        executor=live.address or live.record.address or "",
        is_abandoned=live.detached_until_s is not None,
    )

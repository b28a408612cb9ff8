"""What a request has to expect behind those ahead of it.

Apart, because admission and explanations must not differ in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline_scheduler.core.executor.state import ExecutorState
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.planning.capacity import find_hits
from paceline_scheduler.core.planning.forecast import Ahead, begin_s, load_of, prefill_s


@dataclass(frozen=True, slots=True)
class Outlook:
    """Seconds from now; `num_cached_tokens` where the prefix cache holds most of the prompt."""

    first_token_s: float
    between_tokens_s: float
    num_cached_tokens: int


def outlook_of(live: LiveRequest, serving: Sequence[ExecutorState], ahead: Ahead, limits: CoreLimits) -> Outlook:
    """If nothing else arrives; `serving` is not empty."""
    views = [executor.view() for executor in serving]
    loads = [load_of(view, limits) for view in views]
    shared = live.num_known_tokens - live.num_own_tokens
    cached = [max(shared, len(find_hits(view, live)) * view.description.block_size) for view in views]
    needed_s = [
        prefill_s(view, load, num_cached, live.num_known_tokens)
        for view, load, num_cached in zip(views, loads, cached, strict=True)
    ]
    best = needed_s.index(min(needed_s))
    begun_s = begin_s(loads, ahead)
    num_beside = ahead.num_requests // len(serving) + int((loads[best].ends_s > begun_s).sum())
    num_decoding = min(num_beside + 1, views[best].description.max_num_rows)
    step_ns = views[best].step_time.predict_ns(num_decoding, num_decoding * live.num_known_tokens)
    token_s = step_ns / 1e9 / views[best].speculation.speedup
    return Outlook(begun_s + needed_s[best], token_s, cached[best])

"""What a request has to expect behind those ahead of it.

Apart, because admission and explanations must not differ in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from paceline_scheduler.core.executor.attachment import Attachment
from paceline_scheduler.core.limits import CoreLimits
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.planning.capacity import ExecutorView, find_hits
from paceline_scheduler.core.planning.forecast import Ahead, Load, begin_s, load_of, prefill_s
from paceline_scheduler.core.planning.step_time import StepTimes


@dataclass(frozen=True, slots=True)
class Outlook:
    """Seconds from now; `num_cached_tokens` where the prefix cache holds most of the prompt."""

    first_token_s: float
    between_tokens_s: float
    num_cached_tokens: int


def outlook_of(live: LiveRequest, serving: Sequence[Attachment], ahead: Ahead, limits: CoreLimits) -> Outlook:
    """If nothing else arrives; `serving` is not empty."""
    views = [executor.view() for executor in serving]
    loads = [load_of(view, limits) for view in views]
    cached = [_num_cached(live, view) for view in views]
    needed_s = [_needed_s(live, view, load) for view, load in zip(views, loads, strict=True)]
    best = needed_s.index(min(needed_s))
    begun_s = begin_s(loads, ahead)
    num_beside = ahead.num_requests // len(serving) + int((loads[best].ends_s > begun_s).sum())
    num_decoding = min(num_beside + 1, views[best].description.max_num_rows)
    step_ns = views[best].step_time.predict_ns(num_decoding, num_decoding * live.num_known_tokens)
    token_s = step_ns / 1e9 / views[best].speculation.speedup
    return Outlook(begun_s + needed_s[best], token_s, cached[best])


def first_token_s(live: LiveRequest | None, serving: Sequence[Attachment], ahead: Ahead, limits: CoreLimits) -> float:
    """Of the outlook, or a later time that is still allowed, for which few executors are asked. None: of any request,
    when it begins.
    """
    share, begun_s, needed_s = ahead.share(len(serving)), inf, inf
    for executor in serving:
        view = executor.view()
        load = load_of(view, limits)
        begun_s = min(begun_s, load.begin_s(share))
        needed_s = min(needed_s, 0.0 if live is None else _needed_s(live, view, load))
        if begun_s + needed_s <= limits.expected_first_token_s:
            break
    return begun_s + needed_s


def _needed_s(live: LiveRequest, view: ExecutorView, load: Load) -> float:
    times, rate = StepTimes([view.step_time]), np.array([load.pace.prefill_tokens_per_s])
    return float(prefill_s(times, rate, np.array([_num_cached(live, view)]), live.num_known_tokens)[0])


def _num_cached(live: LiveRequest, view: ExecutorView) -> int:
    shared = live.num_known_tokens - live.num_own_tokens
    return max(shared, len(find_hits(view, live)) * view.description.block_size)

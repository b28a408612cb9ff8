"""Requests that a former scheduler placed on an executor.

Of two sightings of one request the higher attempt lives, at equal attempts the delivered one. Changes nothing.
"""

from dataclasses import replace

import numpy as np

from paceline.plan.values import FinishReason, Int32Array, RowFinish
from paceline_scheduler.core.executors import SeenRow
from paceline_scheduler.core.live import MAX_WAITED_S, LiveRequest, Preemptions, Status, queue_key_of
from paceline_scheduler.core.phases import Phase, PhaseClock
from paceline_scheduler.core.retained import RetainedLogprobs, RetainedOutput
from paceline_scheduler.core.suspects import Suspicion

_ENDS_FOR_CLIENTS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED)


def is_adoptable(seen: SeenRow) -> bool:
    """A client may come back for it, and it can be finished or replayed."""
    if seen.request is None or not seen.request.is_resumable:
        return False
    return seen.released is None or seen.released.reason in _ENDS_FOR_CLIENTS


def adopted(seen: SeenRow, model: str, handle: int, arrival_number: int, now: float) -> LiveRequest:
    """Returns it off its row; `model` is the executor's."""
    assert seen.request is not None, "only what is_adoptable is adopted"
    history = seen.history
    left_s = history.deadline_left_s
    request = replace(
        seen.request,
        handle=handle,
        model=model,
        prompt_token_ids=seen.prompt_token_ids,
        deadline_s=None if left_s is None else now + left_s,
    )
    submitted_s = now - min(history.waited_s, MAX_WAITED_S)
    return LiveRequest(
        request,
        queue_key_of(request, arrival_number, submitted_s),
        PhaseClock.inherit(history.times, now - history.waited_s, _phase_of(seen), now),
        status=Status.WAITING if seen.released is None else Status.FINISHED,
        attempt=seen.attempt,
        preemptions=Preemptions(history.num_preemptions),
        suspicion=Suspicion(history.num_executor_deaths, history.last_death_offset),
        num_prompt_cached_tokens=history.num_prompt_cached_tokens,
        output=replace(RetainedOutput.of(seen.output_token_ids, _retained_logprobs(seen)), drafts=history.drafts),
        final=seen.released,
    )


def _phase_of(seen: SeenRow) -> Phase | None:
    if seen.released is not None:
        return None
    if seen.row is None:
        return Phase.PREEMPTED
    return Phase.DECODE if len(seen.output_token_ids) else Phase.PREFILL


def outranks(seen: SeenRow, live: LiveRequest, output: Int32Array) -> bool:
    """The request should go on from this row, and not with `output`."""
    if seen.released is not None or seen.finish is RowFinish.ERROR or not seen.is_of(live.request):
        return False
    is_ahead = seen.attempt > live.attempt or (seen.attempt == live.attempt and live.held is None)
    has_listener = live.detached_until_s is None
    return is_ahead and not (has_listener and not np.array_equal(seen.output_token_ids[: len(output)], output))


def has_ended_elsewhere(seen: SeenRow, live: LiveRequest) -> bool:
    """The request only seems to go on, in a lost row."""
    has_no_listener = live.detached_until_s is not None
    return has_no_listener and seen.released is not None and seen.attempt >= live.attempt and seen.is_of(live.request)


def _retained_logprobs(seen: SeenRow) -> RetainedLogprobs | None:
    if seen.request is None or seen.request.num_logprobs is None or seen.logprobs is None:
        return None
    columns = seen.logprobs
    return RetainedLogprobs(columns.offset, columns.of(columns.offset, seen.output_token_ids[columns.offset :]))

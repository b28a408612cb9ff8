"""Requests found on an executor that nobody here has asked for: another scheduler placed them, and is gone.

Also the rule for two sightings of one request: the higher attempt lives, at equal attempts the one that is delivered.
Decides and builds; changes nothing.
"""

from dataclasses import replace

import numpy as np

from paceline_scheduler.core.executors import RowState
from paceline_scheduler.core.live import MAX_WAITED_S, LiveRequest, Status
from paceline_scheduler.core.logprobs import KeptLogprobs
from paceline_scheduler.core.outputs import OUTPUT_HASH_START, hash_of
from paceline_scheduler.core.plan import RowFinish
from paceline_scheduler.core.request import FinishReason, Int32Array

_ENDS_FOR_CLIENTS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED)


def is_adoptable(seen: RowState) -> bool:
    """Tell whether somebody may come back for a request, and it can be run or told to the end."""
    if seen.carried is None or not seen.carried.request.is_resumable:
        return False
    return seen.released is None or seen.released.reason in _ENDS_FOR_CLIENTS


def adopted(seen: RowState, model: str, handle: int, arrival_number: int, now: float) -> LiveRequest:
    """Return a request as the scheduler that placed it left it, off its row; `model` is the executor's."""
    carried = seen.carried
    assert carried is not None, "only what is_adoptable is adopted"
    left_s = carried.deadline_left_s
    request = replace(
        carried.request,
        handle=handle,
        model=model,
        prompt_token_ids=seen.prompt_token_ids,
        deadline_s=None if left_s is None else now + left_s,
    )
    return LiveRequest(
        request,
        arrival_number,
        submitted_s=now - min(carried.waited_s, MAX_WAITED_S),
        status=Status.WAITING if seen.released is None else Status.FINISHED,
        attempt=seen.attempt,
        num_preemptions=carried.num_preemptions,
        num_executor_deaths=carried.num_executor_deaths,
        last_death_offset=carried.last_death_offset,
        num_prompt_cached_tokens=carried.num_prompt_cached_tokens,
        output_token_ids=seen.output_token_ids,
        output_hash=hash_of(OUTPUT_HASH_START, seen.output_token_ids),
        final=seen.released,
        logprobs=_kept_logprobs(seen),
    )


def outranks(seen: RowState, live: LiveRequest, output: Int32Array) -> bool:
    """Tell whether a request should go on from this sighting, and not from where it is or waits with `output`."""
    if seen.released is not None or seen.finish is RowFinish.ERROR or not seen.is_of(live.request):
        return False
    is_ahead = seen.attempt > live.attempt or (seen.attempt == live.attempt and live.row is None)
    is_heard = live.detached_until_s is None
    return is_ahead and not (is_heard and not np.array_equal(seen.output_token_ids[: len(output)], output))


def has_ended_elsewhere(seen: RowState, live: LiveRequest) -> bool:
    """Tell whether the sighting is the end of a request that only seems to go on: in a row that somebody lost."""
    is_unheard = live.detached_until_s is not None
    return is_unheard and seen.released is not None and seen.attempt >= live.attempt and seen.is_of(live.request)


def _kept_logprobs(seen: RowState) -> KeptLogprobs | None:
    if seen.carried is None or seen.carried.request.num_logprobs is None or seen.logprobs is None:
        return None
    columns = seen.logprobs
    return KeptLogprobs(columns.offset, columns.of(columns.offset, seen.output_token_ids[columns.offset :]))

"""How the scheduler's view of an executor is rebuilt from the executor's snapshot.

The executor is the truth about what was computed and generated; the scheduler about which requests are wanted. A wanted
row is taken over as it is, any other row is released. Requests that should be there but are not wait again, with their
known tokens.
"""

from collections.abc import Mapping

import numpy as np

from paceline.plan.sampling import SamplingParams
from paceline.plan.values import (
    FINISH_REASONS,
    FinalRelease,
    FinishReason,
    Int32Array,
    RecordId,
    RowFinish,
    TokenLogprobs,
)
from paceline_scheduler.core.executor.attachment import Attachment
from paceline_scheduler.core.executors import ExecutorDescription, SeenRow, Snapshot
from paceline_scheduler.core.live import HeldRow, LiveRequest, Status, queue_key_of, retain_logprobs
from paceline_scheduler.core.outputs import TokenOutputs
from paceline_scheduler.core.phases import Phase, PhaseClock
from paceline_scheduler.core.request import Request
from paceline_scheduler.core.request_outputs import outputs_of
from paceline_scheduler.core.retained import RetainedOutput

_FOREIGN_SAMPLING = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def rebuild(
    description: ExecutorDescription, snapshot: Snapshot, wanted: Mapping[RecordId, LiveRequest], now: float
) -> tuple[Attachment, list[tuple[LiveRequest, TokenOutputs]]]:
    """Returns the executor's state, and the tokens of its rows that the scheduler lacked. `wanted` requests that have
    no row in the result have to be placed again.
    """
    executor = Attachment(description)
    recovered = []
    for seen in snapshot.rows:
        if seen.row is None:
            outputs = _catch_up(wanted.get(seen.record_id), seen, now)
            if outputs is not None:
                recovered.append((wanted[seen.record_id], outputs))
            continue
        live = wanted.get(seen.record_id)
        if live is None or not _continues(live, seen):
            _take_foreign(executor, seen, seen.row, None if live is None else live.final)
            continue
        outputs = _take_over(executor, live, seen, seen.row, now)
        if outputs is not None:
            recovered.append((live, outputs))
    executor.ledger.pool.rebuild(snapshot.tags)
    return executor, recovered


def _continues(live: LiveRequest, seen: SeenRow) -> bool:
    known = live.output.token_ids
    return (
        live.attempt == seen.attempt
        and seen.is_of(live.request)
        and live.status is not Status.FINISHED
        and seen.finish is not RowFinish.ERROR
        and len(seen.output_token_ids) >= len(known)
        and bool(np.array_equal(seen.output_token_ids[: len(known)], known))
        and bool(np.array_equal(seen.prompt_token_ids, live.request.prompt_token_ids))
        and (live.request.num_logprobs is None or seen.has_logprobs_from(len(known)))
        # Executors do not keep log-probabilities of prompts: what is owed is computed anew.
        and (live.request.num_prompt_logprobs is None or len(known) > 0)
    )


def _catch_up(live: LiveRequest | None, seen: SeenRow, now: float) -> TokenOutputs | None:
    """Those results never arrived. An end there beats the reason why the request left its row."""
    if live is None or not seen.is_open_record or not _continues(live, seen):
        return None
    offset, fresh = _append_seen(live, seen)
    reason = FINISH_REASONS[seen.finish]
    if reason is not FinishReason.NONE:
        live.phases.stop(now)
        live.status, live.final = Status.FINISHED, FinalRelease(len(seen.output_token_ids), reason)
    elif not len(fresh):
        return None
    return _outputs_of(live, offset, fresh, reason, seen)


def _take_over(executor: Attachment, live: LiveRequest, seen: SeenRow, row: int, now: float) -> TokenOutputs | None:
    offset, fresh = _append_seen(live, seen)
    live.status, live.held = Status.RUNNING, HeldRow(executor.description.address, row)
    if live.phases.phase in (Phase.QUEUED, Phase.PREEMPTED):  # else it never left this row
        live.phases.enter(Phase.DECODE if live.num_output_tokens else Phase.PREFILL, now)
    executor.suspects.placed(row, live)
    executor.ledger.adopt(row, live, seen, live.max_tokens_on(executor.description))
    reason = FINISH_REASONS[seen.finish]
    if reason is not FinishReason.NONE:
        live.phases.stop(now)
        executor.end_row(row, FinalRelease(len(seen.output_token_ids), reason))
    if not len(fresh) and reason is FinishReason.NONE:
        return None
    return _outputs_of(live, offset, fresh, reason, seen)


def _append_seen(live: LiveRequest, seen: SeenRow) -> tuple[int, Int32Array]:
    """Returns the new tokens and the offset of the first."""
    offset = live.num_output_tokens
    fresh = seen.output_token_ids[offset:]
    live.output.append(fresh)
    return offset, fresh


def _outputs_of(live: LiveRequest, offset: int, fresh: Int32Array, reason: FinishReason, seen: SeenRow) -> TokenOutputs:
    logprobs: tuple[TokenLogprobs, ...] = ()
    if live.request.num_logprobs is not None and seen.logprobs is not None and len(fresh):
        logprobs = seen.logprobs.of(offset, fresh)
        retain_logprobs(live, offset, logprobs)
    return outputs_of(live, offset, fresh, live.output.rolling_hash, reason, logprobs)


def _take_foreign(executor: Attachment, seen: SeenRow, row: int, final: FinalRelease | None) -> None:
    """The first plan releases it."""
    request = Request(
        handle=0,
        key=seen.record_id,
        model=executor.description.model,
        prompt_token_ids=seen.prompt_token_ids,
        sampling=_FOREIGN_SAMPLING,
        end_token_ids=(),
    )
    orphan = LiveRequest(
        request,
        queue_key_of(request, -1, 0.0),
        PhaseClock.begin(0.0),
        status=Status.FINISHED,
        attempt=seen.attempt,
        output=RetainedOutput.of(seen.output_token_ids),
        final=final or FinalRelease(len(seen.output_token_ids), FinishReason.ERROR),
        is_orphan=True,
    )
    executor.ledger.adopt(row, orphan, seen, executor.description.max_model_len)

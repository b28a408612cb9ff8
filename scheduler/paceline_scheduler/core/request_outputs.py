"""Outputs of one request alone: at its cancellation, and when an executor or a client comes back.

Those of a step are in `executor/results`.
"""

import numpy as np

from paceline.plan.values import FinishReason, Int32Array, TokenLogprobs
from paceline_scheduler.core.live import LiveRequest, finish_notice
from paceline_scheduler.core.outputs import TokenOutputs


def outputs_of(
    live: LiveRequest,
    offset: int,
    token_ids: Int32Array,
    output_hash: int,
    reason: FinishReason = FinishReason.NONE,
    logprobs: tuple[TokenLogprobs, ...] = (),
) -> TokenOutputs:
    """The first token is number `offset`; `output_hash` is the hash after the last. A reason ends the output."""
    handle, num_output = live.request.handle, offset + len(token_ids)
    finishes = {}
    if reason is not FinishReason.NONE:
        finishes[handle] = finish_notice(live, reason, _stop_token(live, reason, token_ids), num_output)
    return TokenOutputs(
        handles=(handle,),
        offsets=np.array([offset], dtype=np.int32),
        num_tokens=np.array([len(token_ids)], dtype=np.int32),
        token_ids=token_ids,
        attempts=np.array([live.attempt], dtype=np.int32),
        rolling_hashes=np.array([output_hash], dtype=np.uint64),
        finishes=finishes,
        logprobs={handle: logprobs} if logprobs else {},
        prompt_logprobs={handle: live.output.prompt_logprobs} if live.output.prompt_logprobs and not offset else {},
    )


def _stop_token(live: LiveRequest, reason: FinishReason, token_ids: Int32Array) -> int | None:
    is_end = reason is FinishReason.STOP and len(token_ids) and int(token_ids[-1]) in live.request.end_token_ids
    return int(token_ids[-1]) if is_end else None

"""What a client that sends a request again finds.

The highest attachment of a request wins. A client continues from the request's output if that begins with what the
client holds, by length and rolling hash; else from what it holds, if it sent that.
"""

from enum import Enum

import numpy as np

from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import FinishReason, Int32Array
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.request import Request, ResumePoint
from paceline_scheduler.errors import DuplicateRequestError, ResumeMismatchError, StaleAttachmentError

_NO_TOKENS: Int32Array = np.zeros(0, dtype=np.int32)


class ResumeMode(Enum):
    ATTACH = "listen to what runs, or read what ran"
    RECOMPUTE = "take it off its row and go on from what the client holds"
    START = "there is none: queue it"


def resume_mode(live: LiveRequest | None, output: Int32Array, request: Request) -> ResumeMode:
    """`live` has the same key and has generated `output`. Raises StaleAttachmentError, ResumeMismatchError or
    DuplicateRequestError.
    """
    point = request.point
    if live is None or (live.final is not None and live.final.reason is FinishReason.ERROR):
        return _from_prior(ResumeMode.START, point, "is unknown")
    has_ended = live.final is not None
    if (has_ended or not live.had_listener) and live.request.body_digest != request.body_digest:
        # The id was used for another request, which is over, or whose client left it before this scheduler came.
        return _from_prior(ResumeMode.START, point, "is unknown")
    if live.final is not None and live.final.reason is FinishReason.CANCELLED and request.attachment == 1:
        return _from_prior(ResumeMode.START, point, "is unknown")  # a new request is meant
    if not has_ended:
        _check_body(live, request)
        _check_attachment(live, request)
    if holds_beginning(output, point) and _has_rest(live, output, point):
        return ResumeMode.ATTACH
    return _from_prior(ResumeMode.START if has_ended else ResumeMode.RECOMPUTE, point, "has other output")


def prior_of(request: Request) -> Int32Array:
    prior = request.point.prior_output_token_ids
    return _NO_TOKENS if prior is None else prior


def end_of_prior(request: Request, prior: Int32Array, num_allowed: int) -> FinishReason:
    """The client lacks only the finish; `num_allowed` bounds the output."""
    if len(prior) > request.min_tokens and int(prior[-1]) in request.end_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(prior) >= num_allowed else FinishReason.NONE


def holds_beginning(output: Int32Array, point: ResumePoint) -> bool:
    offset = point.resume_from
    return offset <= len(output) and rolling_hash(HASH_START, output[:offset]) == point.resume_hash


def _check_attachment(live: LiveRequest, request: Request) -> None:
    key, current = request.key, live.request.attachment
    if request.attachment < current:
        raise StaleAttachmentError(
            f"attachment {request.attachment} of request_id {key.request_id!r} is too old: "
            f"attachment {current} has the request",
            current,
        )
    if request.attachment == current and live.detached_until_s is None:
        raise DuplicateRequestError(
            f"request_id {key.request_id!r} is in use; choose another one, or a higher attachment to take it over"
        )


def _check_body(live: LiveRequest, request: Request) -> None:
    if live.request.body_digest == request.body_digest:
        return
    if request.attachment > 1 or request.point.resume_from:
        raise ResumeMismatchError(
            f"request_id {request.key.request_id!r} belongs to a request with another body; choose another one"
        )
    raise DuplicateRequestError(f"request_id {request.key.request_id!r} is in use; choose another one")


def _has_rest(live: LiveRequest, output: Int32Array, point: ResumePoint) -> bool:
    """The log-probabilities that the client lacks are still there."""
    asked, offset = live.request, point.resume_from
    if asked.num_prompt_logprobs is not None and not offset and len(output) and live.output.prompt_logprobs is None:
        return False
    if asked.num_logprobs is None:
        return True
    return live.output.logprobs is not None and live.output.logprobs.between(offset, len(output)) is not None


def _from_prior(mode: ResumeMode, point: ResumePoint, what: str) -> ResumeMode:
    if point.resume_from and point.prior_output_token_ids is None:
        raise ResumeMismatchError(
            f"the request {what} beyond offset {point.resume_from}; send the tokens as prior_output_token_ids"
        )
    return mode

"""The context that a scheduler leaves with an executor about a request, to and from bytes.

A value that changes nothing stays unset.
"""

from dataclasses import replace
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from paceline.plan.codec.bounds import BoundError, check
from paceline.plan.codec.requests import read_sampling, write_sampling
from paceline.plan.durations import read_duration, write_duration
from paceline.plan.values import BatchPlan, RecordId, ToExecutor
from paceline.v1 import inference_pb2, plan_pb2
from paceline_scheduler.core.executors import NO_HISTORY, History, Placement
from paceline_scheduler.core.outputs import DraftCounts
from paceline_scheduler.core.request import Request
from paceline_scheduler.wire_phases import read_times, write_times

_MAX_SALT_BYTES = 128
_M = TypeVar("_M", bound=ToExecutor)


def with_contexts(message: _M) -> _M:
    """Each placed request travels with its context."""
    if not (isinstance(message, BatchPlan) and message.new_requests):
        return message
    placements = (
        replace(new, context=write_context(new.request, new.history)) if isinstance(new, Placement) else new
        for new in message.new_requests
    )
    return replace(message, new_requests=tuple(placements))


def read_context(record_id: RecordId, data: bytes) -> tuple[Request | None, History]:
    """Returns no request if this program cannot read it."""
    if not data:
        return None, NO_HISTORY
    try:
        context = plan_pb2.RequestContext.FromString(data)
    except DecodeError:
        return None, NO_HISTORY
    if context.HasField("request_with_form"):
        context.request.CopyFrom(context.request_with_form)
    if not context.HasField("settings") or not context.HasField("request") or not _is_within_bounds(context):
        return None, NO_HISTORY
    history = History(
        waited_s=read_duration(context.waited),
        deadline_left_s=read_duration(context.deadline_left) if context.HasField("deadline_left") else None,
        num_preemptions=context.num_preemptions,
        num_executor_deaths=context.num_executor_deaths,
        last_death_offset=context.last_death_offset if context.HasField("last_death_offset") else None,
        num_prompt_cached_tokens=context.num_prompt_cached_tokens,
        times=read_times(context.times),
        drafts=DraftCounts(context.num_draft_tokens, context.num_accepted_draft_tokens),
    )
    return _request(record_id, context), history


def _is_within_bounds(context: plan_pb2.RequestContext) -> bool:
    """Executors may have made it up."""
    try:
        check(context)
    except BoundError:
        return False
    sent = context.request
    is_salt_short = len(sent.cache_salt.encode()) <= _MAX_SALT_BYTES
    return sent.stopping.max_tokens >= 0 and sent.output.prompt_logprobs >= 0 and is_salt_short


def _request(record_id: RecordId, context: plan_pb2.RequestContext) -> Request:
    """Its prompt and model stand beside the context."""
    sent, settings = context.request, context.settings
    wants_prompt = sent.output.HasField("prompt_logprobs") and record_id.index == 0
    return Request(
        handle=0,
        key=record_id,
        model="",
        prompt_token_ids=np.zeros(0, dtype=np.int32),
        sampling=read_sampling(settings.sampling, record_id),
        end_token_ids=tuple(settings.end_token_ids),
        max_tokens=sent.stopping.max_tokens if sent.stopping.HasField("max_tokens") else None,
        num_logprobs=settings.num_logprobs if settings.HasField("num_logprobs") else None,
        min_tokens=settings.min_tokens,
        ignored_end_token_ids=tuple(settings.ignored_end_token_ids),
        bad_words=tuple(tuple(word.ids) for word in settings.bad_word_token_ids),
        num_prompt_logprobs=sent.output.prompt_logprobs if wants_prompt else None,
        cache_salt=sent.cache_salt,
        bypass_prefix_cache=sent.bypass_prefix_cache,
        priority=sent.priority,
        num_completions=max(1, sent.sampling.n),
        max_num_draft_tokens=sent.speculation.max_num_draft_tokens
        if sent.speculation.HasField("max_num_draft_tokens")
        else None,
        is_resumable=sent.resumable,
        origin=sent.SerializeToString(),
        body_digest=context.body_digest,
        trace_parent=sent.trace_parent,
        structured=sent.structured.SerializeToString(deterministic=True),
        output_format=context.output_format,
    )


def write_context(request: Request, history: History) -> bytes:
    settings = plan_pb2.NewRequest(  # without the model's tokenizer the sent request does not tell these
        sampling=write_sampling(request.sampling),
        end_token_ids=request.end_token_ids,
        num_logprobs=request.num_logprobs,
        min_tokens=request.min_tokens or None,
        bad_word_token_ids=[inference_pb2.TokenIds(ids=word) for word in request.bad_words],
        ignored_end_token_ids=request.ignored_end_token_ids if request.min_tokens else (),
    )
    message = plan_pb2.RequestContext(
        body_digest=request.body_digest,
        waited=write_duration(history.waited_s),
        num_preemptions=history.num_preemptions,
        num_executor_deaths=history.num_executor_deaths,
        num_prompt_cached_tokens=history.num_prompt_cached_tokens,
        last_death_offset=history.last_death_offset,
        times=write_times(history.times),
        settings=settings,
        num_draft_tokens=history.drafts.num_verified,
        num_accepted_draft_tokens=history.drafts.num_accepted,
        output_format=request.output_format,
    )
    sent = message.request_with_form if request.structured else message.request
    sent.ParseFromString(request.origin)
    if request.structured:  # as it was composed, with what its prompt says
        sent.structured.ParseFromString(request.structured)
    if history.deadline_left_s is not None:
        message.deadline_left.CopyFrom(write_duration(history.deadline_left_s))
    return message.SerializeToString()

"""A placement as a message: what an executor must know to run a request, and what a successor of the scheduler must,
which finds it again in the executor's snapshot.

Knows the core's requests and paceline.v1. A value that changes nothing stays unset.
"""

import numpy as np
from google.protobuf.message import DecodeError

from paceline.v1 import inference_pb2, plan_pb2, sampling_pb2
from paceline_scheduler.core.executors import RequestContext, carried_with
from paceline_scheduler.core.plan import NewRequest
from paceline_scheduler.core.request import RecordId, Request, SamplingParams
from paceline_scheduler.durations import duration, seconds
from paceline_scheduler.link.columns import column_bytes


def record_id(key: RecordId) -> plan_pb2.RecordId:
    """Return the name under which executors know a completion."""
    return plan_pb2.RecordId(tenant=key.tenant, request_id=key.request_id, index=key.index)


def new_request(placement: NewRequest) -> plan_pb2.NewRequest:
    """Return the message that places a request."""
    request = placement.request
    message = _settings(request)
    message.row = placement.row
    message.id.CopyFrom(record_id(request.key))
    message.attempt = placement.attempt
    message.prompt_token_ids = column_bytes(request.prompt_token_ids)
    message.output_token_ids = column_bytes(placement.output_token_ids)
    message.num_cached_tokens = placement.num_cached_tokens
    message.max_tokens = placement.max_tokens
    if placement.num_prompt_logprobs is not None:
        message.num_prompt_logprobs = placement.num_prompt_logprobs
    message.context = write_carried(carried_with(placement))
    return message


def _settings(request: Request) -> plan_pb2.NewRequest:
    """Return what is the same for every placement of a request."""
    return plan_pb2.NewRequest(
        sampling=_sampling(request.sampling),
        end_token_ids=request.end_token_ids,
        num_logprobs=request.num_logprobs,
        min_tokens=request.min_tokens or None,
        bad_word_token_ids=[inference_pb2.TokenIds(ids=word) for word in request.bad_words],
        ignored_end_token_ids=request.ignored_end_token_ids if request.min_tokens else (),
    )


def read_carried(key: RecordId, data: bytes) -> RequestContext | None:
    """Return what a scheduler left with an executor about a request, None if this program cannot read it."""
    try:
        context = plan_pb2.RequestContext.FromString(data)
    except DecodeError:
        return None
    if not context.HasField("settings") or not context.HasField("request"):
        return None
    return RequestContext(
        request=_request(key, context),
        waited_s=seconds(context.waited),
        deadline_left_s=seconds(context.deadline_left) if context.HasField("deadline_left") else None,
        num_preemptions=context.num_preemptions,
        num_executor_deaths=context.num_executor_deaths,
        last_death_offset=context.last_death_offset if context.HasField("last_death_offset") else None,
        num_prompt_cached_tokens=context.num_prompt_cached_tokens,
    )


def _request(key: RecordId, context: plan_pb2.RequestContext) -> Request:
    """Return the request without its prompt, which stands beside the context, and without a model: the executor's."""
    sent, settings = context.request, context.settings
    wants_prompt = sent.output.HasField("prompt_logprobs") and key.index == 0
    return Request(
        handle=0,
        key=key,
        model="",
        prompt_token_ids=np.zeros(0, dtype=np.int32),
        sampling=_read_sampling(settings.sampling),
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
        is_resumable=sent.resumable,
        origin=sent.SerializeToString(),
        body_digest=context.body_digest,
    )


def _sampling(sampling: SamplingParams) -> sampling_pb2.SamplingParams:
    message = sampling_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty or None,
        frequency_penalty=sampling.frequency_penalty or None,
        repetition_penalty=None if sampling.repetition_penalty == 1 else sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
    )
    if sampling.top_k:
        message.top_k = sampling.top_k
    return message


def _read_sampling(message: sampling_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
    )


def write_carried(carried: RequestContext) -> bytes:
    """Return what is left with an executor about a request: it stores and returns it unread."""
    request = carried.request
    context = plan_pb2.RequestContext(
        body_digest=request.body_digest,
        waited=duration(carried.waited_s),
        num_preemptions=carried.num_preemptions,
        num_executor_deaths=carried.num_executor_deaths,
        num_prompt_cached_tokens=carried.num_prompt_cached_tokens,
        last_death_offset=carried.last_death_offset,
        settings=_settings(request),
    )
    context.request.ParseFromString(request.origin)
    if carried.deadline_left_s is not None:
        context.deadline_left.CopyFrom(duration(carried.deadline_left_s))
    return context.SerializeToString()

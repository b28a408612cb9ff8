"""A placement as a message: what an executor must know to run a request, and what a successor of the scheduler must.

Knows the core's requests and paceline.v1. A value that changes nothing stays unset.
"""

from paceline.v1 import inference_pb2, plan_pb2, sampling_pb2
from paceline_scheduler.core.plan import Placement
from paceline_scheduler.core.request import RequestKey, SamplingParams
from paceline_scheduler.durations import duration
from paceline_scheduler.link.columns import column_bytes


def record_id(key: RequestKey) -> plan_pb2.RecordId:
    """Return the name under which executors know a completion."""
    return plan_pb2.RecordId(tenant=key.tenant, request_id=key.request_id, index=key.index)


def new_request(placement: Placement, now_s: float) -> plan_pb2.NewRequest:
    """Return the message that places a request; `now_s` is the time on the clock of the requests' deadlines."""
    request = placement.request
    return plan_pb2.NewRequest(
        row=placement.row,
        id=record_id(request.key),
        attempt=placement.attempt,
        prompt_token_ids=column_bytes(request.prompt_token_ids),
        output_token_ids=column_bytes(placement.output_token_ids),
        num_cached_tokens=placement.num_cached_tokens,
        sampling=_sampling(request.sampling),
        end_token_ids=request.end_token_ids,
        max_tokens=placement.max_tokens,
        num_logprobs=request.num_logprobs,
        context=_context(placement, now_s).SerializeToString(),
        min_tokens=request.min_tokens or None,
        num_prompt_logprobs=placement.num_prompt_logprobs,
        bad_word_token_ids=[inference_pb2.TokenIds(ids=word) for word in request.bad_words],
        ignored_end_token_ids=request.ignored_end_token_ids if request.min_tokens else (),
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


def _context(placement: Placement, now_s: float) -> plan_pb2.RequestContext:
    request = placement.request
    context = plan_pb2.RequestContext(
        body_digest=request.body_digest,
        waited=duration(placement.waited_s),
        num_preemptions=placement.num_preemptions,
        num_executor_deaths=placement.num_executor_deaths,
        num_prompt_cached_tokens=placement.num_prompt_cached_tokens,
    )
    context.request.ParseFromString(request.origin)
    if request.deadline_s is not None:
        context.deadline_left.CopyFrom(duration(request.deadline_s - now_s))
    return context

"""Plain values as the messages that clients and operators are sent. Checks nothing."""

from collections.abc import Iterable

from paceline.plan.codec.welcomes import write_defaults
from paceline.plan.durations import write_duration
from paceline.plan.values import TokenLogprobs
from paceline.process.statuses import rpc_status
from paceline.v1 import admin_pb2, inference_pb2, plan_pb2, sampling_pb2
from paceline_scheduler.access.tenant_limits import TenantLimits
from paceline_scheduler.api import status
from paceline_scheduler.api.outbox import FailedRequest, Finish, MessageContent, PendingDelta
from paceline_scheduler.api.text.parts.formats import NO_PARTS, PartsSupport
from paceline_scheduler.api.text.parts.part import Part, PartKind
from paceline_scheduler.backend import ExecutorStatus, ServedModel
from paceline_scheduler.core.answers import Estimate, Explanation, ListedRequest
from paceline_scheduler.core.limits import LimitValues
from paceline_scheduler.observers.steps import StepRecord, StepTotals
from paceline_scheduler.wire_phases import write_times


def generate_response(delta: PendingDelta) -> inference_pb2.GenerateResponse:
    response = inference_pb2.GenerateResponse(request_id=delta.request_id)
    _fill_delta(response.delta, delta)
    return response


def session_response(content: MessageContent, draw: status.Draw = status.DRAW) -> inference_pb2.SessionResponse:
    """`draw` spreads when clients come back."""
    response = inference_pb2.SessionResponse()
    for delta in content.deltas:
        item = response.deltas.add()
        item.request_id = delta.request_id
        _fill_delta(item.delta, delta)
    for failure in content.failures:
        response.failures.append(_session_failure(failure, draw))
    if content.heartbeat:
        response.heartbeat.SetInParent()
    if content.drain is not None:
        response.drain.reason = content.drain.reason
        response.drain.grace.CopyFrom(write_duration(content.drain.grace_s))
    return response


def _fill_delta(message: inference_pb2.Delta, delta: PendingDelta) -> None:
    if delta.index:
        message.index = delta.index
    message.offset = delta.offset
    message.token_ids.extend(delta.token_ids)
    message.text = delta.text
    message.attempt = delta.attempt
    message.rolling_hash = delta.rolling_hash
    if delta.logprobs:
        message.logprobs.extend(_logprobs(delta.logprobs, delta.token_bytes))
    if delta.prompt_logprobs:
        message.prompt_logprobs.extend(_logprobs(delta.prompt_logprobs, delta.token_bytes))
    for part in delta.parts or ():
        _fill_part(message.parts.add(), part)
    if delta.finish is not None:
        message.finish.CopyFrom(_finish(delta.finish))


def _fill_part(message: inference_pb2.OutputPart, part: Part) -> None:
    if part.kind is PartKind.TEXT:
        message.text = part.text
    elif part.kind is PartKind.REASONING:
        message.reasoning = part.text
    else:
        call = message.tool_call
        call.arguments = part.text
        if part.index:
            call.index = part.index
        if part.id:
            call.id, call.name = part.id, part.name


def _logprobs(
    logprobs: Iterable[TokenLogprobs], token_bytes: tuple[bytes, ...] | None
) -> Iterable[sampling_pb2.TokenLogprobs]:
    for item in logprobs:
        message = sampling_pb2.TokenLogprobs(token_id=item.token_id, logprob=item.logprob)
        message.top.extend(
            sampling_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in item.top
        )
        if token_bytes is not None:
            message.token_bytes = token_bytes[item.token_id]
            for each in message.top:
                each.token_bytes = token_bytes[each.token_id]
        yield message


def _finish(finish: Finish) -> inference_pb2.Finish:
    message = inference_pb2.Finish(
        reason=sampling_pb2.FinishReason.ValueType(finish.reason),
        usage=inference_pb2.Usage(
            num_prompt_tokens=finish.num_prompt_tokens,
            num_cached_tokens=finish.num_cached_tokens,
            num_output_tokens=finish.num_output_tokens,
            num_draft_tokens=finish.drafts.num_verified,
            num_accepted_draft_tokens=finish.drafts.num_accepted,
            num_reasoning_tokens=finish.num_reasoning_tokens,
        ),
    )
    if finish.times is not None:
        message.times.CopyFrom(write_times(finish.times))
    if finish.stop_text is not None:
        message.stop_text = finish.stop_text
    elif finish.stop_token_id is not None:
        message.stop_token_id = finish.stop_token_id
    return message


def _session_failure(failure: FailedRequest, draw: status.Draw) -> inference_pb2.SessionFailure:
    return inference_pb2.SessionFailure(request_id=failure.request_id, error=_request_error(failure.error, draw))


def _request_error(error: Exception, draw: status.Draw = status.DRAW) -> sampling_pb2.RequestError:
    # It has the fields and numbers of google.rpc.Status.
    data = rpc_status(status.describe(error, draw)).SerializeToString()
    return sampling_pb2.RequestError.FromString(data)


def explain_response(explanation: Explanation) -> inference_pb2.ExplainResponse:
    times = explanation.times
    return inference_pb2.ExplainResponse(
        state=inference_pb2.RequestState.ValueType(explanation.state),
        waiting_for=explanation.waiting_for,
        queue_position=explanation.queue_position,
        num_preemptions=explanation.num_preemptions,
        preemption_reason=explanation.preemption_reason,
        executor=explanation.executor,
        num_computed_tokens=explanation.num_computed_tokens,
        num_output_tokens=explanation.num_output_tokens,
        times=None if times is None else write_times(times),
        num_draft_tokens=explanation.drafts.num_verified,
        num_accepted_draft_tokens=explanation.drafts.num_accepted,
    )


def estimate_response(estimate: Estimate) -> inference_pb2.EstimateResponse:
    """Times are absent where the request would be refused."""
    message = inference_pb2.EstimateResponse(
        num_prompt_tokens=estimate.num_prompt_tokens, num_cached_tokens=estimate.num_cached_tokens
    )
    if estimate.refusal is not None:
        message.would_be_refused.CopyFrom(_request_error(estimate.refusal))
        return message
    message.time_to_first_token.CopyFrom(write_duration(estimate.time_to_first_token_s))
    message.inter_token_time.CopyFrom(write_duration(estimate.inter_token_s))
    return message


def request_view(listed: ListedRequest) -> admin_pb2.RequestView:
    message = admin_pb2.RequestView(
        request_id=listed.key.request_id,
        tenant=listed.key.tenant,
        index=listed.key.index,
        model=listed.model,
        priority=listed.priority,
        num_prompt_tokens=listed.num_prompt_tokens,
        max_tokens=listed.max_tokens,
        has_listener=listed.has_listener,
        age=write_duration(listed.age_s),
        explanation=explain_response(listed.explanation),
    )
    if listed.time_left_s is not None:
        message.time_left.CopyFrom(write_duration(listed.time_left_s))
    return message


def model(served: ServedModel, support: PartsSupport = NO_PARTS) -> inference_pb2.Model:
    return inference_pb2.Model(
        name=served.name,
        architecture=served.architecture,
        max_model_len=served.max_model_len,
        vocab_size=served.vocab_size,
        end_token_ids=served.end_token_ids,
        has_chat_template=served.tokenizer.chat_template is not None,
        num_executors=served.num_executors,
        num_parameters=served.num_parameters,
        quantization=served.quantization,
        default_sampling=write_defaults(served.tokenizer.defaults),
        has_dummy_weights=served.has_dummy_weights,
        default_system_text=served.tokenizer.default_system_text or "",
        weight_bytes=served.weight_bytes,
        weights_digest=served.weights_digest,
        num_ranks=served.num_ranks,
        structured_output=served.structured_output,
        supports_tools=not support.why_no_tools,
        supports_reasoning=support.has_reasoning,
    )


def executor_view(executor: ExecutorStatus) -> admin_pb2.ExecutorView:
    holder = executor.holder
    return admin_pb2.ExecutorView(
        address=executor.address,
        state=admin_pb2.ExecutorState.ValueType(executor.state),
        incarnation=executor.incarnation,
        epoch=executor.epoch,
        model=executor.model,
        num_running_requests=executor.num_running_requests,
        blocks=_block_counts(executor),
        num_plans_in_flight=executor.num_plans_in_flight,
        last_error=executor.last_error,
        num_filled_slots=executor.num_filled_slots,
        num_owned_slots=executor.num_owned_slots,
        steps=_step_totals(executor.steps),
        holder_scheduler_id=holder.scheduler_id if holder else "",
        holder_term=holder.term if holder else 0,
        holder_address=holder.address if holder else "",
        max_num_rows=executor.max_num_rows,
        draft_speedup=executor.draft_speedup,
        draft_saved_ns=executor.draft_saved_ns,
        lost_for=None if executor.lost_for_s is None else write_duration(executor.lost_for_s),
        num_ranks=executor.num_ranks,
    )


def _step_totals(totals: StepTotals) -> admin_pb2.StepTotals:
    return admin_pb2.StepTotals(
        num_steps=totals.num_steps,
        num_rows=totals.num_rows,
        num_output_tokens=totals.num_output_tokens,
        timings=_timings(totals),
        starved_ns=totals.starved_ns,
        planning_ns=totals.planning_ns,
        num_draft_tokens=totals.drafts.num_verified,
        num_accepted_draft_tokens=totals.drafts.num_accepted,
        num_drafted_at=totals.drafts.num_verified_at,
        num_accepted_at=totals.drafts.num_accepted_at,
        predicted_ns=totals.predicted_ns,
    )


def _timings(times: StepTotals | StepRecord) -> plan_pb2.StepTimings:
    return plan_pb2.StepTimings(
        waited_ns=times.waited_ns,
        prepare_ns=times.prepare_ns,
        forward_ns=times.forward_ns,
        sample_ns=times.sample_ns,
        idle_ns=times.idle_ns,
        draft_ns=times.draft_ns,
    )


def step_response(record: StepRecord, num_dropped: int) -> admin_pb2.WatchStepsResponse:
    response = admin_pb2.WatchStepsResponse(
        address=record.address,
        step_id=record.step_id,
        epoch=record.epoch,
        num_rows=record.num_rows,
        num_tokens=record.num_tokens,
        num_output_tokens=record.num_output_tokens,
        predicted_ns=record.predicted_ns,
        timings=_timings(record),
        num_waiting_requests=record.num_waiting_requests,
        blocks=_block_counts(record),
        num_dropped=num_dropped,
        num_draft_tokens=record.num_draft_tokens,
        num_accepted_draft_tokens=record.num_accepted_draft_tokens,
        first_token_ns=record.first_token_ns,
        between_tokens_ns=[ns for ns, _ in record.gaps],
        num_between_tokens=[count for _, count in record.gaps],
    )
    response.planning.FromNanoseconds(record.planning_ns)
    return response


def _block_counts(counts: ExecutorStatus | StepRecord) -> admin_pb2.BlockCounts:
    return admin_pb2.BlockCounts(
        total=counts.num_total_blocks,
        free=counts.num_free_blocks,
        cached=counts.num_cached_blocks,
        used=counts.num_used_blocks,
        quarantined=counts.num_quarantined_blocks,
    )


def limits(values: LimitValues) -> admin_pb2.Limits:
    return admin_pb2.Limits(
        max_num_queued_reqs=values.max_num_queued_reqs,
        max_num_queued_tokens=values.max_num_queued_tokens,
        max_num_batched_tokens=values.max_num_batched_tokens,
        tenants=[_tenant_limits(limits, tenant) for tenant, limits in sorted(values.tenants.own.items())],
        any_tenant=_tenant_limits(values.tenants.any_tenant),
    )


def _tenant_limits(limits: TenantLimits, tenant: str | None = None) -> admin_pb2.TenantLimits:
    return admin_pb2.TenantLimits(
        tenant=tenant,
        max_num_queued_reqs=limits.max_num_queued_reqs,
        max_num_queued_tokens=limits.max_num_queued_tokens,
        max_requests_per_minute=limits.max_requests_per_minute,
        max_tokens_per_minute=limits.max_tokens_per_minute,
        max_kv_share=limits.max_kv_share,
        max_num_streams=limits.max_num_streams,
    )

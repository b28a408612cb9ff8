"""The plan stream in protobuf, to and from what the executor works on.

Knows the generated modules and the plain dataclasses, and where their values differ. It refuses to judge: what a plan
may contain is `rows.table`'s business, except that bytes must be a column at all.
"""

import hashlib
from collections.abc import Iterable
from datetime import timedelta

import numpy as np
from google.protobuf import duration_pb2

from paceline.v1 import inference_pb2, plan_pb2, sampling_pb2
from paceline_executor.errors import AttachError, PlanError, PlanFault
from paceline_executor.link import messages
from paceline_executor.link.description import Description
from paceline_executor.link.fence import Approach, Claim
from paceline_executor.link.status import status_of
from paceline_executor.rows import plan as rows
from paceline_executor.rows.logprobs import OutputLogprobs
from paceline_executor.rows.snapshot import SnapshotPart
from paceline_executor.runner.interface import Int32Array

_COLUMN = np.dtype("<i4")


def decode_request(message: plan_pb2.AttachRequest) -> list[messages.Incoming]:
    """What the scheduler says: several plans, or one message.

    Raises PlanError for bytes that are no column, AttachError for an empty message.
    """
    match message.WhichOneof("message"):
        case "plan":
            return [_decode_plan(message.plan)]
        case "plans" if message.plans.plans:
            return [_decode_plan(plan) for plan in message.plans.plans]
        case "heartbeat":
            return [messages.Heartbeat()]
        case "hello":
            return [_decode_hello(message.hello)]
        case _:
            raise AttachError("a message on the plan stream is hello, plan, plans or heartbeat")


def _decode_hello(hello: plan_pb2.Hello) -> messages.Hello:
    return messages.Hello(
        claim=Claim(hello.term, hello.scheduler_id, hello.address),
        protocols=messages.ProtocolRange(hello.min_protocol, hello.max_protocol),
        approach=Approach.TAKE_OVER if hello.takeover else Approach.WAIT,
        tag_key_digest=hello.tag_key_digest,
    )


def _decode_plan(plan: plan_pb2.BatchPlan) -> rows.BatchPlan:
    return rows.BatchPlan(
        incarnation=plan.incarnation,
        epoch=plan.epoch,
        step_id=plan.step_id,
        tags=rows.BlockTags(_column("tags.block_ids", plan.tags.block_ids), plan.tags.keys),
        releases=tuple(_decode_release(release) for release in plan.releases),
        forget=tuple(_decode_record_id(record_id) for record_id in plan.forget),
        copies=rows.BlockCopies(
            sources=_column("copies.sources", plan.copies.sources),
            destinations=_column("copies.destinations", plan.copies.destinations),
        ),
        placements=tuple(_decode_placement(request) for request in plan.new_requests),
        grants=_decode_grants("grants", plan.grants),
        shared=_decode_grants("shared", plan.shared),
        rows=_column("rows", plan.rows),
        num_scheduled_tokens=_column("num_scheduled_tokens", plan.num_scheduled_tokens),
        num_draft_tokens=_column("num_draft_tokens", plan.num_draft_tokens),
        predicted_ns=plan.predicted_ns,
    )


def _decode_release(release: plan_pb2.Release) -> rows.Release:
    if not release.HasField("final"):
        return rows.Release(release.row, None)
    return rows.Release(release.row, rows.FinalRelease(release.final.num_output_tokens, release.final.reason))


def _decode_grants(name: str, grants: plan_pb2.BlockGrants) -> rows.BlockGrants:
    if not grants.rows and not grants.block_ids and not grants.indices:
        return rows.NO_GRANTS
    return rows.BlockGrants(
        rows=_column(f"{name}.rows", grants.rows),
        indices=_column(f"{name}.indices", grants.indices),
        block_ids=_column(f"{name}.block_ids", grants.block_ids),
    )


def _decode_record_id(record_id: plan_pb2.RecordId) -> rows.RecordId:
    return rows.RecordId(record_id.tenant, record_id.request_id, record_id.index)


def _decode_placement(request: plan_pb2.NewRequest) -> rows.NewRequest:
    record_id = _decode_record_id(request.id)
    return rows.NewRequest(
        row=request.row,
        record_id=record_id,
        attempt=request.attempt,
        prompt_token_ids=_column("new_requests.prompt_token_ids", request.prompt_token_ids),
        output_token_ids=_column("new_requests.output_token_ids", request.output_token_ids),
        num_cached_tokens=request.num_cached_tokens,
        sampling=_decode_sampling(request.sampling, record_id),
        unsupported_fields=_unsupported_fields(request),
        end_token_ids=tuple(request.end_token_ids),
        max_tokens=request.max_tokens,
        num_logprobs=request.num_logprobs if request.HasField("num_logprobs") else None,
        context=request.context,
        sampling_message=request.sampling.SerializeToString(),
        min_tokens=request.min_tokens,
        ignored_end_token_ids=tuple(request.ignored_end_token_ids),
        bad_words=tuple(tuple(word.ids) for word in request.bad_word_token_ids),
        num_prompt_logprobs=request.num_prompt_logprobs if request.HasField("num_prompt_logprobs") else None,
    )


def _decode_sampling(sampling: sampling_pb2.SamplingParams, record_id: rows.RecordId) -> rows.SamplingParams:
    return rows.SamplingParams(
        temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
        # Set to 0 is out of range, and -1 says so: 0 means unlimited from here on.
        top_k=(sampling.top_k or -1) if sampling.HasField("top_k") else 0,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p if sampling.HasField("min_p") else 0.0,
        seed=sampling.seed if sampling.HasField("seed") else seed_of(record_id),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
    )


def seed_of(record_id: rows.RecordId) -> int:
    """The seed of a request that names none: BLAKE2b-64 of tenant, a zero byte and request_id, little-endian.

    For a completion other than the first, a zero byte and its index in decimal follow.
    """
    name = f"{record_id.tenant}\0{record_id.request_id}".encode()
    if record_id.index:
        name += f"\0{record_id.index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def _unsupported_fields(request: plan_pb2.NewRequest) -> tuple[str, ...]:
    # A field that is set to the value that changes nothing is honoured.
    sampling = request.sampling
    in_use = {
        "structured": request.HasField("structured"),
        "sampling.bad_words": bool(sampling.bad_words),  # texts, and there is no tokenizer here
        "sampling.n": sampling.HasField("n") and sampling.n != 1,
    }
    return tuple(field for field, is_set in in_use.items() if is_set)


def _column(name: str, values: bytes) -> Int32Array:
    if len(values) % _COLUMN.itemsize:
        raise PlanError(PlanFault.COLUMN_LENGTH, f"{name} has {len(values)} bytes; a column is a multiple of 4")
    return np.frombuffer(values, dtype=_COLUMN)


class ResponseEncoder:
    """Makes the executor's messages; knows what it is and what it serves."""

    def __init__(self, incarnation: int, tag_key: bytes, max_plans_in_flight: int, description: Description) -> None:
        self._incarnation = incarnation
        self._tag_key = tag_key
        self._max_plans_in_flight = max_plans_in_flight
        self._description = description

    def encode(self, message: messages.Outgoing) -> plan_pb2.AttachResponse:
        """Any message of the executor."""
        match message:
            case messages.StepsDone((done,)):
                return plan_pb2.AttachResponse(result=self._result(done))
            case messages.StepsDone(steps):
                results = [self._result(done) for done in steps]
                return plan_pb2.AttachResponse(results=plan_pb2.StepResults(results=results))
            case messages.Heartbeat(running_step_id, running_ns):
                heartbeat = inference_pb2.Heartbeat(running_step_id=running_step_id, running_ns=running_ns)
                return plan_pb2.AttachResponse(heartbeat=heartbeat)
            case SnapshotPart():
                return plan_pb2.AttachResponse(snapshot=_encode_snapshot(message))
            case messages.Welcome():
                return plan_pb2.AttachResponse(welcome=self._welcome(message))
            case messages.WaitingInLine(holder):
                return plan_pb2.AttachResponse(waiting=_encode_waiting(holder))
            case messages.Drain(reason, grace_s):
                return plan_pb2.AttachResponse(drain=inference_pb2.Drain(reason=reason, grace=_duration(grace_s)))

    def _welcome(self, welcome: messages.Welcome) -> plan_pb2.Welcome:
        description = self._description
        return plan_pb2.Welcome(
            incarnation=self._incarnation,
            epoch=welcome.epoch,
            protocol=welcome.protocol,
            model=encode_model(description),
            geometry=encode_geometry(description),
            limits=encode_limits(description, self._max_plans_in_flight),
            tag_key=self._tag_key,
            step_points=[
                plan_pb2.StepPoint(num_tokens=num_tokens, duration_ns=duration_ns)
                for num_tokens, duration_ns in description.step_points
            ],
            tokenizer_digest=description.tokenizer.digest,
            failed_step=None if welcome.failed_step is None else _encode_failed(welcome.failed_step),
        )

    def _result(self, done: messages.StepDone) -> plan_pb2.StepResult:
        result, timings = done.result, done.timings
        return plan_pb2.StepResult(
            incarnation=self._incarnation,
            epoch=result.epoch,
            step_id=result.step_id,
            rows=result.rows.tobytes(),
            num_accepted=result.num_accepted.tobytes(),
            token_ids=result.token_ids.tobytes(),
            finishes=result.finishes.tobytes(),
            logprobs=[_encode_logprobs(logprobs) for logprobs in result.logprobs],
            errors=[_encode_fault(fault) for fault in result.faults],
            prompt_logprobs=[_encode_prompt_logprobs(logprobs) for logprobs in result.prompt_logprobs],
            grant_hash=result.grant_hash,
            timings=plan_pb2.StepTimings(
                waited_ns=timings.waited_ns,
                prepare_ns=timings.prepare_ns,
                forward_ns=timings.forward_ns,
                sample_ns=timings.sample_ns,
                idle_ns=timings.idle_ns,
            ),
        )


def encode_model(description: Description) -> inference_pb2.Model:
    """The description of the model."""
    tokenizer = description.tokenizer
    return inference_pb2.Model(
        name=description.model,
        architecture=description.architecture,
        max_model_len=description.limits.max_model_len,
        vocab_size=description.limits.vocab_size,
        end_token_ids=tokenizer.end_token_ids,
        has_chat_template=tokenizer.chat_template is not None,
        num_executors=1,
        num_parameters=description.num_parameters,
        quantization=description.quantization,
        default_sampling=encode_defaults(description),
    )


def encode_defaults(description: Description) -> sampling_pb2.SamplingParams:
    """The generation defaults that came with the model; 0 for top_k, which keeps all, is sent as unset."""
    defaults = description.tokenizer.defaults
    return sampling_pb2.SamplingParams(
        temperature=defaults.temperature,
        top_k=defaults.top_k or None,
        top_p=defaults.top_p,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
    )


def encode_geometry(description: Description) -> plan_pb2.KvGeometry:
    """The shape of the KV cache."""
    geometry = description.geometry
    return plan_pb2.KvGeometry(
        num_blocks=geometry.num_blocks,
        block_size=geometry.block_size,
        bytes_per_block=geometry.bytes_per_block,
        dtype=description.kv_dtype,
    )


def encode_limits(description: Description, max_plans_in_flight: int) -> plan_pb2.ExecutorLimits:
    """The bounds that plans keep to."""
    limits = description.limits
    return plan_pb2.ExecutorLimits(
        max_num_rows=limits.num_rows,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        max_plans_in_flight=max_plans_in_flight,
    )


def _encode_waiting(holder: Claim) -> plan_pb2.WaitingInLine:
    return plan_pb2.WaitingInLine(
        holder_scheduler_id=holder.scheduler_id, holder_term=holder.term, holder_address=holder.address
    )


def _encode_failed(failed: messages.FailedStep) -> plan_pb2.FailedStep:
    return plan_pb2.FailedStep(epoch=failed.epoch, step_id=failed.step_id, message=failed.sentence)


def _encode_snapshot(part: SnapshotPart) -> plan_pb2.SnapshotPart:
    return plan_pb2.SnapshotPart(
        rows=[_encode_state(state) for state in part.states],
        tags=plan_pb2.BlockTags(block_ids=part.tags.block_ids.tobytes(), keys=part.tags.keys),
        last=part.is_last,
    )


def _encode_state(state: rows.RowState) -> plan_pb2.RowState:
    released = state.released
    return plan_pb2.RowState(
        id=plan_pb2.RecordId(
            tenant=state.record_id.tenant, request_id=state.record_id.request_id, index=state.record_id.index
        ),
        row=state.row,
        attempt=state.attempt,
        prompt_token_ids=state.prompt_token_ids.tobytes(),
        output_token_ids=state.output_token_ids.tobytes(),
        num_computed_tokens=state.num_computed_tokens,
        block_ids=state.block_ids.tobytes(),
        finish=plan_pb2.RowFinish.ValueType(state.finish),
        released=None if released is None else _encode_final(released),
        max_tokens=state.max_tokens,
        sampling=sampling_pb2.SamplingParams.FromString(state.sampling_message),
        end_token_ids=state.end_token_ids,
        context=state.context,
        continues=state.continues,
        logprobs=None if state.logprobs is None else _encode_columns(state.logprobs),
    )


def _encode_columns(logprobs: OutputLogprobs) -> plan_pb2.LogprobColumns:
    return plan_pb2.LogprobColumns(
        offset=logprobs.offset,
        logprobs=logprobs.logprobs.tobytes(),
        num_top=logprobs.num_top,
        top_token_ids=logprobs.top_token_ids.tobytes(),
        top_logprobs=logprobs.top_logprobs.tobytes(),
    )


def _encode_final(final: rows.FinalRelease) -> plan_pb2.FinalRelease:
    reason = sampling_pb2.FinishReason.ValueType(final.reason)
    return plan_pb2.FinalRelease(num_output_tokens=final.num_output_tokens, reason=reason)


def _encode_logprobs(logprobs: rows.RowLogprobs) -> plan_pb2.RowLogprobs:
    values = logprobs.values
    top = zip(values.top_token_ids, values.top_logprobs, strict=True)
    return plan_pb2.RowLogprobs(row=logprobs.row, tokens=[_token_logprobs(logprobs.token_id, values.chosen, top)])


def _encode_prompt_logprobs(logprobs: rows.RowPromptLogprobs) -> plan_pb2.RowPromptLogprobs:
    values = logprobs.values
    columns = OutputLogprobs(logprobs.position, values.logprobs, values.top_token_ids, values.top_logprobs)
    tokens = encode_token_logprobs(columns, logprobs.token_ids.tolist())
    return plan_pb2.RowPromptLogprobs(row=logprobs.row, position=logprobs.position, tokens=tokens)


def encode_token_logprobs(logprobs: OutputLogprobs, token_ids: list[int]) -> list[sampling_pb2.TokenLogprobs]:
    """Columns of log-probabilities in the form that people can read; `token_ids` are at least their tokens."""
    tops = zip(logprobs.top_token_ids.tolist(), logprobs.top_logprobs.tolist(), strict=True)
    return [
        _token_logprobs(token_id, logprob, zip(*top, strict=True))
        for token_id, logprob, top in zip(token_ids, logprobs.logprobs.tolist(), tops, strict=False)
    ]


def _token_logprobs(token_id: int, logprob: float, top: Iterable[tuple[int, float]]) -> sampling_pb2.TokenLogprobs:
    best = [sampling_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in top]
    return sampling_pb2.TokenLogprobs(token_id=token_id, logprob=logprob, top=best)


def _encode_fault(fault: rows.RowFault) -> plan_pb2.RowError:
    # RequestError has the fields and numbers of google.rpc.Status.
    error = sampling_pb2.RequestError.FromString(status_of(fault.error).SerializeToString())
    return plan_pb2.RowError(row=fault.row, error=error)


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromTimedelta(timedelta(seconds=seconds))
    return duration

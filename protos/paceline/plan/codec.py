"""The plan protocol's values to and from bytes: the one codec, for schedulers and executors.

Columns go straight between numpy and little-endian bytes. What comes in and does not have the form it must have is a
MalformedError that names the field; nothing behind this module checks form again. What a value may mean where it
arrives (which rows are in use, which blocks are free) is for whoever takes it.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from paceline.plan.hashes import seed_of
from paceline.plan.values import (
    KEY_BYTES,
    NO_COLUMN,
    NO_COPIES,
    NO_GRANTS,
    NO_TAGS,
    BatchPlan,
    BlockCopies,
    BlockGrants,
    BlockTags,
    Claim,
    Drain,
    ExecutorInfo,
    ExecutorLimits,
    FailedStep,
    FinalRelease,
    FinishReason,
    Float32Array,
    FromExecutor,
    GenerationDefaults,
    Heartbeat,
    Hello,
    Int32Array,
    KvGeometry,
    LogprobColumns,
    Model,
    NewRequest,
    ProtocolRange,
    RecordId,
    Release,
    RowError,
    RowFinish,
    RowLogprobs,
    RowState,
    SamplingParams,
    SnapshotPart,
    StepPoint,
    StepResult,
    StepTimings,
    ToExecutor,
    WaitingInLine,
    Welcome,
)
from paceline.v1 import executor_pb2, inference_pb2, plan_pb2, sampling_pb2

MAX_TAG_KEY_BYTES = 64  # of BLAKE2b
# What is more than this is no executor but a mistake, and would cost a scheduler its memory.
_HIGHEST = {
    "num_blocks": 1 << 26,
    "block_size": 1 << 12,
    "max_num_rows": 1 << 15,
    "max_num_batched_tokens": 1 << 20,
    "max_model_len": 1 << 24,
    "max_plans_in_flight": 1 << 10,
}
_ERROR_DOMAIN = "paceline"
_FINISHES = bytes(RowFinish)  # one byte each
_MAX_SECONDS = 315_576_000_000.0  # ten thousand years: the most that a Duration holds
_M = TypeVar("_M", bound=Message)


class MalformedError(ValueError):
    """Bytes that are no message of the protocol; `field` names what is wrong, empty where that is the whole message."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field


class ColumnError(MalformedError):
    """A column that is none, or columns that do not belong together."""


def parse(kind: type[_M], data: bytes) -> _M:
    """Return the protobuf message of these bytes. Raises MalformedError."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise MalformedError("", f"{len(data)} bytes are no {kind.__name__}") from error
    return message


# Columns


def column_bytes(values: Int32Array) -> bytes:
    """Return a column as it travels."""
    return values.astype("<i4", copy=False).tobytes()


def read_column(field: str, data: bytes) -> Int32Array:
    """Return the values of a column, read-only. Raises MalformedError."""
    if len(data) % 4:
        raise ColumnError(field, f"{field} has {len(data)} bytes; a column is a multiple of 4")
    return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False) if data else NO_COLUMN


def _read_floats(field: str, data: bytes) -> Float32Array:
    if len(data) % 4:
        raise ColumnError(field, f"{field} has {len(data)} bytes; a column of floats is a multiple of 4")
    return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)


def _float_bytes(values: Float32Array) -> bytes:
    return values.astype("<f4", copy=False).tobytes()


# What a scheduler says


def encode_request(message: ToExecutor, *more: BatchPlan) -> bytes:
    """Return an AttachRequest: one message, or several plans."""
    match message:
        case BatchPlan() if more:
            plans = [_write_plan(plan) for plan in (message, *more)]
            request = plan_pb2.AttachRequest(plans=plan_pb2.BatchPlans(plans=plans))
        case BatchPlan():
            request = plan_pb2.AttachRequest(plan=_write_plan(message))
        case Heartbeat():
            request = plan_pb2.AttachRequest(heartbeat=_write_heartbeat(message))
        case Hello():
            request = plan_pb2.AttachRequest(hello=_write_hello(message))
    return request.SerializeToString()


def decode_request(data: bytes) -> list[ToExecutor]:
    """Return what an AttachRequest says: several plans, or one message. Raises MalformedError."""
    request = parse(plan_pb2.AttachRequest, data)
    match request.WhichOneof("message"):
        case "plan":
            return [_read_plan(request.plan)]
        case "plans" if request.plans.plans:
            return [_read_plan(plan) for plan in request.plans.plans]
        case "heartbeat":
            return [_read_heartbeat(request.heartbeat)]
        case "hello":
            return [_read_hello(request.hello)]
        case _:
            raise MalformedError("message", "a message on the plan stream is hello, plan, plans or heartbeat")


def _write_hello(hello: Hello) -> plan_pb2.Hello:
    return plan_pb2.Hello(
        scheduler_id=hello.claim.scheduler_id,
        term=hello.claim.term,
        min_protocol=hello.protocols.lowest,
        max_protocol=hello.protocols.highest,
        takeover=hello.takeover,
        tag_key_digest=hello.tag_key_digest,
        address=hello.claim.address,
    )


def _read_hello(message: plan_pb2.Hello) -> Hello:
    return Hello(
        claim=Claim(message.term, message.scheduler_id, message.address),
        protocols=ProtocolRange(message.min_protocol, message.max_protocol),
        takeover=message.takeover,
        tag_key_digest=message.tag_key_digest,
    )


def _write_heartbeat(heartbeat: Heartbeat) -> inference_pb2.Heartbeat:
    return inference_pb2.Heartbeat(running_step_id=heartbeat.running_step_id, running_ns=heartbeat.running_ns)


def _read_heartbeat(message: inference_pb2.Heartbeat) -> Heartbeat:
    return Heartbeat(message.running_step_id, message.running_ns)


def _write_plan(plan: BatchPlan) -> plan_pb2.BatchPlan:
    message = plan_pb2.BatchPlan(
        incarnation=plan.incarnation,
        epoch=plan.epoch,
        step_id=plan.step_id,
        rows=column_bytes(plan.rows),
        num_scheduled_tokens=column_bytes(plan.num_scheduled_tokens),
        predicted_ns=plan.predicted_ns,
    )
    # In the steady state none of these is there, and an absent message costs nothing.
    if len(plan.tags.block_ids):
        message.tags.CopyFrom(_write_tags(plan.tags))
    if plan.releases:
        message.releases.extend(_write_release(release) for release in plan.releases)
    if plan.new_requests:
        message.new_requests.extend(write_new_request(new) for new in plan.new_requests)
    if len(plan.copies.sources):
        message.copies.sources = column_bytes(plan.copies.sources)
        message.copies.destinations = column_bytes(plan.copies.destinations)
    if len(plan.grants.rows):
        message.grants.CopyFrom(_write_grants(plan.grants))
    if len(plan.shared.rows):
        message.shared.CopyFrom(_write_grants(plan.shared))
    if plan.forget:
        message.forget.extend(_write_record_id(record_id) for record_id in plan.forget)
    if len(plan.num_draft_tokens):
        message.num_draft_tokens = column_bytes(plan.num_draft_tokens)
    return message


def _read_plan(message: plan_pb2.BatchPlan) -> BatchPlan:
    return BatchPlan(
        incarnation=message.incarnation,
        epoch=message.epoch,
        step_id=message.step_id,
        rows=read_column("rows", message.rows),
        num_scheduled_tokens=read_column("num_scheduled_tokens", message.num_scheduled_tokens),
        predicted_ns=message.predicted_ns,
        tags=_read_tags(message.tags) if message.HasField("tags") else NO_TAGS,
        releases=tuple(_read_release(release) for release in message.releases),
        forget=tuple(_read_record_id(record_id) for record_id in message.forget),
        copies=_read_copies(message.copies) if message.HasField("copies") else NO_COPIES,
        new_requests=tuple(read_new_request(new) for new in message.new_requests),
        grants=_read_grants("grants", message.grants) if message.HasField("grants") else NO_GRANTS,
        shared=_read_grants("shared", message.shared) if message.HasField("shared") else NO_GRANTS,
        num_draft_tokens=read_column("num_draft_tokens", message.num_draft_tokens),
    )


def _write_grants(grants: BlockGrants) -> plan_pb2.BlockGrants:
    return plan_pb2.BlockGrants(
        rows=column_bytes(grants.rows), indices=column_bytes(grants.indices), block_ids=column_bytes(grants.block_ids)
    )


def _read_grants(field: str, message: plan_pb2.BlockGrants) -> BlockGrants:
    return BlockGrants(
        rows=read_column(f"{field}.rows", message.rows),
        indices=read_column(f"{field}.indices", message.indices),
        block_ids=read_column(f"{field}.block_ids", message.block_ids),
    )


def _read_copies(message: plan_pb2.BlockCopies) -> BlockCopies:
    return BlockCopies(
        sources=read_column("copies.sources", message.sources),
        destinations=read_column("copies.destinations", message.destinations),
    )


def _write_tags(tags: BlockTags) -> plan_pb2.BlockTags:
    return plan_pb2.BlockTags(block_ids=column_bytes(tags.block_ids), keys=tags.keys)


def _read_tags(message: plan_pb2.BlockTags) -> BlockTags:
    block_ids = read_column("tags.block_ids", message.block_ids)
    if len(message.keys) != KEY_BYTES * len(block_ids):
        raise ColumnError("tags.keys", f"tags has {len(block_ids)} blocks and {len(message.keys)} bytes of keys")
    return BlockTags(block_ids, message.keys)


def _write_release(release: Release) -> plan_pb2.Release:
    return plan_pb2.Release(row=release.row, final=_write_final(release.final))


def _read_release(message: plan_pb2.Release) -> Release:
    return Release(message.row, _read_final("releases.final", message.final) if message.HasField("final") else None)


def _write_final(final: FinalRelease | None) -> plan_pb2.FinalRelease | None:
    if final is None:
        return None
    reason = sampling_pb2.FinishReason.ValueType(final.reason)
    return plan_pb2.FinalRelease(num_output_tokens=final.num_output_tokens, reason=reason)


def _read_final(field: str, message: plan_pb2.FinalRelease) -> FinalRelease:
    try:
        return FinalRelease(message.num_output_tokens, FinishReason(message.reason))
    except ValueError as error:
        raise MalformedError(f"{field}.reason", f"{field}.reason is {message.reason}, no FinishReason") from error


def _write_record_id(record_id: RecordId) -> plan_pb2.RecordId:
    return plan_pb2.RecordId(tenant=record_id.tenant, request_id=record_id.request_id, index=record_id.index)


def _read_record_id(message: plan_pb2.RecordId) -> RecordId:
    return RecordId(message.tenant, message.request_id, message.index)


def write_new_request(new: NewRequest) -> plan_pb2.NewRequest:
    """Return the message that places a request."""
    return plan_pb2.NewRequest(
        row=new.row,
        id=_write_record_id(new.record_id),
        attempt=new.attempt,
        prompt_token_ids=column_bytes(new.prompt_token_ids),
        output_token_ids=column_bytes(new.output_token_ids),
        num_cached_tokens=new.num_cached_tokens,
        sampling=write_sampling(new.sampling),
        end_token_ids=new.end_token_ids,
        max_tokens=new.max_tokens,
        num_logprobs=new.num_logprobs,
        context=new.context,
        min_tokens=new.min_tokens or None,
        num_prompt_logprobs=new.num_prompt_logprobs,
        bad_word_token_ids=[inference_pb2.TokenIds(ids=word) for word in new.bad_word_token_ids],
        ignored_end_token_ids=new.ignored_end_token_ids,
    )


def read_new_request(message: plan_pb2.NewRequest) -> NewRequest:
    """Return what places a request. Raises MalformedError."""
    record_id = _read_record_id(message.id)
    return NewRequest(
        row=message.row,
        record_id=record_id,
        attempt=message.attempt,
        prompt_token_ids=read_column("new_requests.prompt_token_ids", message.prompt_token_ids),
        output_token_ids=read_column("new_requests.output_token_ids", message.output_token_ids),
        num_cached_tokens=message.num_cached_tokens,
        sampling=read_sampling(message.sampling, record_id),
        end_token_ids=tuple(message.end_token_ids),
        max_tokens=message.max_tokens,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        context=message.context,
        min_tokens=message.min_tokens,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        bad_word_token_ids=tuple(tuple(word.ids) for word in message.bad_word_token_ids),
        ignored_end_token_ids=tuple(message.ignored_end_token_ids),
        unsupported_fields=_unsupported_fields(message),
    )


def _unsupported_fields(message: plan_pb2.NewRequest) -> tuple[str, ...]:
    # A field that is set to the value that changes nothing is honoured.
    sampling = message.sampling
    in_use = {
        "structured": message.HasField("structured"),
        "sampling.bad_words": bool(sampling.bad_words),  # texts, and an executor has no tokenizer
        "sampling.n": sampling.HasField("n") and sampling.n != 1,
    }
    return tuple(field for field, is_set in in_use.items() if is_set)


def write_sampling(sampling: SamplingParams) -> sampling_pb2.SamplingParams:
    """Return resolved parameters; of those that a plan need not name, the ones that change nothing stay unset."""
    return sampling_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k or None,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty or None,
        frequency_penalty=sampling.frequency_penalty or None,
        repetition_penalty=None if sampling.repetition_penalty == 1 else sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
    )


def read_sampling(message: sampling_pb2.SamplingParams, record_id: RecordId) -> SamplingParams:
    """Return the parameters, defaults filled in; a seed that is unset is made of the request's name."""
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        # Set to 0 is out of range, and -1 says so: 0 means unlimited from here on.
        top_k=(message.top_k or -1) if message.HasField("top_k") else 0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p if message.HasField("min_p") else 0.0,
        seed=message.seed if message.HasField("seed") else seed_of(record_id),
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
    )


# What an executor says


def encode_response(message: FromExecutor, *more: StepResult) -> bytes:
    """Return an AttachResponse: one message, or several results."""
    match message:
        case StepResult() if more:
            results = [_write_result(result) for result in (message, *more)]
            response = plan_pb2.AttachResponse(results=plan_pb2.StepResults(results=results))
        case StepResult():
            response = plan_pb2.AttachResponse(result=_write_result(message))
        case Heartbeat():
            response = plan_pb2.AttachResponse(heartbeat=_write_heartbeat(message))
        case SnapshotPart():
            response = plan_pb2.AttachResponse(snapshot=_write_snapshot(message))
        case Welcome():
            response = plan_pb2.AttachResponse(welcome=_write_welcome(message))
        case WaitingInLine(holder):
            waiting = plan_pb2.WaitingInLine(
                holder_scheduler_id=holder.scheduler_id, holder_term=holder.term, holder_address=holder.address
            )
            response = plan_pb2.AttachResponse(waiting=waiting)
        case Drain(reason, grace_s):
            response = plan_pb2.AttachResponse(drain=inference_pb2.Drain(reason=reason, grace=write_duration(grace_s)))
    return response.SerializeToString()


def decode_response(data: bytes) -> list[FromExecutor]:
    """Return what an AttachResponse says: several results, or one message. Raises MalformedError."""
    response = parse(plan_pb2.AttachResponse, data)
    match response.WhichOneof("message"):
        case "result":
            return [_read_result(response.result)]
        case "results" if response.results.results:
            return [_read_result(result) for result in response.results.results]
        case "heartbeat":
            return [_read_heartbeat(response.heartbeat)]
        case "waiting":
            waiting = response.waiting
            return [WaitingInLine(Claim(waiting.holder_term, waiting.holder_scheduler_id, waiting.holder_address))]
        case "welcome":
            return [_read_welcome(response.welcome)]
        case "snapshot":
            return [_read_snapshot(response.snapshot)]
        case "drain":
            return [Drain(response.drain.reason, read_duration(response.drain.grace))]
        case _:
            raise MalformedError("message", "a message of an executor on the plan stream is of an unknown kind")


def _write_result(result: StepResult) -> plan_pb2.StepResult:
    timings = result.timings
    message = plan_pb2.StepResult(
        incarnation=result.incarnation,
        epoch=result.epoch,
        step_id=result.step_id,
        rows=column_bytes(result.rows),
        num_accepted=column_bytes(result.num_accepted),
        token_ids=column_bytes(result.token_ids),
        finishes=result.finishes.tobytes(),
        grant_hash=result.grant_hash,
        timings=plan_pb2.StepTimings(
            waited_ns=timings.waited_ns,
            prepare_ns=timings.prepare_ns,
            forward_ns=timings.forward_ns,
            sample_ns=timings.sample_ns,
            idle_ns=timings.idle_ns,
        ),
    )
    if result.logprobs:
        message.logprobs.extend(
            plan_pb2.RowLogprobs(row=each.row, tokens=write_logprobs(each.columns, each.token_ids))
            for each in result.logprobs
        )
    if result.errors:
        message.errors.extend(_write_error(error) for error in result.errors)
    if result.prompt_logprobs:
        message.prompt_logprobs.extend(
            plan_pb2.RowPromptLogprobs(
                row=each.row, position=each.columns.offset, tokens=write_logprobs(each.columns, each.token_ids)
            )
            for each in result.prompt_logprobs
        )
    if len(result.num_draft_tokens):
        message.num_draft_tokens = column_bytes(result.num_draft_tokens)
    return message


def _read_result(message: plan_pb2.StepResult) -> StepResult:
    timings = message.timings
    result = StepResult(
        incarnation=message.incarnation,
        epoch=message.epoch,
        step_id=message.step_id,
        rows=read_column("rows", message.rows),
        num_accepted=read_column("num_accepted", message.num_accepted),
        token_ids=read_column("token_ids", message.token_ids),
        finishes=np.frombuffer(message.finishes, dtype=np.uint8),
        grant_hash=message.grant_hash,
        timings=StepTimings(
            timings.waited_ns, timings.prepare_ns, timings.forward_ns, timings.sample_ns, timings.idle_ns
        ),
        logprobs=tuple(_read_row_logprobs(each.row, 0, each.tokens) for each in message.logprobs),
        errors=tuple(_read_error(error) for error in message.errors),
        prompt_logprobs=tuple(
            _read_row_logprobs(each.row, each.position, each.tokens) for each in message.prompt_logprobs
        ),
        num_draft_tokens=read_column("num_draft_tokens", message.num_draft_tokens),
    )
    _check_columns(result)
    return result


def _check_columns(result: StepResult) -> None:
    """Raise ColumnError unless the columns of a result belong together."""
    step = f"step {result.step_id}"
    if not len(result.rows) == len(result.num_accepted) == len(result.finishes):
        raise ColumnError("num_accepted", f"{step}: columns of the result differ in length")
    # Without the bytes that are a RowFinish nothing is left; cheaper than a reduction, which every step would pay.
    if result.finishes.tobytes().strip(_FINISHES):
        raise ColumnError("finishes", f"{step}: a finish is no RowFinish")
    if len(result.num_draft_tokens) not in (0, len(result.rows)):
        raise ColumnError("num_draft_tokens", f"{step}: not every row says how many drafts were verified")
    # As unsigned numbers, so that one below 0 is more than all tokens there can be.
    if int(np.add.reduce(result.num_accepted.view(np.uint32), dtype=np.uint64)) != len(result.token_ids):
        raise ColumnError("num_accepted", f"{step}: the result's tokens do not add up")
    if result.logprobs:
        num_of_row = dict(zip(result.rows.tolist(), result.num_accepted.tolist(), strict=True))
        if any(each.columns.num_tokens != num_of_row.get(each.row, 0) for each in result.logprobs):
            raise ColumnError("logprobs", f"{step}: the log-probabilities are not those of the tokens")


def write_logprobs(columns: LogprobColumns, token_ids: Int32Array) -> list[sampling_pb2.TokenLogprobs]:
    """Return columns of log-probabilities in the form that people can read; `token_ids` are at least their tokens."""
    tokens = columns.of(columns.offset, token_ids[: columns.num_tokens])
    return [
        sampling_pb2.TokenLogprobs(
            token_id=token.token_id,
            logprob=token.logprob,
            top=[sampling_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top],
        )
        for token in tokens
    ]


def _read_row_logprobs(row: int, offset: int, tokens: Sequence[sampling_pb2.TokenLogprobs]) -> RowLogprobs:
    num_top = len(tokens[0].top) if tokens else 0
    if any(len(token.top) != num_top for token in tokens):
        raise ColumnError("logprobs.top", f"row {row}: not as many alternatives for each token")
    shape = (len(tokens), num_top)
    top = [best for token in tokens for best in token.top]
    columns = LogprobColumns(
        offset=offset,
        logprobs=np.array([token.logprob for token in tokens], dtype=np.float32),
        top_token_ids=np.array([best.token_id for best in top], dtype=np.int32).reshape(shape),
        top_logprobs=np.array([best.logprob for best in top], dtype=np.float32).reshape(shape),
    )
    return RowLogprobs(row, np.array([token.token_id for token in tokens], dtype=np.int32), columns)


def _write_error(error: RowError) -> plan_pb2.RowError:
    status = status_pb2.Status(code=error.code, message=error.message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=_ERROR_DOMAIN))
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    # RequestError has the fields and numbers of google.rpc.Status.
    return plan_pb2.RowError(row=error.row, error=sampling_pb2.RequestError.FromString(status.SerializeToString()))


def _read_error(message: plan_pb2.RowError) -> RowError:
    reason, field = "UNKNOWN", None
    for detail in message.error.details:
        if detail.type_url.endswith("/google.rpc.ErrorInfo"):
            reason = parse(error_details_pb2.ErrorInfo, detail.value).reason
        elif detail.type_url.endswith("/google.rpc.BadRequest"):
            violations = parse(error_details_pb2.BadRequest, detail.value).field_violations
            field = violations[0].field if violations else None
    return RowError(message.row, message.error.code, reason, message.error.message, field)


def _write_snapshot(part: SnapshotPart) -> plan_pb2.SnapshotPart:
    return plan_pb2.SnapshotPart(
        rows=[_write_row_state(state) for state in part.rows], tags=_write_tags(part.tags), last=part.last
    )


def _read_snapshot(message: plan_pb2.SnapshotPart) -> SnapshotPart:
    return SnapshotPart(
        rows=tuple(_read_row_state(state) for state in message.rows), tags=_read_tags(message.tags), last=message.last
    )


def _write_row_state(state: RowState) -> plan_pb2.RowState:
    return plan_pb2.RowState(
        id=_write_record_id(state.record_id),
        row=state.row,
        attempt=state.attempt,
        prompt_token_ids=column_bytes(state.prompt_token_ids),
        output_token_ids=column_bytes(state.output_token_ids),
        num_computed_tokens=state.num_computed_tokens,
        block_ids=column_bytes(state.block_ids),
        finish=plan_pb2.RowFinish.ValueType(state.finish),
        released=_write_final(state.released),
        max_tokens=state.max_tokens,
        sampling=None if state.sampling is None else write_sampling(state.sampling),
        end_token_ids=state.end_token_ids,
        context=state.context,
        continues=state.continues,
        logprobs=None if state.logprobs is None else _write_logprob_columns(state.logprobs),
    )


def _read_row_state(message: plan_pb2.RowState) -> RowState:
    record_id = _read_record_id(message.id)
    try:
        finish = RowFinish(message.finish)
    except ValueError as error:
        raise MalformedError("rows.finish", f"rows.finish is {message.finish}, no RowFinish") from error
    return RowState(
        record_id=record_id,
        row=message.row if message.HasField("row") else None,
        attempt=message.attempt,
        prompt_token_ids=read_column("rows.prompt_token_ids", message.prompt_token_ids),
        output_token_ids=read_column("rows.output_token_ids", message.output_token_ids),
        num_computed_tokens=message.num_computed_tokens,
        block_ids=read_column("rows.block_ids", message.block_ids),
        finish=finish,
        released=_read_final("rows.released", message.released) if message.HasField("released") else None,
        max_tokens=message.max_tokens,
        sampling=read_sampling(message.sampling, record_id) if message.HasField("sampling") else None,
        end_token_ids=tuple(message.end_token_ids),
        context=message.context,
        logprobs=_read_logprob_columns(message.logprobs) if message.HasField("logprobs") else None,
        continues=message.continues,
    )


def _write_logprob_columns(logprobs: LogprobColumns) -> plan_pb2.LogprobColumns:
    return plan_pb2.LogprobColumns(
        offset=logprobs.offset,
        logprobs=_float_bytes(logprobs.logprobs),
        num_top=logprobs.num_top,
        top_token_ids=column_bytes(logprobs.top_token_ids),
        top_logprobs=_float_bytes(logprobs.top_logprobs),
    )


def _read_logprob_columns(message: plan_pb2.LogprobColumns) -> LogprobColumns:
    logprobs, num_top = _read_floats("logprobs.logprobs", message.logprobs), message.num_top
    top_token_ids = read_column("logprobs.top_token_ids", message.top_token_ids)
    top_logprobs = _read_floats("logprobs.top_logprobs", message.top_logprobs)
    if not len(top_token_ids) == len(top_logprobs) == len(logprobs) * num_top:
        sentence = f"{len(logprobs)} tokens with {num_top} alternatives each do not fill their columns"
        raise ColumnError("logprobs.num_top", sentence)
    shape = (len(logprobs), num_top)
    return LogprobColumns(message.offset, logprobs, top_token_ids.reshape(shape), top_logprobs.reshape(shape))


def _write_welcome(welcome: Welcome) -> plan_pb2.Welcome:
    failed = welcome.failed_step
    return plan_pb2.Welcome(
        incarnation=welcome.incarnation,
        epoch=welcome.epoch,
        protocol=welcome.protocol,
        model=write_model(welcome.model),
        geometry=write_geometry(welcome.geometry),
        limits=write_limits(welcome.limits),
        tag_key=welcome.tag_key,
        step_points=[
            plan_pb2.StepPoint(num_tokens=point.num_tokens, duration_ns=point.duration_ns)
            for point in welcome.step_points
        ],
        tokenizer_digest=welcome.tokenizer_digest,
        failed_step=None
        if failed is None
        else plan_pb2.FailedStep(epoch=failed.epoch, step_id=failed.step_id, message=failed.message),
    )


def _read_welcome(message: plan_pb2.Welcome) -> Welcome:
    failed = message.failed_step
    _check_sizes("geometry", message.geometry)
    _check_sizes("limits", message.limits)
    if not 1 <= len(message.tag_key) <= MAX_TAG_KEY_BYTES:
        raise MalformedError("tag_key", f"tag_key has {len(message.tag_key)} bytes, not 1 to {MAX_TAG_KEY_BYTES}")
    return Welcome(
        incarnation=message.incarnation,
        epoch=message.epoch,
        protocol=message.protocol,
        model=_read_model(message.model),
        geometry=_read_geometry(message.geometry),
        limits=_read_limits(message.limits),
        tag_key=message.tag_key,
        tokenizer_digest=message.tokenizer_digest,
        step_points=tuple(StepPoint(point.num_tokens, point.duration_ns) for point in message.step_points),
        failed_step=FailedStep(failed.epoch, failed.step_id, failed.message)
        if message.HasField("failed_step")
        else None,
    )


def _check_sizes(field: str, message: plan_pb2.KvGeometry | plan_pb2.ExecutorLimits) -> None:
    for name, highest in _HIGHEST.items():
        value = getattr(message, name, 1)
        if not 1 <= value <= highest:
            raise MalformedError(f"{field}.{name}", f"{field}.{name} is {value}, not 1 to {highest}")


def write_model(model: Model) -> inference_pb2.Model:
    """Return the description of an executor's model."""
    return inference_pb2.Model(
        name=model.name,
        architecture=model.architecture,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        end_token_ids=model.end_token_ids,
        has_chat_template=model.has_chat_template,
        num_executors=1,
        num_parameters=model.num_parameters,
        quantization=model.quantization,
        default_sampling=write_defaults(model.default_sampling),
    )


def _read_model(message: inference_pb2.Model) -> Model:
    return Model(
        name=message.name,
        architecture=message.architecture,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        num_parameters=message.num_parameters,
        quantization=message.quantization,
        end_token_ids=tuple(message.end_token_ids),
        has_chat_template=message.has_chat_template,
        default_sampling=read_defaults(message.default_sampling),
    )


def write_defaults(defaults: GenerationDefaults) -> sampling_pb2.SamplingParams:
    """Return the generation defaults that came with a model; 0 for top_k, which keeps all, is sent as unset."""
    return sampling_pb2.SamplingParams(
        temperature=defaults.temperature,
        top_k=defaults.top_k or None,
        top_p=defaults.top_p,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
    )


def read_defaults(message: sampling_pb2.SamplingParams) -> GenerationDefaults:
    """Return the generation defaults that a message names. Raises MalformedError."""
    try:
        return _defaults(message)
    except ValueError as error:
        raise MalformedError("default_sampling", f"default_sampling: {error}") from error


def _defaults(message: sampling_pb2.SamplingParams) -> GenerationDefaults:
    return GenerationDefaults(
        temperature=message.temperature if message.HasField("temperature") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        min_p=message.min_p if message.HasField("min_p") else None,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else None,
    )


def write_geometry(geometry: KvGeometry) -> plan_pb2.KvGeometry:
    """Return the shape of the KV cache."""
    return plan_pb2.KvGeometry(
        num_blocks=geometry.num_blocks,
        block_size=geometry.block_size,
        bytes_per_block=geometry.bytes_per_block,
        dtype=geometry.dtype,
    )


def _read_geometry(message: plan_pb2.KvGeometry) -> KvGeometry:
    return KvGeometry(message.num_blocks, message.block_size, message.bytes_per_block, message.dtype)


def write_limits(limits: ExecutorLimits) -> plan_pb2.ExecutorLimits:
    """Return the bounds that plans keep to."""
    return plan_pb2.ExecutorLimits(
        max_num_rows=limits.max_num_rows,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        max_plans_in_flight=limits.max_plans_in_flight,
    )


def _read_limits(message: plan_pb2.ExecutorLimits) -> ExecutorLimits:
    return ExecutorLimits(
        message.max_num_rows, message.max_num_batched_tokens, message.max_model_len, message.max_plans_in_flight
    )


def decode_info(data: bytes) -> ExecutorInfo:
    """Return what a GetInfoResponse says about incarnation, holder and tokenizer. Raises MalformedError."""
    info = parse(executor_pb2.GetInfoResponse, data)
    return ExecutorInfo(
        incarnation=info.incarnation,
        term=info.term,
        holder_scheduler_id=info.holder_scheduler_id,
        vocab_size=info.model.vocab_size,
        tokenizer_digest=info.tokenizer_digest,
        num_waiting_schedulers=info.num_waiting_schedulers,
    )


def write_duration(seconds: float) -> Duration:
    """Return seconds as a message; beyond its range the longest there is. Never raises: negative and NaN are none."""
    message = Duration()
    # In this order, as `max` keeps its first argument where the second one is NaN.
    message.FromNanoseconds(round(min(max(0.0, seconds), _MAX_SECONDS) * 1e9))
    return message


def read_duration(message: Duration) -> float:
    """Return the seconds of a message; never raises, since its parts are bounded by its own ranges."""
    return message.seconds + message.nanos / 1e9

"""The plan protocol's messages to and from bytes: the scheduler's side.

Columns go straight between numpy and little-endian int32 bytes. What comes from the network and does not have the form
it must have is a DivergenceError; nothing behind this module checks it again.
"""

from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from paceline.v1 import executor_pb2, inference_pb2, plan_pb2, sampling_pb2
from paceline_scheduler.backend import GenerationDefaults, TokenizerSource
from paceline_scheduler.core.executors import ExecutorDescription, FailedStep, RowState, StepPoint
from paceline_scheduler.core.logprobs import LogprobColumns, TokenLogprobs
from paceline_scheduler.core.plan import (
    BatchPlan,
    BlockGrants,
    BlockTag,
    FinalRelease,
    Release,
    RowError,
    RowFinish,
    StepResult,
    StepTimings,
)
from paceline_scheduler.core.request import FinishReason, RecordId
from paceline_scheduler.errors import (
    DivergenceError,
    LinkError,
    ProtocolMismatchError,
    StreamEndedError,
    TermSupersededError,
)
from paceline_scheduler.holder import Holder
from paceline_scheduler.link.columns import column, column_bytes, floats
from paceline_scheduler.link.messages import (
    DrainNotice,
    ExecutorInfo,
    FromExecutor,
    Heartbeat,
    Hello,
    ModelCard,
    RowPart,
    SnapshotPart,
    ToExecutor,
    WaitingInLine,
    Welcome,
)
from paceline_scheduler.link.wire_placements import new_request, read_carried, record_id

_SERVICE = "/paceline.v1.ExecutorService"
ATTACH_METHOD = f"{_SERVICE}/Attach"
GET_INFO_METHOD = f"{_SERVICE}/GetInfo"
GET_TOKENIZER_METHOD = f"{_SERVICE}/GetTokenizer"
GET_INFO_REQUEST = executor_pb2.GetInfoRequest().SerializeToString()
GET_TOKENIZER_REQUEST = executor_pb2.GetTokenizerRequest().SerializeToString()

KEY_SIZE = 16
MAX_TAG_KEY_SIZE = 64  # of BLAKE2b
# What is more than this is no executor but a mistake, and would cost the scheduler its memory.
_HIGHEST = {
    "num_blocks": 1 << 26,
    "block_size": 1 << 12,
    "max_num_rows": 1 << 15,
    "max_num_batched_tokens": 1 << 20,
    "max_model_len": 1 << 24,
    "max_plans_in_flight": 1 << 10,
}
_M = TypeVar("_M", bound=Message)


# To the executor


def encode_message(message: ToExecutor, *more: BatchPlan) -> bytes:
    """Return an AttachRequest: one message, or several plans."""
    match message:
        case BatchPlan() if more:
            plans = [_plan(plan) for plan in (message, *more)]
            request = plan_pb2.AttachRequest(plans=plan_pb2.BatchPlans(plans=plans))
        case BatchPlan():
            request = plan_pb2.AttachRequest(plan=_plan(message))
        case Heartbeat():
            request = plan_pb2.AttachRequest(heartbeat=inference_pb2.Heartbeat())
        case Hello(scheduler_id, term, protocols, takeover, address):
            hello = plan_pb2.Hello(
                scheduler_id=scheduler_id,
                term=term,
                min_protocol=protocols.lowest,
                max_protocol=protocols.highest,
                takeover=takeover,
                address=address,
            )
            request = plan_pb2.AttachRequest(hello=hello)
    return request.SerializeToString()


def _plan(plan: BatchPlan) -> plan_pb2.BatchPlan:
    message = plan_pb2.BatchPlan(
        incarnation=plan.incarnation,
        epoch=plan.epoch,
        step_id=plan.step_id,
        rows=column_bytes(plan.rows),
        num_scheduled_tokens=column_bytes(plan.num_scheduled_tokens),
        predicted_ns=plan.predicted_ns,
    )
    # In the steady state none of these is there, and an absent message costs nothing.
    if len(plan.num_draft_tokens):
        message.num_draft_tokens = column_bytes(plan.num_draft_tokens)
    if plan.tags:
        message.tags.block_ids = column_bytes(np.array([tag.block_id for tag in plan.tags], dtype=np.int32))
        message.tags.keys = b"".join(tag.key for tag in plan.tags)
    if plan.releases:
        message.releases.extend(_release(release) for release in plan.releases)
    if plan.placements:
        message.new_requests.extend(new_request(placement) for placement in plan.placements)
    if plan.copies:
        message.copies.sources = column_bytes(np.array([copy.source for copy in plan.copies], dtype=np.int32))
        message.copies.destinations = column_bytes(np.array([copy.destination for copy in plan.copies], dtype=np.int32))
    if len(plan.grants.rows):
        message.grants.CopyFrom(_grants(plan.grants))
    if len(plan.shared.rows):
        message.shared.CopyFrom(_grants(plan.shared))
    if plan.forget:
        message.forget.extend(record_id(key) for key in plan.forget)
    return message


def _grants(grants: BlockGrants) -> plan_pb2.BlockGrants:
    return plan_pb2.BlockGrants(
        rows=column_bytes(grants.rows), indices=column_bytes(grants.indices), block_ids=column_bytes(grants.block_ids)
    )


def _release(release: Release) -> plan_pb2.Release:
    message = plan_pb2.Release(row=release.row)
    if release.final is not None:
        message.final.num_output_tokens = release.final.num_output_tokens
        message.final.reason = sampling_pb2.FinishReason.ValueType(release.final.reason)
    return message


# From the executor


def decode_messages(data: bytes, address: str) -> list[FromExecutor]:
    """Return what an AttachResponse says: several results, or one message.

    `address` is where the executor was dialled.
    """
    response = _parse(plan_pb2.AttachResponse, data)
    try:
        if response.HasField("results") and response.results.results:
            return [_result(result) for result in response.results.results]
        return [_message(response, address)]
    except ValueError as error:
        raise DivergenceError(f"the executor sent a value that is none: {error}") from error


def _message(response: plan_pb2.AttachResponse, address: str) -> FromExecutor:
    match response.WhichOneof("message"):
        case "result":
            return _result(response.result)
        case "heartbeat":
            return Heartbeat(response.heartbeat.running_step_id, response.heartbeat.running_ns)
        case "waiting":
            waiting = response.waiting
            return WaitingInLine(Holder(waiting.holder_scheduler_id, waiting.holder_term, waiting.holder_address))
        case "welcome":
            return _welcome(response.welcome, address)
        case "snapshot":
            return _snapshot_part(response.snapshot)
        case "drain":
            return DrainNotice(response.drain.reason, response.drain.grace.ToNanoseconds() / 1e9)
        case _:
            raise DivergenceError("the executor sent a message of an unknown kind")


def _result(message: plan_pb2.StepResult) -> StepResult:
    rows, num_accepted, token_ids = column(message.rows), column(message.num_accepted), column(message.token_ids)
    finishes, num_draft_tokens = np.frombuffer(message.finishes, dtype=np.uint8), column(message.num_draft_tokens)
    if not len(rows) == len(num_accepted) == len(finishes) or len(num_draft_tokens) not in (0, len(rows)):
        raise DivergenceError(f"step {message.step_id}: columns of the result differ in length")
    # As unsigned numbers, so that one below 0 is more than all tokens there can be.
    if int(np.add.reduce(num_accepted.view(np.uint32), dtype=np.uint64)) != len(token_ids):
        raise DivergenceError(f"step {message.step_id}: the result's tokens do not add up")
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    prompt_logprobs = {item.row: _prompt_logprobs(item) for item in message.prompt_logprobs}
    if message.logprobs:
        logprobs = {row.row: tuple(_logprobs(token) for token in row.tokens) for row in message.logprobs}
        num_of_row = dict(zip(rows.tolist(), num_accepted.tolist(), strict=True))
        if any(len(tokens) != num_of_row.get(row, 0) for row, tokens in logprobs.items()):
            raise DivergenceError(f"step {message.step_id}: the log-probabilities are not those of the tokens")
    timings = message.timings
    return StepResult(
        incarnation=message.incarnation,
        epoch=message.epoch,
        step_id=message.step_id,
        rows=rows,
        num_accepted=num_accepted,
        token_ids=token_ids,
        finishes=finishes,
        grant_hash=message.grant_hash,
        timings=StepTimings(
            timings.waited_ns, timings.prepare_ns, timings.forward_ns, timings.sample_ns, timings.idle_ns
        ),
        logprobs=logprobs,
        errors={row.row: _row_error(row.error) for row in message.errors},
        prompt_logprobs=prompt_logprobs,
        num_draft_tokens=num_draft_tokens,
    )


def _logprobs(message: sampling_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.token_id, message.logprob, tuple((top.token_id, top.logprob) for top in message.top))


def _prompt_logprobs(message: plan_pb2.RowPromptLogprobs) -> LogprobColumns:
    tokens = message.tokens
    num_top = len(tokens[0].top) if tokens else 0
    if any(len(token.top) != num_top for token in tokens):
        raise DivergenceError(f"row {message.row}: not as many alternatives for each token of the prompt")
    shape = (len(tokens), num_top)
    top = [best for token in tokens for best in token.top]
    return LogprobColumns(
        offset=message.position,
        logprobs=np.array([token.logprob for token in tokens], dtype=np.float32),
        top_token_ids=np.array([best.token_id for best in top], dtype=np.int32).reshape(shape),
        top_logprobs=np.array([best.logprob for best in top], dtype=np.float32).reshape(shape),
    )


def _row_error(message: sampling_pb2.RequestError) -> RowError:
    for detail in message.details:
        if detail.type_url.endswith("/google.rpc.ErrorInfo"):
            return RowError(_parse(error_details_pb2.ErrorInfo, detail.value).reason, message.message)
    return RowError("UNKNOWN", message.message)


def _welcome(message: plan_pb2.Welcome, address: str) -> Welcome:
    description = ExecutorDescription(
        address=address,
        incarnation=message.incarnation,
        epoch=message.epoch,
        model=message.model.name,
        num_blocks=message.geometry.num_blocks,
        block_size=message.geometry.block_size,
        max_num_rows=message.limits.max_num_rows,
        max_num_batched_tokens=message.limits.max_num_batched_tokens,
        max_model_len=message.limits.max_model_len,
        max_plans_in_flight=message.limits.max_plans_in_flight,
        tag_key=message.tag_key,
        step_points=tuple(StepPoint(point.num_tokens, point.duration_ns) for point in message.step_points),
        failed_step=_failed_step(message.failed_step) if message.HasField("failed_step") else None,
    )
    for name, highest in _HIGHEST.items():
        value = getattr(description, name)
        if not 1 <= value <= highest:
            raise DivergenceError(f"the executor's welcome says {name} = {value}, not 1 to {highest}")
    if not 1 <= len(description.tag_key) <= MAX_TAG_KEY_SIZE:
        raise DivergenceError(f"the executor's tag key has {len(description.tag_key)} bytes")
    card = ModelCard(
        name=message.model.name,
        architecture=message.model.architecture,
        max_model_len=message.model.max_model_len,
        vocab_size=message.model.vocab_size,
        num_parameters=message.model.num_parameters,
        quantization=message.model.quantization,
    )
    return Welcome(description, card, message.tokenizer_digest, message.protocol)


def _failed_step(message: plan_pb2.FailedStep) -> FailedStep:
    return FailedStep(message.epoch, message.step_id, message.message)


def _snapshot_part(message: plan_pb2.SnapshotPart) -> SnapshotPart:
    return SnapshotPart(
        rows=tuple(RowPart(_row(row), row.continues) for row in message.rows),
        tags=_tags(message.tags),
        is_last=message.last,
    )


def _row(row: plan_pb2.RowState) -> RowState:
    released = None
    if row.HasField("released"):
        released = FinalRelease(row.released.num_output_tokens, FinishReason(row.released.reason))
    key = RecordId(row.id.tenant, row.id.request_id, row.id.index)
    return RowState(
        key=key,
        row=row.row if row.HasField("row") else None,
        attempt=row.attempt,
        prompt_token_ids=column(row.prompt_token_ids),
        output_token_ids=column(row.output_token_ids),
        num_computed_tokens=row.num_computed_tokens,
        block_ids=column(row.block_ids),
        finish=RowFinish(row.finish),
        released=released,
        logprobs=_logprob_columns(row.logprobs) if row.HasField("logprobs") else None,
        carried=read_carried(key, row.context) if row.context else None,
    )


def _logprob_columns(message: plan_pb2.LogprobColumns) -> LogprobColumns:
    logprobs, num_top = floats(message.logprobs), message.num_top
    top_token_ids, top_logprobs = column(message.top_token_ids), floats(message.top_logprobs)
    if not len(top_token_ids) == len(top_logprobs) == len(logprobs) * num_top:
        raise DivergenceError(f"{len(logprobs)} tokens with {num_top} alternatives each do not fill their columns")
    shape = (len(logprobs), num_top)
    return LogprobColumns(message.offset, logprobs, top_token_ids.reshape(shape), top_logprobs.reshape(shape))


def _tags(tags: plan_pb2.BlockTags) -> tuple[BlockTag, ...]:
    block_ids = column(tags.block_ids).tolist()
    if len(tags.keys) != KEY_SIZE * len(block_ids):
        raise DivergenceError(f"{len(block_ids)} tagged blocks with {len(tags.keys)} bytes of keys")
    keys = (tags.keys[start : start + KEY_SIZE] for start in range(0, len(tags.keys), KEY_SIZE))
    return tuple(BlockTag(block, key) for block, key in zip(block_ids, keys, strict=True))


def decode_info(data: bytes) -> ExecutorInfo:
    """Return what a GetInfoResponse says about incarnation, holder and tokenizer."""
    info = _parse(executor_pb2.GetInfoResponse, data)
    return ExecutorInfo(
        info.incarnation,
        info.term,
        info.holder_scheduler_id,
        info.model.vocab_size,
        info.tokenizer_digest,
        info.num_waiting_schedulers,
    )


def decode_tokenizer_part(data: bytes) -> tuple[TokenizerSource, bool]:
    """Return a part of a tokenizer, whose `json` is a piece, and whether it is the last one."""
    part = _parse(executor_pb2.GetTokenizerResponse, data)
    sampling = part.default_sampling
    defaults = GenerationDefaults(
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        min_p=sampling.min_p if sampling.HasField("min_p") else None,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else None,
    )
    source = TokenizerSource(
        digest=part.digest,
        json=part.tokenizer_json,
        chat_template=part.chat_template if part.HasField("chat_template") else None,
        bos_token_id=part.bos_token_id if part.HasField("bos_token_id") else None,
        eos_token_id=part.eos_token_id if part.HasField("eos_token_id") else None,
        end_token_ids=tuple(part.end_token_ids),
        add_bos=part.add_bos,
        defaults=defaults,
    )
    return source, part.last


def decode_refusal(sentence: str, details: bytes | None) -> LinkError:
    """Return the error that a failed call stands for; `details` are its `grpc-status-details-bin`."""
    if details:
        for detail in _parse(status_pb2.Status, details).details:
            info = error_details_pb2.ErrorInfo()
            if not detail.Unpack(info):
                continue
            if info.reason == "TERM_SUPERSEDED":
                return _superseded(info)
            if info.reason == "PROTOCOL_MISMATCH":
                return ProtocolMismatchError(sentence)
    return StreamEndedError(sentence)


def _superseded(info: error_details_pb2.ErrorInfo) -> TermSupersededError:
    said = info.metadata
    term = said.get("holder_term", "")
    holder = Holder(
        said.get("holder_scheduler_id", ""), int(term) if term.isdecimal() else 0, said.get("holder_address", "")
    )
    return TermSupersededError(holder)


def _parse(kind: type[_M], data: bytes) -> _M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise DivergenceError(f"the executor sent a malformed {kind.__name__}") from error
    return message

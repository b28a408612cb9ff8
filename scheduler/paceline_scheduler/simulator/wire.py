"""The plan protocol's messages to and from bytes: the executor's side, as a simulated executor needs it; and what
measurements ask a scheduler.

Written apart from `link/wire.py` on purpose: the two check each other.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from google.rpc import error_details_pb2

from paceline.v1 import admin_pb2, executor_pb2, inference_pb2, plan_pb2, sampling_pb2
from paceline_scheduler.backend import StepTotals
from paceline_scheduler.core.executors import ExecutorDescription, RequestContext, RowState, Snapshot
from paceline_scheduler.core.logprobs import LogprobColumns, TokenLogprobs
from paceline_scheduler.core.plan import (
    NO_GRANTS,
    BatchPlan,
    BlockCopy,
    BlockGrants,
    BlockTag,
    FinalRelease,
    NewRequest,
    Release,
    RowError,
    StepResult,
)
from paceline_scheduler.core.request import FinishReason, Int32Array, RecordId, Request, SamplingParams
from paceline_scheduler.link.wire_placements import read_carried, write_carried
from paceline_scheduler.simulator.bytes_tokenizer import BytesTokenizer
from paceline_scheduler.simulator.config import SimulatorConfig
from paceline_scheduler.simulator.fence import Claim

GENERATE_METHOD = "/paceline.v1.InferenceService/Generate"
LIST_EXECUTORS_METHOD = "/paceline.v1.AdminService/ListExecutors"  # its request is empty
MAX_PIECE = 65_536  # values of a column in one row of a snapshot part
_FINISH_REASONS = {int(reason): reason for reason in FinishReason}
# Of a plan without contexts, as a test may send it.
_NOTHING_CARRIED = RequestContext(
    Request(0, RecordId("", ""), "", np.zeros(0, dtype=np.int32), SamplingParams(0.0, 0, 1.0, 0.0, 0), ()),
    waited_s=0.0,
    deadline_left_s=None,
    num_preemptions=0,
    num_executor_deaths=0,
    last_death_offset=None,
    num_prompt_cached_tokens=0,
)


def read_column(data: bytes) -> Int32Array:
    """Return the values of a column."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32)


def write_column(values: Int32Array) -> bytes:
    """Return a column as bytes."""
    return np.asarray(values, dtype="<i4").tobytes()


def read_plan(message: plan_pb2.BatchPlan) -> BatchPlan:
    """Return a plan as the simulated executor takes it."""
    keys = message.tags.keys
    blocks = read_column(message.tags.block_ids).tolist()
    copies = message.copies
    return BatchPlan(
        incarnation=message.incarnation,
        epoch=message.epoch,
        step_id=message.step_id,
        rows=read_column(message.rows),
        num_scheduled_tokens=read_column(message.num_scheduled_tokens),
        predicted_ns=message.predicted_ns,
        tags=tuple(BlockTag(block, keys[16 * i : 16 * i + 16]) for i, block in enumerate(blocks)),
        releases=tuple(_read_release(release) for release in message.releases),
        placements=tuple(_read_placement(new) for new in message.new_requests),
        copies=tuple(map(BlockCopy, *(read_column(c).tolist() for c in (copies.sources, copies.destinations)))),
        grants=_read_grants(message.grants) if message.HasField("grants") else NO_GRANTS,
        shared=_read_grants(message.shared) if message.HasField("shared") else NO_GRANTS,
        forget=tuple(RecordId(key.tenant, key.request_id, key.index) for key in message.forget),
        num_draft_tokens=read_column(message.num_draft_tokens),
    )


def _read_grants(message: plan_pb2.BlockGrants) -> BlockGrants:
    return BlockGrants(read_column(message.rows), read_column(message.indices), read_column(message.block_ids))


def _read_release(message: plan_pb2.Release) -> Release:
    if not message.HasField("final"):
        return Release(message.row, None)
    return Release(message.row, FinalRelease(message.final.num_output_tokens, _FINISH_REASONS[message.final.reason]))


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


def _read_placement(message: plan_pb2.NewRequest) -> NewRequest:
    key = RecordId(message.id.tenant, message.id.request_id, message.id.index)
    carried = read_carried(key, message.context) or _NOTHING_CARRIED
    request = replace(
        carried.request,
        key=key,
        prompt_token_ids=read_column(message.prompt_token_ids),
        sampling=_read_sampling(message.sampling),
        end_token_ids=tuple(message.end_token_ids),
        min_tokens=message.min_tokens,
        ignored_end_token_ids=tuple(message.ignored_end_token_ids),
        bad_words=tuple(tuple(word.ids) for word in message.bad_word_token_ids),
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
    )
    return NewRequest(
        row=message.row,
        request=request,
        attempt=message.attempt,
        output_token_ids=read_column(message.output_token_ids),
        max_tokens=message.max_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_prompt_cached_tokens=carried.num_prompt_cached_tokens,
        num_preemptions=carried.num_preemptions,
        num_executor_deaths=carried.num_executor_deaths,
        waited_s=carried.waited_s,
        last_death_offset=carried.last_death_offset,
        deadline_left_s=carried.deadline_left_s,
    )


def write_waiting(holder: Claim) -> plan_pb2.AttachResponse:
    """Say that another scheduler holds the executor."""
    waiting = plan_pb2.WaitingInLine(
        holder_scheduler_id=holder.scheduler_id, holder_term=holder.term, holder_address=holder.address
    )
    return plan_pb2.AttachResponse(waiting=waiting)


def write_heartbeat(running_step_id: int, running_ns: int) -> plan_pb2.AttachResponse:
    """Say that the executor is alive, and what it runs."""
    heartbeat = inference_pb2.Heartbeat(running_step_id=running_step_id, running_ns=running_ns)
    return plan_pb2.AttachResponse(heartbeat=heartbeat)


def write_drain(reason: str) -> plan_pb2.AttachResponse:
    """Say that the executor is going away."""
    return plan_pb2.AttachResponse(drain=inference_pb2.Drain(reason=reason))


def write_welcome(
    description: ExecutorDescription, config: SimulatorConfig, tokenizer: BytesTokenizer, protocol: int
) -> plan_pb2.AttachResponse:
    """Accept a scheduler."""
    welcome = plan_pb2.Welcome(
        incarnation=description.incarnation,
        epoch=description.epoch,
        protocol=protocol,
        model=write_model(config, tokenizer),
        geometry=write_geometry(config),
        limits=write_limits(config),
        tag_key=config.tag_key,
        step_points=[
            plan_pb2.StepPoint(num_tokens=point.num_tokens, duration_ns=point.duration_ns)
            for point in config.step_points
        ],
        tokenizer_digest=tokenizer.digest,
    )
    if (failed := description.failed_step) is not None:
        welcome.failed_step.CopyFrom(
            plan_pb2.FailedStep(epoch=failed.epoch, step_id=failed.step_id, message=failed.message)
        )
    return plan_pb2.AttachResponse(welcome=welcome)


def write_model(config: SimulatorConfig, tokenizer: BytesTokenizer) -> inference_pb2.Model:
    """Describe the simulated model."""
    return inference_pb2.Model(
        name=config.model,
        architecture="simulated",
        max_model_len=config.max_model_len,
        vocab_size=config.tokens.vocab_size,
        end_token_ids=tokenizer.end_token_ids,
        has_chat_template=True,
        num_executors=1,
    )


def write_geometry(config: SimulatorConfig) -> plan_pb2.KvGeometry:
    """Describe the KV cache."""
    return plan_pb2.KvGeometry(num_blocks=config.num_blocks, block_size=config.block_size, dtype="token ids")


def write_limits(config: SimulatorConfig) -> plan_pb2.ExecutorLimits:
    """Name the executor's bounds."""
    return plan_pb2.ExecutorLimits(
        max_num_rows=config.max_num_rows,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        max_plans_in_flight=config.max_plans_in_flight,
    )


def write_snapshot(snapshot: Snapshot) -> list[plan_pb2.AttachResponse]:
    """Return a snapshot in parts, one request or piece of one each, so that joining is exercised."""
    parts = [plan_pb2.SnapshotPart(rows=[piece]) for row in snapshot.rows for piece in _write_row(row)]
    tags = plan_pb2.BlockTags(
        block_ids=write_column(np.array([tag.block_id for tag in snapshot.tags], dtype=np.int32)),
        keys=b"".join(tag.key for tag in snapshot.tags),
    )
    parts.append(plan_pb2.SnapshotPart(tags=tags, last=True))
    return [plan_pb2.AttachResponse(snapshot=part) for part in parts]


def _write_row(row: RowState) -> list[plan_pb2.RowState]:
    columns = (row.prompt_token_ids, row.output_token_ids, row.block_ids)  # log-probabilities are fewer than output
    num_pieces = max(1, *(-(-len(column) // MAX_PIECE) for column in columns))
    pieces = []
    for index in range(num_pieces):
        prompt, output, blocks = (column[index * MAX_PIECE : (index + 1) * MAX_PIECE] for column in columns)
        piece = plan_pb2.RowState(
            id=plan_pb2.RecordId(tenant=row.key.tenant, request_id=row.key.request_id, index=row.key.index),
            row=row.row,
            attempt=row.attempt,
            prompt_token_ids=write_column(prompt),
            output_token_ids=write_column(output),
            num_computed_tokens=row.num_computed_tokens,
            block_ids=write_column(blocks),
            finish=plan_pb2.RowFinish.ValueType(row.finish),
            continues=index + 1 < num_pieces,
        )
        if row.logprobs is not None:
            piece.logprobs.CopyFrom(_write_logprobs(row.logprobs, index * MAX_PIECE, (index + 1) * MAX_PIECE))
        if row.carried is not None and not index:
            piece.context = write_carried(row.carried)
        if row.released is not None:
            piece.released.num_output_tokens = row.released.num_output_tokens
            piece.released.reason = sampling_pb2.FinishReason.ValueType(row.released.reason)
        pieces.append(piece)
    return pieces


def _write_logprobs(columns: LogprobColumns, start: int, end: int) -> plan_pb2.LogprobColumns:
    start, end = min(start, len(columns.logprobs)), min(end, len(columns.logprobs))
    return plan_pb2.LogprobColumns(
        offset=columns.offset + start,
        logprobs=columns.logprobs[start:end].astype("<f4").tobytes(),
        num_top=columns.top_token_ids.shape[1],
        top_token_ids=write_column(columns.top_token_ids[start:end]),
        top_logprobs=columns.top_logprobs[start:end].astype("<f4").tobytes(),
    )


def write_generate(text: str, n: int) -> bytes:
    """Return a client's request for so many completions."""
    return inference_pb2.GenerateRequest(text=text, sampling=sampling_pb2.SamplingParams(n=n)).SerializeToString()


def read_step_totals(data: bytes) -> StepTotals:
    """Return the sums of steps of the only executor in a ListExecutorsResponse."""
    (executor,) = admin_pb2.ListExecutorsResponse.FromString(data).executors
    steps, timings = executor.steps, executor.steps.timings
    return StepTotals(
        num_steps=steps.num_steps,
        num_rows=steps.num_rows,
        num_output_tokens=steps.num_output_tokens,
        waited_ns=timings.waited_ns,
        prepare_ns=timings.prepare_ns,
        forward_ns=timings.forward_ns,
        sample_ns=timings.sample_ns,
        idle_ns=timings.idle_ns,
        starved_ns=steps.starved_ns,
        planning_ns=steps.planning_ns,
    )


def write_result(result: StepResult) -> plan_pb2.AttachResponse:
    """Report a step."""
    timings = result.timings
    message = plan_pb2.StepResult(
        incarnation=result.incarnation,
        epoch=result.epoch,
        step_id=result.step_id,
        rows=write_column(result.rows),
        num_accepted=write_column(result.num_accepted),
        token_ids=write_column(result.token_ids),
        finishes=result.finishes.tobytes(),
        grant_hash=result.grant_hash,
        timings=plan_pb2.StepTimings(forward_ns=timings.forward_ns, idle_ns=timings.idle_ns),
        logprobs=[
            plan_pb2.RowLogprobs(row=row, tokens=_write_tokens(tokens)) for row, tokens in result.logprobs.items()
        ],
        errors=[plan_pb2.RowError(row=row, error=_write_error(error)) for row, error in result.errors.items()],
        prompt_logprobs=[_write_prompt_logprobs(row, columns) for row, columns in result.prompt_logprobs.items()],
        num_draft_tokens=write_column(result.num_draft_tokens),
    )
    return plan_pb2.AttachResponse(result=message)


def _write_prompt_logprobs(row: int, columns: LogprobColumns) -> plan_pb2.RowPromptLogprobs:
    # Which tokens they are of is not known here any more; a scheduler that asked knows its prompt.
    tokens = columns.of(columns.offset, np.zeros(len(columns.logprobs), dtype=np.int32))
    return plan_pb2.RowPromptLogprobs(row=row, position=columns.offset, tokens=_write_tokens(tokens))


def _write_tokens(tokens: Iterable[TokenLogprobs]) -> list[sampling_pb2.TokenLogprobs]:
    return [
        sampling_pb2.TokenLogprobs(
            token_id=token.token_id,
            logprob=token.logprob,
            top=[sampling_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in token.top],
        )
        for token in tokens
    ]


def _write_error(error: RowError) -> sampling_pb2.RequestError:
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain="paceline")
    detail = sampling_pb2.ErrorDetail(
        type_url="type.googleapis.com/google.rpc.ErrorInfo", value=info.SerializeToString()
    )
    return sampling_pb2.RequestError(code=13, message=error.message, details=[detail])


def write_tokenizer(tokenizer: BytesTokenizer, max_part_bytes: int) -> list[executor_pb2.GetTokenizerResponse]:
    """Return the tokenizer in parts."""
    json = tokenizer.json
    pieces = [json[start : start + max_part_bytes] for start in range(0, len(json), max_part_bytes)]
    first = executor_pb2.GetTokenizerResponse(
        digest=tokenizer.digest,
        tokenizer_json=pieces[0],
        chat_template=tokenizer.chat_template,
        eos_token_id=tokenizer.end_token_ids[0],
        end_token_ids=tokenizer.end_token_ids,
    )
    rest = [executor_pb2.GetTokenizerResponse(tokenizer_json=piece) for piece in pieces[1:]]
    parts = [first, *rest]
    parts[-1].last = True
    return parts

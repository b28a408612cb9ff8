"""What an executor holds when a scheduler attaches: rows, records, tags."""

from paceline.plan.codec.columns import (
    ColumnError,
    MalformedError,
    column_bytes,
    float_bytes,
    read_column,
    read_floats,
    refuse_unsupported,
)
from paceline.plan.codec.requests import (
    read_final,
    read_record_id,
    read_sampling,
    read_tags,
    write_final,
    write_record_id,
    write_sampling,
    write_tags,
)
from paceline.plan.values import LogprobColumns, RowFinish, RowState, SnapshotPart
from paceline.v1 import plan_pb2


def write_snapshot(part: SnapshotPart) -> plan_pb2.SnapshotPart:
    return plan_pb2.SnapshotPart(
        rows=[_write_row_state(state) for state in part.rows],
        tags=write_tags(part.tags),
        last=bool(part.num_parts),
        num_parts=part.num_parts,
    )


def read_snapshot(message: plan_pb2.SnapshotPart) -> SnapshotPart:
    refuse_unsupported(message, "adapters", "imports", "exports")
    if message.last != bool(message.num_parts):
        raise MalformedError("num_parts", "num_parts must be set in the last part of a snapshot only")
    return SnapshotPart(
        rows=tuple(_read_row_state(state) for state in message.rows),
        tags=read_tags(message.tags),
        num_parts=message.num_parts,
    )


def _write_row_state(state: RowState) -> plan_pb2.RowState:
    return plan_pb2.RowState(
        id=write_record_id(state.record_id),
        row=state.row,
        attempt=state.attempt,
        prompt_token_ids=column_bytes(state.prompt_token_ids),
        output_token_ids=column_bytes(state.output_token_ids),
        num_computed_tokens=state.num_computed_tokens,
        block_ids=column_bytes(state.block_ids),
        finish=plan_pb2.RowFinish.ValueType(state.finish),
        released=write_final(state.released),
        max_tokens=state.max_tokens,
        sampling=None if state.sampling is None else write_sampling(state.sampling),
        end_token_ids=state.end_token_ids,
        context=state.context,
        continues=state.continues,
        logprobs=None if state.logprobs is None else _write_logprob_columns(state.logprobs),
    )


def _read_row_state(message: plan_pb2.RowState) -> RowState:
    record_id = read_record_id(message.id)
    if message.HasField("adapter_slot"):  # placed again, the request would run without its adapter
        raise MalformedError("rows.adapter_slot", "rows.adapter_slot is not supported by this version")
    try:
        finish = RowFinish(message.finish)
    except ValueError as error:
        raise MalformedError("rows.finish", f"rows.finish is {message.finish}, which is not a RowFinish") from error
    return RowState(
        record_id=record_id,
        row=message.row if message.HasField("row") else None,
        attempt=message.attempt,
        prompt_token_ids=read_column("rows.prompt_token_ids", message.prompt_token_ids),
        output_token_ids=read_column("rows.output_token_ids", message.output_token_ids),
        num_computed_tokens=message.num_computed_tokens,
        block_ids=read_column("rows.block_ids", message.block_ids),
        finish=finish,
        released=read_final("rows.released", message.released) if message.HasField("released") else None,
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
        logprobs=float_bytes(logprobs.logprobs),
        num_top=logprobs.num_top,
        top_token_ids=column_bytes(logprobs.top_token_ids),
        top_logprobs=float_bytes(logprobs.top_logprobs),
    )


def _read_logprob_columns(message: plan_pb2.LogprobColumns) -> LogprobColumns:
    logprobs, num_top = read_floats("logprobs.logprobs", message.logprobs), message.num_top
    top_token_ids = read_column("logprobs.top_token_ids", message.top_token_ids)
    top_logprobs = read_floats("logprobs.top_logprobs", message.top_logprobs)
    if not len(top_token_ids) == len(top_logprobs) == len(logprobs) * num_top:
        sentence = f"{len(logprobs)} tokens with {num_top} alternatives each do not fill their columns"
        raise ColumnError("logprobs.num_top", sentence)
    shape = (len(logprobs), num_top)
    return LogprobColumns(message.offset, logprobs, top_token_ids.reshape(shape), top_logprobs.reshape(shape))

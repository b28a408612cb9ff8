"""What a simulated executor answers those who look at it: who it is, and its rows."""

from paceline.plan.codec.welcomes import write_geometry, write_limits, write_model
from paceline.plan.values import RowState
from paceline.v1 import executor_pb2, plan_pb2, sampling_pb2
from paceline_scheduler.core.executors import Snapshot
from paceline_scheduler.simulator.bytes_tokenizer import BytesTokenizer
from paceline_scheduler.simulator.dialogue import geometry_of, limits_of, model_of
from paceline_scheduler.simulator.service import SimulatedService

MAX_VIEWS = 1024  # rows in an answer of GetState
_DEFAULT_VIEWS = 64


def write_info(service: SimulatedService, tokenizer: BytesTokenizer) -> executor_pb2.GetInfoResponse:
    """Say who the executor is, and who drives it."""
    executor, holder = service.executor, service.holder
    return executor_pb2.GetInfoResponse(
        incarnation=executor.incarnation,
        epoch=executor.epoch,
        term=service.highest_term,
        holder_scheduler_id=holder.scheduler_id,
        holder_address=holder.address,
        model=write_model(model_of(executor.config)),
        geometry=write_geometry(geometry_of(executor.config)),
        limits=write_limits(limits_of(executor.config)),
        min_protocol=service.protocols.lowest,
        max_protocol=service.protocols.highest,
        device="simulated",
        tokenizer_digest=tokenizer.digest,
        num_waiting_schedulers=service.fence.num_waiting,
    )


def write_state(
    snapshot: Snapshot, num_granted_blocks: int, request: executor_pb2.GetStateRequest
) -> executor_pb2.GetStateResponse:
    """Show rows, then records if asked for."""
    max_num_rows = request.max_num_rows if request.HasField("max_num_rows") else _DEFAULT_VIEWS
    num_rows_in_use = sum(row.row is not None for row in snapshot.rows)
    shown = [row for row in snapshot.rows if row.row is not None or request.include_records]
    return executor_pb2.GetStateResponse(
        rows=[_write_view(row, request.include_token_ids) for row in shown[:max_num_rows]],
        num_rows_in_use=num_rows_in_use,
        num_records=len(snapshot.rows) - num_rows_in_use,
        num_tagged_blocks=len(snapshot.tags.block_ids),
        num_granted_blocks=num_granted_blocks,
        truncated=len(shown) > max_num_rows,
    )


def _write_view(row: RowState, include_token_ids: bool) -> executor_pb2.RowView:
    return executor_pb2.RowView(
        row=row.row,
        tenant=row.record_id.tenant,
        request_id=row.record_id.request_id,
        index=row.record_id.index,
        attempt=row.attempt,
        num_prompt_tokens=len(row.prompt_token_ids),
        num_output_tokens=len(row.output_token_ids),
        num_computed_tokens=row.num_computed_tokens,
        block_ids=row.block_ids.tolist(),
        finish=plan_pb2.RowFinish.ValueType(row.finish),
        released_reason=sampling_pb2.FinishReason.ValueType(row.released.reason if row.released else 0),
        prompt_token_ids=row.prompt_token_ids.tolist() if include_token_ids else None,
        output_token_ids=row.output_token_ids.tolist() if include_token_ids else None,
    )

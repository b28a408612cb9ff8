"""Answers for people and tools that look at an executor: who it is, its rows."""

from dataclasses import dataclass

from paceline.plan.codec.results import write_logprobs
from paceline.plan.codec.welcomes import write_geometry, write_limits, write_model
from paceline.plan.durations import write_duration
from paceline.plan.values import RowState
from paceline.v1 import executor_pb2, plan_pb2, sampling_pb2
from paceline_executor.errors import InvalidFieldError
from paceline_executor.link.description import Description
from paceline_executor.link.plan_streams import PlanStreams
from paceline_executor.link.step_loop import StepLoop
from paceline_executor.link.tokenizer import tokenizer_digest
from paceline_executor.rows.table import RowTable
from paceline_executor.version import this_version

_DEFAULT_VIEWS = 64
_MAX_VIEWS = 1024
_MAX_LOGPROBS = 4096  # tokens of an answer that show theirs


def info_of(plan_streams: PlanStreams, steps: StepLoop, description: Description) -> executor_pb2.GetInfoResponse:
    fence, identity = plan_streams.fence, plan_streams.identity
    holder = fence.holder
    return executor_pb2.GetInfoResponse(
        incarnation=identity.incarnation,
        epoch=fence.epoch,
        term=fence.highest_term,
        holder_scheduler_id=holder.scheduler_id if holder else "",
        holder_address=holder.address if holder else "",
        model=write_model(description.served_model()),
        geometry=write_geometry(description.kv_geometry()),
        limits=write_limits(description.plan_limits(plan_streams.max_plans_in_flight)),
        min_protocol=plan_streams.protocols.lowest,
        max_protocol=plan_streams.protocols.highest,
        device=description.device,
        num_threads=description.num_threads,
        last_step_id=steps.last_step_id,
        draining=plan_streams.drain_notice is not None,
        uptime=write_duration(plan_streams.uptime_ns / 1e9),
        version=this_version(),
        tokenizer_digest=tokenizer_digest(description.tokenizer),
        num_waiting_schedulers=fence.num_waiting,
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """They are taken between two steps and shown later."""

    states: tuple[RowState, ...]
    num_rows_in_use: int
    num_records: int
    num_tagged_blocks: int
    num_granted_blocks: int


def look_at(table: RowTable) -> Rows:
    return Rows(
        states=table.states(),
        num_rows_in_use=table.num_rows_in_use,
        num_records=table.num_records,
        num_tagged_blocks=table.num_tagged_blocks,
        num_granted_blocks=table.num_granted_blocks,
    )


def check_state_request(request: executor_pb2.GetStateRequest) -> None:
    if request.HasField("max_num_rows") and not 1 <= request.max_num_rows <= _MAX_VIEWS:
        raise InvalidFieldError(f"max_num_rows must be 1 to {_MAX_VIEWS}", "max_num_rows")


def state_of(rows: Rows, request: executor_pb2.GetStateRequest) -> executor_pb2.GetStateResponse:
    """Shows rows, then records if asked for."""
    max_num_rows = request.max_num_rows if request.HasField("max_num_rows") else _DEFAULT_VIEWS
    states = [state for state in rows.states if request.include_records or state.row is not None]
    views = [_view(state, request) for state in states[:max_num_rows]]
    left_out = request.include_logprobs and _show_logprobs(views, states)
    return executor_pb2.GetStateResponse(
        rows=views,
        num_rows_in_use=rows.num_rows_in_use,
        num_records=rows.num_records,
        num_tagged_blocks=rows.num_tagged_blocks,
        num_granted_blocks=rows.num_granted_blocks,
        truncated=len(states) > max_num_rows or left_out,
    )


def _show_logprobs(views: list[executor_pb2.RowView], states: list[RowState]) -> bool:
    """Up to the bound; returns whether some are left out."""
    room = _MAX_LOGPROBS
    left_out = False
    for view, state in zip(views, states, strict=False):  # fewer views, if their number is bounded
        if state.logprobs is None:
            continue
        shown, rest = state.logprobs.split(room)
        room -= shown.num_tokens
        left_out |= rest.num_tokens > 0
        view.logprobs_offset = shown.offset
        view.logprobs.extend(write_logprobs(shown, state.output_token_ids[shown.offset :]))
    return left_out


def _view(state: RowState, request: executor_pb2.GetStateRequest) -> executor_pb2.RowView:
    reason = 0 if state.released is None else state.released.reason
    view = executor_pb2.RowView(
        row=state.row,
        tenant=state.record_id.tenant,
        request_id=state.record_id.request_id,
        index=state.record_id.index,
        attempt=state.attempt,
        num_prompt_tokens=state.prompt_token_ids.size,
        num_output_tokens=state.output_token_ids.size,
        num_computed_tokens=state.num_computed_tokens,
        block_ids=state.block_ids.tolist(),
        finish=plan_pb2.RowFinish.ValueType(state.finish),
        released_reason=sampling_pb2.FinishReason.ValueType(reason),
    )
    if request.include_token_ids:
        view.prompt_token_ids.extend(state.prompt_token_ids.tolist())
        view.output_token_ids.extend(state.output_token_ids.tolist())
    return view

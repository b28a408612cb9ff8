"""What makes a plan malformed whatever its rows hold: columns of unequal length, indices out of range, repetitions."""

import numpy as np

from paceline.plan.values import KEY_BYTES, BatchPlan, BlockGrants, RecordId
from paceline_executor.errors import PlanError, PlanFault, UnsupportedPlanError
from paceline_executor.limits import MAX_NAME_BYTES, RowLimits
from paceline_executor.runner.interface import Int32Array


def check_form(plan: BatchPlan, limits: RowLimits) -> None:
    """Raises PlanError for a plan that no table could apply, UnsupportedPlanError for one of a later version."""
    is_beyond = plan.num_draft_tokens.size > 0 and limits.max_num_draft_tokens == 0
    for field in (*(("num_draft_tokens",) if is_beyond else ()), *plan.unsupported_fields):
        raise UnsupportedPlanError(f"{field} is not supported by this executor; send it empty", {"field": field})
    _check_tags(plan, limits)
    _check_copies(plan, limits)
    _check_grants("grants", plan.grants, limits)
    _check_grants("shared", plan.shared, limits)
    _check_schedule(plan, limits)
    for row in (*(release.row for release in plan.releases), *(placement.row for placement in plan.new_requests)):
        if not 0 <= row < limits.num_rows:
            raise PlanError(PlanFault.ROW_OUT_OF_RANGE, f"row {row} is outside 0 to {limits.num_rows - 1}")
    for placement in plan.new_requests:
        _check_name(placement.record_id)


def _check_tags(plan: BatchPlan, limits: RowLimits) -> None:
    num_tags, num_key_bytes = plan.tags.block_ids.size, len(plan.tags.keys)
    if num_key_bytes != num_tags * KEY_BYTES:
        raise PlanError(PlanFault.COLUMN_LENGTH, f"tags has {num_tags} blocks but {num_key_bytes} bytes of keys")
    _check_blocks("tags.block_ids", plan.tags.block_ids, limits)


def _check_copies(plan: BatchPlan, limits: RowLimits) -> None:
    _check_lengths("copies", plan.copies.sources, plan.copies.destinations)
    _check_blocks("copies.sources", plan.copies.sources, limits)
    _check_blocks("copies.destinations", plan.copies.destinations, limits)
    if not plan.copies.destinations.size:
        return
    stray = plan.copies.destinations[~np.isin(plan.copies.destinations, plan.grants.block_ids)]
    if stray.size:
        raise PlanError(PlanFault.COPY_NOT_GRANTED, f"block {stray[0]} is copied to without a grant in the same plan")


def _check_grants(name: str, grants: BlockGrants, limits: RowLimits) -> None:
    if not (grants.rows.size or grants.indices.size or grants.block_ids.size):
        return
    _check_lengths(name, grants.rows, grants.indices, grants.block_ids)
    _check_rows(f"{name}.rows", grants.rows, limits)
    _check_blocks(f"{name}.block_ids", grants.block_ids, limits)
    if _outside(grants.indices, limits.max_blocks_per_row):
        sentence = f"{name}.indices has a value outside 0 to {limits.max_blocks_per_row - 1}"
        raise PlanError(PlanFault.BLOCK_INDEX, sentence)


def _check_schedule(plan: BatchPlan, limits: RowLimits) -> None:
    rows, num_tokens = plan.rows, plan.num_scheduled_tokens
    _check_lengths("rows and num_scheduled_tokens", rows, num_tokens)
    if not rows.size:
        return
    _check_rows("rows", rows, limits)
    if np.bincount(rows).max() > 1:
        raise PlanError(PlanFault.ROW_TWICE, f"row {np.bincount(rows).argmax()} is scheduled twice")
    if num_tokens.min() < 1:
        raise PlanError(PlanFault.TOKENS_UNKNOWN, f"row {rows[num_tokens.argmin()]} is scheduled with no tokens")
    total = int(num_tokens.sum(dtype=np.int64))
    if total > limits.max_num_batched_tokens:
        sentence = f"{total} tokens are more than a step's limit of {limits.max_num_batched_tokens}"
        raise PlanError(PlanFault.TOO_MANY_TOKENS, sentence)
    if plan.num_draft_tokens.size:
        _check_drafts(plan, limits)


def _check_drafts(plan: BatchPlan, limits: RowLimits) -> None:
    rows, num_drafts = plan.rows, plan.num_draft_tokens
    _check_lengths("rows and num_draft_tokens", rows, num_drafts)
    if num_drafts.min() < 0 or num_drafts.max() > limits.max_num_draft_tokens:
        raise PlanError(PlanFault.DRAFTS, f"a row may have 0 to {limits.max_num_draft_tokens} drafts")
    is_alone = num_drafts >= plan.num_scheduled_tokens
    if is_alone.any():
        raise PlanError(PlanFault.DRAFTS, f"row {rows[is_alone.argmax()]} is scheduled with nothing but drafts")


def _check_name(record_id: RecordId) -> None:
    tenant_bytes, id_bytes = len(record_id.tenant.encode()), len(record_id.request_id.encode())
    if tenant_bytes > MAX_NAME_BYTES or not 1 <= id_bytes <= MAX_NAME_BYTES:
        sentence = f"a tenant must have at most {MAX_NAME_BYTES} bytes, a request_id 1 to {MAX_NAME_BYTES}"
        raise PlanError(PlanFault.RECORD_ID, sentence)


def _check_lengths(name: str, *columns: Int32Array) -> None:
    lengths = [column.size for column in columns]
    if len(set(lengths)) > 1:
        raise PlanError(PlanFault.COLUMN_LENGTH, f"{name}: columns differ in length: {', '.join(map(str, lengths))}")


def _check_rows(name: str, rows: Int32Array, limits: RowLimits) -> None:
    if _outside(rows, limits.num_rows):
        raise PlanError(PlanFault.ROW_OUT_OF_RANGE, f"{name} has a value outside 0 to {limits.num_rows - 1}")


def _check_blocks(name: str, block_ids: Int32Array, limits: RowLimits) -> None:
    if _outside(block_ids, limits.num_blocks):
        raise PlanError(PlanFault.BLOCK_OUT_OF_RANGE, f"{name} has a value outside 0 to {limits.num_blocks - 1}")


def _outside(values: Int32Array, bound: int) -> bool:
    return bool(values.size) and (int(values.min()) < 0 or int(values.max()) >= bound)

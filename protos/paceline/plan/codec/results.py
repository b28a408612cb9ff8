"""What came of a step: tokens, log-probabilities, failures."""

from collections.abc import Sequence

import numpy as np
from google.rpc import error_details_pb2, status_pb2

from paceline.plan.codec.bounds import MAX_TOP, check_count, check_values
from paceline.plan.codec.columns import ColumnError, column_bytes, parse, read_column, refuse_unsupported
from paceline.plan.texts import readable
from paceline.plan.values import Int32Array, LogprobColumns, RowError, RowFinish, RowLogprobs, StepResult, StepTimings
from paceline.v1 import plan_pb2, sampling_pb2

_Tokens = Sequence[sampling_pb2.TokenLogprobs]

_ERROR_DOMAIN = "paceline"
_MAX_NAME_BYTES = 128  # of a reason, a field
_FINISHES = bytes(RowFinish)  # one byte each


def write_result(result: StepResult) -> plan_pb2.StepResult:
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
            draft_ns=timings.draft_ns,
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


def read_result(message: plan_pb2.StepResult) -> StepResult:
    refuse_unsupported(message, "confirmations")
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
            timings.waited_ns,
            timings.prepare_ns,
            timings.forward_ns,
            timings.sample_ns,
            timings.idle_ns,
            timings.draft_ns,
        ),
        logprobs=_read_logprobs("logprobs", [(each.row, 0, each.tokens) for each in message.logprobs]),
        errors=tuple(_read_error(error) for error in message.errors),
        prompt_logprobs=_read_logprobs(
            "prompt_logprobs", [(each.row, each.position, each.tokens) for each in message.prompt_logprobs]
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
        raise ColumnError("finishes", f"{step}: a value of finishes is not a RowFinish")
    if len(result.num_draft_tokens) not in (0, len(result.rows)):
        raise ColumnError("num_draft_tokens", f"{step}: num_draft_tokens must have a value for every row")
    # As unsigned numbers, so that one below 0 is more than all tokens there can be.
    if int(np.add.reduce(result.num_accepted.view(np.uint32), dtype=np.uint64)) != len(result.token_ids):
        raise ColumnError("num_accepted", f"{step}: num_accepted does not add up to the number of tokens")
    if result.logprobs:
        num_of_row = dict(zip(result.rows.tolist(), result.num_accepted.tolist(), strict=True))
        if any(each.columns.num_tokens != num_of_row.get(each.row, 0) for each in result.logprobs):
            raise ColumnError("logprobs", f"{step}: the log-probabilities do not match the tokens")


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


def _read_logprobs(field: str, told: list[tuple[int, int, _Tokens]]) -> tuple[RowLogprobs, ...]:
    """Return those of several rows: of each its number, the offset of the first token, and the tokens."""
    rows = tuple(_read_row_logprobs(field, *row) for row in told)
    if rows:
        token, top, columns = sampling_pb2.TokenLogprobs, sampling_pb2.TokenLogprob, [row.columns for row in rows]
        check_values(f"{field}.tokens.token_id", token, "token_id", [row.token_ids for row in rows])
        check_values(f"{field}.tokens.logprob", token, "logprob", [each.logprobs for each in columns])
        check_values(f"{field}.tokens.top.token_id", top, "token_id", [each.top_token_ids for each in columns])
        check_values(f"{field}.tokens.top.logprob", top, "logprob", [each.top_logprobs for each in columns])
    return rows


def _read_row_logprobs(field: str, row: int, offset: int, tokens: _Tokens) -> RowLogprobs:
    num_top = len(tokens[0].top) if tokens else 0
    check_count(f"{field}.tokens.top", num_top, MAX_TOP)
    if any(len(token.top) != num_top for token in tokens):
        raise ColumnError(f"{field}.top", f"row {row}: every token must have as many alternatives")
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
    status = status_pb2.Status(code=error.code, message=readable(error.message))
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=_ERROR_DOMAIN))
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=readable(error.message))
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
    field = None if field is None else readable(field, _MAX_NAME_BYTES)
    reason = readable(reason, _MAX_NAME_BYTES)
    return RowError(message.row, message.error.code, reason, readable(message.error.message), field)

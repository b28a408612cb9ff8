"""Safeguards that can be switched off, each by the function that embodies it, to see that walks go wrong without them.

What the simulation's ablations replace as well is taken from there.
"""

from dataclasses import replace
from typing import Any

from paceline.plan.values import ExecutorInfo, FinalRelease, FinishReason, Int32Array, RowFinish, StepResult
from paceline_executor.link.fence import Fence
from paceline_executor.rows.records import Records
from paceline_scheduler.core import recovery
from paceline_scheduler.core.executor import reconcile, results
from paceline_scheduler.core.executor.attachment import Attachment, StepInFlight
from paceline_scheduler.core.executor.group import ExecutorGroup
from paceline_scheduler.core.executors import SeenRow
from paceline_scheduler.core.live import LiveRequest, Status
from paceline_scheduler.core.outputs import TokenOutputs
from paceline_scheduler.core.requests import resuming
from paceline_scheduler.core.requests.request_table import RequestTable
from paceline_scheduler.link.executor_record import ExecutorRecord
from paceline_scheduler.link.leadership import Leadership
from simulation.ablations import ABLATIONS, Ablation

# The originals are kept, because what stands in their place goes on to them.
_is_free, _rise = Fence._is_free, Leadership._rise
_by_handle = RequestTable.by_handle
_left_behind, _take_foreign, _catch_up = LiveRequest.left_behind, reconcile._take_foreign, reconcile._catch_up
_matching_step = results.matching_step


# Who drives


def _is_free_without_holder(fence: Fence, now_ns: int) -> bool:
    return fence._holder is None and _is_free(fence, now_ns)


def _rise_alone(leadership: Leadership, executor: ExecutorRecord, info: ExecutorInfo, now_s: float) -> tuple[()]:
    """Keep the other streams, whose claims are lower."""
    _rise(leadership, executor, info, now_s)
    return ()


# Resumption


def _by_any_handle(table: RequestTable, handle: int) -> LiveRequest | None:
    """Also by the handles of former listeners."""
    return _by_handle(table, handle) or next(iter(table.with_listener()), None)


def _outranks_if_higher(seen: SeenRow, live: LiveRequest, output: Int32Array) -> bool:
    del output
    is_ahead = seen.attempt > live.attempt or (seen.attempt == live.attempt and live.held is None)
    return seen.released is None and is_ahead


def _continues_any(live: LiveRequest, seen: SeenRow) -> bool:
    is_as_long = len(seen.output_token_ids) >= live.num_output_tokens
    return live.attempt == seen.attempt and live.status is not Status.FINISHED and is_as_long


def _left_behind_as_end(live: LiveRequest) -> LiveRequest:
    return replace(_left_behind(live), final=FinalRelease(live.num_output_tokens, FinishReason.LENGTH))


def _take_foreign_as_end(executor: Attachment, seen: SeenRow, row: int, final: FinalRelease | None) -> None:
    _take_foreign(executor, seen, row, final or FinalRelease(len(seen.output_token_ids), FinishReason.LENGTH))


def _catch_up_without_end(live: LiveRequest | None, seen: SeenRow, now: float) -> TokenOutputs | None:
    return _catch_up(live, replace(seen, finish=RowFinish.GOES_ON), now)


def _match_any_stream(executor: Attachment, result: StepResult) -> StepInFlight:
    if executor.in_flight:
        step, description = executor.in_flight[0], executor.description
        result = replace(result, step_id=step.step_id, grant_hash=step.grant_hash)
        result = replace(result, incarnation=description.incarnation, epoch=description.epoch)
    return _matching_step(executor, result)


def _replaced(safeguard: str, *replaced: tuple[object, str, Any]) -> Ablation:
    return Ablation(safeguard, None, replaced)


SAFEGUARDS: dict[str, Ablation] = {
    "term": ABLATIONS["term"],
    "line": ABLATIONS["line"],
    "busy": ABLATIONS["lease"],
    "lease": _replaced("a silent holder can be replaced", (Fence, "_is_free", _is_free_without_holder)),
    "yielding": ABLATIONS["yielding"],
    "one-claim": _replaced(
        "a scheduler whose term rises attaches to all executors anew", (Leadership, "_rise", _rise_alone)
    ),
    "offset": ABLATIONS["offset"],
    "rolling-hash": ABLATIONS["rolling-hash"],
    "attachment": _replaced(
        "a lower attachment than the current one is refused", (resuming, "_check_attachment", lambda *_: None)
    ),
    "stale-end": _replaced(
        "the end of a stream that the request has left has no effect", (RequestTable, "by_handle", _by_any_handle)
    ),
    "sync-gate": _replaced(
        "clients are answered when it is known what all executors run", (ExecutorGroup, "expect", lambda *_: None)
    ),
    "adoption": _replaced("a scheduler carries on what it finds", (recovery, "is_adoptable", lambda *_: False)),
    "records": _replaced("executors keep what is released until nobody needs it", (Records, "add", lambda *_: None)),
    "attempt": ABLATIONS["attempt"],
    "fitting": _replaced(
        "a request goes on only in a row that holds what the client was told",
        (recovery, "outranks", _outranks_if_higher),
        (reconcile, "_continues", _continues_any),
    ),
    "disowning": _replaced(
        "what is let go is nobody's end",
        (LiveRequest, "left_behind", _left_behind_as_end),
        (reconcile, "_take_foreign", _take_foreign_as_end),
    ),
    "leaving": ABLATIONS["leaving"],
    "finish": _replaced(
        "an end on the device beats the preemption that came after it", (reconcile, "_catch_up", _catch_up_without_end)
    ),
    "stale-results": _replaced(
        "results of a stream that was given up are not applied", (results, "matching_step", _match_any_stream)
    ),
}
"""By name."""

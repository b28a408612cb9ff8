"""Safeguards that can be switched off, to see that runs go wrong without them: what notices nothing checks nothing.

Each ablation replaces the function that embodies a safeguard, in the whole process and for as long as it lasts.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
from llguidance import LLMatcher

from paceline.plan.hashes import HASH_START
from paceline.plan.values import BatchPlan, Claim, Int32Array, RecordId, StepResult
from paceline.v1.inference_pb2 import GenerateRequest
from paceline_executor.link.fence import Fence
from paceline_executor.link.plan_stream import SchedulerStream
from paceline_executor.link.step_loop import StepLoop
from paceline_executor.rows import forms
from paceline_executor.rows.columns import RowArrays
from paceline_executor.rows.forms import FilledMasks, FormMasker, MaskedRow
from paceline_executor.runner import simulated
from paceline_executor.runner.interface import BoolArray, FlatBatch
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.stream import RequestStream
from paceline_scheduler.core import intake, recovery
from paceline_scheduler.core.executor import results
from paceline_scheduler.core.executor.attachment import Attachment, StepInFlight
from paceline_scheduler.core.executor.group import ExecutorGroup
from paceline_scheduler.core.executor.ledger import Ledger
from paceline_scheduler.core.executors import SeenRow
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.outputs import Resumed
from paceline_scheduler.core.planning import planner
from paceline_scheduler.core.planning.capacity import FreeBlocks
from paceline_scheduler.core.planning.planner import Decision
from paceline_scheduler.core.prefix import PrefixChain
from paceline_scheduler.core.request import Request, ResumePoint
from paceline_scheduler.core.requests import resuming
from paceline_scheduler.core.state import CoreState
from paceline_scheduler.core.suspects import Suspicion
from paceline_scheduler.link.executor_record import ExecutorRecord
from paceline_scheduler.link.executors import LinkedExecutors
from paceline_scheduler.link.leadership import Leadership
from paceline_scheduler.link.plan_stream import PlanStream
from simulation.scenario import FaultKind


@dataclass(frozen=True, slots=True)
class Ablation:
    """One safeguard. `replaced` are the functions that embody it: where they are, their names, what stands there.

    `shown_by` is a seed whose run goes wrong without it, None where no seed is needed; after a change that draws other
    runs, `python -m simulation --ablation NAME --seeds 300` finds it anew. `guards_against` is the fault without which
    it cannot be missed, if it is one.
    """

    safeguard: str
    shown_by: int | None
    replaced: tuple[tuple[object, str, Any], ...]
    guards_against: FaultKind | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        with ExitStack() as stack:
            for where, name, instead in self.replaced:
                stack.enter_context(mock.patch.object(where, name, instead))
            yield


_clear_row = RowArrays.clear


def _clear_but_count_as_told(columns: RowArrays, row: int) -> None:
    """A device is taken to know the next request of a row by the one before."""
    was_told = bool(columns.is_told[row])
    _clear_row(columns, row)
    columns.is_told[row] = was_told


async def _at_once(*_: object) -> None:
    """Wait for nothing."""


# Executors. The originals are kept, because what stands in their place goes on to them.

_take = SchedulerStream.take


def _take_any_epoch(stream: SchedulerStream, plan: BatchPlan) -> None:
    _take(stream, replace(plan, incarnation=stream._incarnation, epoch=stream.epoch))


def _take_any_step(stream: SchedulerStream, plan: BatchPlan) -> None:
    _take(stream, replace(plan, step_id=stream._last_step_id + 1))


def _replay_nothing(compiled: Future[LLMatcher], output: Int32Array) -> LLMatcher:
    del output
    return compiled.result().deep_copy()


def _fill_but_say_nothing(masker: FormMasker, rows: Sequence[MaskedRow]) -> FilledMasks:
    return replace(_fill(masker, rows), waiting=frozenset())


_fill = FormMasker.fill


def _fill_first_words(masker: FormMasker, rows: list[tuple[LLMatcher, int, list[int]]], words: Any) -> None:  # noqa: ANN401
    """Leave all tokens behind a draft."""
    _fill_words(masker, [(matcher, mask, []) for matcher, mask, _ in rows], words)


_fill_words = FormMasker._fill_words


def _is_wanted_in_any_epoch(steps: StepLoop, plan: BatchPlan) -> bool:
    return plan.epoch != steps._failed_epoch


# Scheduler

_matching_step = results.matching_step
_tag_filled = Ledger._tag_filled
_await_result = Attachment.await_result
_join = recovery.join
_resume_mode = resuming.resume_mode
_make_chain = PrefixChain.__init__


def _match_any_grants(executor: Attachment, result: StepResult) -> StepInFlight:
    if executor.in_flight:
        result = replace(result, grant_hash=executor.in_flight[0].grant_hash)
    return _matching_step(executor, result)


def _tag_planned(ledger: Ledger, row: int) -> None:
    """Tag what will be full when the plans in flight have run."""
    rows = ledger.rows
    computed = int(rows.num_computed[row])
    rows.num_computed[row] = min(int(rows.num_scheduled[row]), int(rows.num_known[row]))
    _tag_filled(ledger, row)
    rows.num_computed[row] = computed


def _settle_early(ledger: Ledger) -> bool:
    ledger.next_plan.rows_to_tag = ledger.rows.running().tolist()
    return _settle(ledger)


_settle = Ledger.settle


def _await_result_of_no_release(executor: Attachment, plan: BatchPlan, decision: Decision) -> None:
    """Free rows with the plan that releases them."""
    _await_result(executor, replace(plan, releases=()), decision)
    for release in plan.releases:
        executor.ledger.rows.vacate(release.row)


def _accept_all(batch: FlatBatch, drawn: Int32Array, is_drawn: BoolArray) -> tuple[Int32Array, BoolArray]:
    """Every draw counts, also behind a wrong draft."""
    num_draws = np.ones_like(batch.sampled) if batch.num_drafts is None else batch.num_drafts + 1
    first = np.cumsum(num_draws) - num_draws
    return np.add.reduceat(is_drawn, first, dtype=np.int32) if first.size else drawn[:0], is_drawn


def _settle_row_alone(executor: Attachment, step: StepInFlight, surplus: Int32Array) -> Int32Array:
    """Lower the bound of a row, and not those of its steps in flight, whose results then lower it once more."""
    executor.ledger.rows.num_scheduled[step.index] -= surplus
    return step.num_scheduled_after - surplus


def _join_from_the_start(state: CoreState, live: LiveRequest, request: Request, now: float) -> Resumed:
    point = ResumePoint(0, HASH_START, request.point.last_attempt)
    return _join(state, live, replace(request, point=point), now)


def _holds_as_many(output: Int32Array, point: ResumePoint) -> bool:
    return point.resume_from <= len(output)


def _resume_mode_with_any_body(live: LiveRequest | None, output: Int32Array, request: Request) -> resuming.ResumeMode:
    if live is not None:
        request = replace(request, body_digest=live.request.body_digest)
    return _resume_mode(live, output, request)


def _any_stream_before(edge: Edge, key: RecordId, request: GenerateRequest) -> RequestStream | None:
    del request
    return edge.requests.by_key(key)


def _chain_of_all_tenants(chain: PrefixChain, tag_key: bytes, block_size: int, request: Request) -> None:
    _make_chain(chain, tag_key, block_size, replace(request, key=replace(request.key, tenant="")))


def _yield_alone(
    leadership: Leadership, executor: ExecutorRecord, active: Claim, now_s: float, jitter: float
) -> tuple[()]:
    """Give up the executor that another scheduler has, and go on with the others."""
    del now_s, jitter
    leadership.claim.step_down(executor.address, active)
    leadership.is_acting = False
    return ()


def _outranks_always(seen: SeenRow, live: LiveRequest, output: Int32Array) -> bool:
    del live, output
    return seen.released is None


ABLATIONS: dict[str, Ablation] = {
    "epoch": Ablation(
        "plans of another epoch have no effect",
        155,
        ((SchedulerStream, "take", _take_any_epoch), (StepLoop, "_is_wanted", _is_wanted_in_any_epoch)),
        FaultKind.REPLAY,
    ),
    "step": Ablation("plans run in order and once", 69, ((SchedulerStream, "take", _take_any_step),), FaultKind.MANGLE),
    "term": Ablation("no claim is accepted after a higher one", 0, ((Fence, "_is_superseded", lambda *_: False),)),
    "lease": Ablation("who is heard of keeps the executor", 0, ((Fence, "_is_free", lambda *_: True),)),
    "line": Ablation("who comes second waits", 0, ((Fence, "_goes_first", lambda *_: True),)),
    "queued-plans": Ablation(
        "plans that were not launched are dropped at an acceptance",
        32,
        ((StepLoop, "_is_wanted", _is_wanted_in_any_epoch),),
    ),
    "told-rows": Ablation(
        "a runner is told of each new row",
        0,
        ((RowArrays, "clear", _clear_but_count_as_told),),
    ),
    "frozen-executor": Ablation(
        "an executor that stood still takes nobody for silent",
        117,
        ((Fence, "renew", lambda *_: None),),
        FaultKind.FREEZE_EXECUTOR,
    ),
    "grant-hash": Ablation(
        "block tables that differ are noticed",
        27,
        ((results, "matching_step", _match_any_grants),),
        FaultKind.CHANGE_GRANT,
    ),
    "bounds": Ablation(
        "what is planned of a row is never below what was computed", 2, ((results, "_settle", _settle_row_alone),)
    ),
    "acceptance": Ablation(
        "a draft is accepted while it is what is drawn", 2, ((simulated, "counting_draws", _accept_all),)
    ),
    "form-replay": Ablation(
        "a row that is placed again is where its output is in its form", 6, ((forms, "_replay", _replay_nothing),)
    ),
    "form-waits": Ablation("a row waits until its form is compiled", 1, ((FormMasker, "fill", _fill_but_say_nothing),)),
    "form-drafts": Ablation(
        "what is drawn behind a draft keeps to the form", 2, ((FormMasker, "_fill_words", _fill_first_words),)
    ),
    "drafts": Ablation("drafts take no prompt's turn", 13, ((planner, "_all_decode", lambda *_: True),)),
    "late-tags": Ablation(
        "blocks are tagged when they are known to be full",
        0,
        ((Ledger, "_tag_filled", _tag_planned), (Ledger, "settle", _settle_early)),
    ),
    "leaving": Ablation(
        "a row is free when its release is confirmed",
        0,
        ((Attachment, "await_result", _await_result_of_no_release),),
    ),
    "attempt": Ablation(
        "of two rows the higher attempt lives", 6, ((recovery, "outranks", _outranks_always),), FaultKind.ZOMBIE
    ),
    "offset": Ablation(
        "a client is served from the offset it asks for", 6, ((recovery, "join", _join_from_the_start),)
    ),
    "rolling-hash": Ablation(
        "only output that the client holds is gone on with",
        27,
        ((resuming, "holds_beginning", _holds_as_many),),
        FaultKind.BAD_RESUME,
    ),
    "body": Ablation(
        "a request is resumed only as the same request",
        27,
        ((intake, "resume_mode", _resume_mode_with_any_body),),
        FaultKind.BAD_RESUME,
    ),
    "attachment": Ablation(
        "the highest attachment has the request",
        58,
        ((Edge, "_before", _any_stream_before), (resuming, "_check_attachment", lambda *_: None)),
        FaultKind.LATE_REQUEST,
    ),
    "sync-gate": Ablation(
        "nothing is admitted before it is known what executors run",
        169,
        (
            (LinkedExecutors, "until_synced", _at_once),
            (ExecutorGroup, "expect", lambda *_: None),
        ),
        FaultKind.RETURN,
    ),
    "tenant": Ablation("no tenant hits another one's blocks", 4, ((PrefixChain, "__init__", _chain_of_all_tenants),)),
    "share": Ablation("no tenant holds more than its share", 23, ((FreeBlocks, "_tenant_blocker", lambda *_: None),)),
    "suspects": Ablation(
        "what may have made a step fail runs alone",
        91,
        ((Suspicion, "is_suspect", lambda *_: False),),
        FaultKind.FAIL_STEPS,
    ),
    "silence": Ablation(
        "a silent executor is given up", 83, ((PlanStream, "_check_alive", lambda *_: None),), FaultKind.HALF_OPEN
    ),
    "yielding": Ablation("who finds a higher claim yields everywhere", 6, ((Leadership, "_yield_to", _yield_alone),)),
}
"""By name."""

"""One request's way through a recording, step by step, as lines for people; and who else is in it.

Looks on while a core repeats what happened, and asks that core why a request waits. Decides nothing.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.plan.values import BatchPlan, NewRequest, RecordId, StepResult
from paceline_scheduler.core.core import Core
from paceline_scheduler.core.ended import EndedRequest
from paceline_scheduler.core.events import (
    BeginAnew,
    Cancel,
    Detach,
    Effects,
    EndCompletion,
    Event,
    ExecutorAttached,
    ExecutorLost,
    ExecutorRemoved,
    Resume,
    StepFinished,
    StreamEnded,
    Submit,
)
from paceline_scheduler.core.executors import Placement
from paceline_scheduler.core.live import HeldRow, LiveRequest, Status
from paceline_scheduler.core.request import Request

_MAX_LISTED = 10_000


@dataclass(slots=True)
class Listed:
    """Times are seconds of the scheduler's clock."""

    key: RecordId
    num_prompt_tokens: int
    first_s: float
    outcome: str = "runs at the end"
    ended: EndedRequest | None = None


class Requests:
    """A Follower."""

    def __init__(self) -> None:
        self.found: dict[RecordId, Listed] = {}

    def begin(self, core: Core, now: float) -> None:
        for live in core.state.requests.all():
            self._list(live.request, now)

    def saw(self, core: Core, event: Event[Any], now: float, effects: Effects[Any]) -> None:
        for request in _requests_of(event):
            self._list(request, now)
        if isinstance(event, ExecutorAttached):
            for live in core.state.requests.all():
                self._list(live.request, now)
        for ended in effects.ended:
            self._list(ended.request, now)
            listed = self.found.get(ended.request.key)
            if listed is not None:
                listed.outcome, listed.ended = ended.reason.name.lower(), ended

    def refused(self, core: Core, event: Event[Any], now: float, error: str) -> None:
        del core
        for request in _requests_of(event):
            self._list(request, now)
            if request.key in self.found and self.found[request.key].ended is None:
                self.found[request.key].outcome = f"refused: {error}"

    def planned(self, core: Core, address: str, now: float, plan: BatchPlan | None) -> None: ...

    def _list(self, request: Request, now: float) -> None:
        if request.key not in self.found and len(self.found) < _MAX_LISTED:
            self.found[request.key] = Listed(request.key, len(request.prompt_token_ids), now)


@dataclass(slots=True)
class _Decodes:
    """Steps in a row that gave a request tokens."""

    first_step: int
    last_step: int
    first_s: float
    last_s: float
    num_steps: int = 1
    num_tokens: int = 0
    num_drafts: int = 0
    longest_s: float = 0.0
    longest_step: int = 0


@dataclass(slots=True)
class _Completion:
    key: RecordId
    first_s: float
    lines: list[tuple[float, str]] = field(default_factory=list)
    held: HeldRow | None = None
    reason: str = ""  # it waits for, without numbers
    decodes: _Decodes | None = None

    def tell(self, now: float, sentence: str) -> None:
        self.tell_decodes()
        self.lines.append((now - self.first_s, sentence))

    def tell_decodes(self) -> None:
        found, self.decodes = self.decodes, None
        if found is None:
            return
        steps = f"step {found.first_step}" if found.num_steps == 1 else f"steps {found.first_step} to {found.last_step}"
        text = f"{steps}: {found.num_tokens} token{'s' * (found.num_tokens != 1)}"
        if found.num_steps > 1:
            mean_s = (found.last_s - found.first_s) / (found.num_steps - 1)
            text += f", {mean_s * 1e3:.1f} ms apart, {found.longest_s * 1e3:.1f} ms before step {found.longest_step}"
        if found.num_drafts:
            text += f", of {found.num_drafts} drafts"
        self.lines.append((found.first_s - self.first_s, text))


class Story:
    """A Follower of requests whose id is, or begins with, a text."""

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._completions: dict[RecordId, _Completion] = {}
        self._keys: dict[int, RecordId] = {}  # by handle

    def begin(self, core: Core, now: float) -> None:
        self._forget_rows(lambda _: True)
        for live in core.state.requests.all():
            self._find(live, now, "known already when the recording begins")

    def request_ids(self) -> list[str]:
        """The ids that were meant: the one that is the text, else all that begin with it."""
        found = sorted({key.request_id for key in self._completions})
        return [self._wanted] if self._wanted in found else found

    def lines(self, request_id: str) -> Iterator[tuple[RecordId, list[tuple[float, str]]]]:
        """Yield each completion's lines: seconds since it was first seen, and a sentence."""
        for key, completion in sorted(self._completions.items(), key=lambda item: (item[0].tenant, item[0].index)):
            if key.request_id == request_id:
                completion.tell_decodes()
                yield key, completion.lines

    # What happens

    def saw(self, core: Core, event: Event[Any], now: float, effects: Effects[Any]) -> None:
        for request in _requests_of(event):
            self._meet(request, event, now)
        match event:
            case StepFinished(address, result):
                self._finished(core, address, result, now)
            case EndCompletion(handle, num_output_tokens, reason):
                self._tell(
                    self._keys.get(handle), now, f"ended by the edge after {num_output_tokens} tokens: {reason.name}"
                )
            case Detach(handle):
                self._tell(self._keys.get(handle), now, "its client is gone")
            case Cancel(key):
                self._tell(key, now, "cancelled")
            case StreamEnded(address) | ExecutorLost(address) | ExecutorRemoved(address):
                for completion in self._completions.values():
                    if completion.held is not None and completion.held.address == address:
                        completion.tell(now, _LOSSES[type(event)].format(address))
                if not isinstance(event, StreamEnded):
                    self._forget_rows(lambda held: held.address == address)
            case BeginAnew():
                self._forget_rows(lambda _: True)
            case ExecutorAttached(description):
                self._attached(core, description.address, now)
        for failure in effects.failures:
            self._tell(self._keys.get(failure.handle), now, f"failed: {failure.error}")
        for ended in effects.ended:
            self._tell(ended.request.key, now, _end(ended))

    def refused(self, core: Core, event: Event[Any], now: float, error: str) -> None:
        del core
        for request in _requests_of(event):
            self._meet(request, event, now)
            self._tell(request.key, now, f"refused: {error}")

    def planned(self, core: Core, address: str, now: float, plan: BatchPlan | None) -> None:
        if plan is not None:
            for new in plan.new_requests:
                completion = self._completions.get(new.record_id)
                if completion is not None:
                    completion.held, completion.reason = HeldRow(address, new.row), ""
                    completion.tell(now, _placement(address, new, plan))
            for completion in self._completions.values():
                if completion.held is not None and completion.held.address == address:
                    self._planned(core, completion, now, plan)
        for completion in self._completions.values():
            self._ask(core, completion, now)

    # Inside

    def _meet(self, request: Request, event: Event[Any], now: float) -> None:
        key = request.key
        if not key.request_id.startswith(self._wanted):
            return
        self._keys[request.handle] = key
        num_prompt, most = len(request.prompt_token_ids), request.max_tokens
        if key not in self._completions:
            self._completions[key] = _Completion(key, now)
            bound = "" if most is None else f", at most {most} to generate"
            self._tell(key, now, f"submitted: {num_prompt} prompt tokens{bound}, priority {request.priority}")
        elif isinstance(event, Resume):
            self._tell(key, now, f"its client came back, attachment {request.attachment}")
        else:
            self._tell(key, now, "submitted again")

    def _tell(self, key: RecordId | None, now: float, sentence: str) -> None:
        completion = None if key is None else self._completions.get(key)
        if completion is not None:
            completion.tell(now, sentence)

    def _attached(self, core: Core, address: str, now: float) -> None:
        self._forget_rows(lambda held: held.address == address)
        for live in core.state.requests.all():
            self._find(live, now, f"found on {address}")

    def _forget_rows(self, is_gone: Callable[[HeldRow], bool]) -> None:
        for completion in self._completions.values():
            if completion.held is not None and is_gone(completion.held):
                completion.held = None

    def _find(self, live: LiveRequest, now: float, sentence: str) -> None:
        key = live.request.key
        if not key.request_id.startswith(self._wanted):
            return
        if key not in self._completions:
            self._completions[key] = _Completion(key, now)
            self._tell(key, now, f"{sentence}: {live.num_output_tokens} tokens are generated")
        self._keys[live.request.handle] = key
        self._completions[key].held = live.held if live.status is Status.RUNNING else None

    def _ask(self, core: Core, completion: _Completion, now: float) -> None:
        """Tell why it waits, where that is another reason than before."""
        live = core.state.requests.by_key(completion.key)
        if live is None or live.status is not Status.WAITING:
            return
        found = core.views.explain(completion.key, now)
        reason = re.sub(r"\d+", "", found.waiting_for)
        if reason != completion.reason:
            completion.reason = reason
            completion.tell(now, f"waits: {found.waiting_for}")

    def _planned(self, core: Core, completion: _Completion, now: float, plan: BatchPlan) -> None:
        assert completion.held is not None, "it was looked at"
        row = completion.held.row
        if any(new.row == row and new.record_id == completion.key for new in plan.new_requests):
            return
        for release in plan.releases:
            if release.row == row:
                completion.held = None
                live = core.state.requests.by_key(completion.key)
                if release.final is None and live is not None:
                    completion.tell(now, f"leaves row {row} in step {plan.step_id}: {live.preemptions.reason}")
                return
        num_tokens = _of_row(plan.rows, plan.num_scheduled_tokens, row)
        num_drafts = _of_row(plan.rows, plan.num_draft_tokens, row)
        if num_tokens - num_drafts > 1:
            completion.tell(now, f"step {plan.step_id} computes {num_tokens} more of its tokens")

    def _finished(self, core: Core, address: str, result: StepResult, now: float) -> None:
        del core
        for completion in self._completions.values():
            if completion.held is None or completion.held.address != address:
                continue
            num_tokens = _of_row(result.rows, result.num_accepted, completion.held.row)
            if not num_tokens:
                continue
            if completion.decodes is None:
                completion.decodes = _Decodes(result.step_id, result.step_id, now, now)
            else:
                since_s = now - completion.decodes.last_s
                if since_s > completion.decodes.longest_s:
                    completion.decodes.longest_s, completion.decodes.longest_step = since_s, result.step_id
                completion.decodes.num_steps += 1
                completion.decodes.last_step, completion.decodes.last_s = result.step_id, now
            completion.decodes.num_tokens += num_tokens
            completion.decodes.num_drafts += _of_row(result.rows, result.num_draft_tokens, completion.held.row)


_LOSSES: dict[type, str] = {
    StreamEnded: "the stream to {} ended",
    ExecutorLost: "{} is lost",
    ExecutorRemoved: "{} is gone for good",
}


def _requests_of(event: Event[Any]) -> tuple[Request, ...]:
    match event:
        case Submit(requests) | Resume(requests):
            return requests
    return ()


def _placement(address: str, new: NewRequest, plan: BatchPlan) -> str:
    assert isinstance(new, Placement), "the core writes no others"
    num_known = len(new.prompt_token_ids) + len(new.output_token_ids)
    num_tokens = _of_row(plan.rows, plan.num_scheduled_tokens, new.row)
    attempt = f", attempt {new.attempt}" if new.attempt > 1 else ""
    return (
        f"placed on row {new.row} of {address}{attempt}: {new.num_cached_tokens} of {num_known} tokens are cached, "
        f"step {plan.step_id} computes {num_tokens} beside {len(plan.rows) - 1} other rows"
    )


def _end(ended: EndedRequest) -> str:
    text = f"ended: {ended.reason.name} after {ended.num_output_tokens} tokens"
    if ended.times is None:
        return text
    times = ended.times
    return (
        f"{text}; queued {times.queued_s:.3f} s, prefill {times.prefill_s:.3f} s, decode {times.decode_s:.3f} s, "
        f"preempted {times.preempted_s:.3f} s"
    )


def _of_row(rows: "np.ndarray[Any, Any]", column: "np.ndarray[Any, Any]", row: int) -> int:
    return int(column[rows == row].sum()) if len(column) else 0

"""Records with token ids as they are, or with stand-ins for them. Knows where tokens are in events and states.

What the core knows is asked for at once; what is made of events, results and plans, which never change, may be made
later, in order.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from paceline.plan.values import BatchPlan, Int32Array, StepResult, TokenLogprobs
from paceline_scheduler.core.events import Event, ExecutorAttached, Resume, StepFinished
from paceline_scheduler.core.executor.attachment import Attachment
from paceline_scheduler.core.executors import ExecutorDescription
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.outputs import Resumed
from paceline_scheduler.core.prefix import PrefixChain
from paceline_scheduler.core.request import Request
from paceline_scheduler.core.retained import RetainedLogprobs, RetainedOutput
from paceline_scheduler.core.state import CoreState
from paceline_scheduler.core.tables.blocks import BlockPool
from paceline_scheduler.core.tables.rows import FREE, RowColumns
from paceline_scheduler.errors import SchedulerError
from paceline_scheduler.recording import wire
from paceline_scheduler.recording.file_writer import RecordMaker
from paceline_scheduler.recording.graph import Replacements
from paceline_scheduler.recording.standins import StandIns, columns_without_values, without_values
from paceline_scheduler.recording.wire import TokenForm

Reply = Any  # of an event
_NO_VALUES = TokenLogprobs(0, 0.0, ())


class Mask(Protocol):
    """Prepares the records of what happens, which are to be made in order."""

    form: TokenForm

    def state(self, state: CoreState) -> bytes:
        """All that the core knows, with which a file begins."""
        ...

    def event(self, event: Event[Any], now: float, reply: Reply) -> RecordMaker: ...

    def refused(self, event: Event[Any], now: float, error: SchedulerError) -> RecordMaker: ...

    def planning(self, address: str, now: float, plan: BatchPlan | None) -> RecordMaker: ...

    def last(self) -> RecordMaker:
        """What has to be said before the file ends."""
        ...


def _without_chains(output: RetainedOutput) -> RetainedOutput:
    return replace(output, chains={})  # they are made anew when they are asked for


_UNINDEXED: Replacements = {RetainedOutput: _without_chains, BlockPool: BlockPool.without_index}


class Plain:
    """Leaves tokens as they are."""

    form = TokenForm.RAW

    def state(self, state: CoreState) -> bytes:
        return wire.encode_state(state, _UNINDEXED)

    def event(self, event: Event[Any], now: float, reply: Reply) -> RecordMaker:
        del reply
        if isinstance(event, StepFinished):
            return partial(wire.encode_result, now, event.address, event.result, is_refused=False)
        return partial(wire.encode_event, now, event, "", {})

    def refused(self, event: Event[Any], now: float, error: SchedulerError) -> RecordMaker:
        if isinstance(event, StepFinished):
            return partial(wire.encode_result, now, event.address, event.result, is_refused=True)
        return partial(wire.encode_event, now, event, type(error).__name__, {})

    def planning(self, address: str, now: float, plan: BatchPlan | None) -> RecordMaker:
        return partial(wire.encode_planning, now, address, plan, self.form)

    def last(self) -> RecordMaker:
        return bytes


class Masked:
    """A Mask with stand-ins. `state` is the core's: some tokens are nowhere else."""

    form = TokenForm.STAND_INS

    def __init__(self, state: Callable[[], CoreState]) -> None:
        self._state = state
        self._stand_ins = StandIns()
        self._unpaired: set[bytes] = set()  # keys that a core fed with stand-ins could not come to by itself
        self._num_tagged: dict[str, Int32Array] = {}  # by address, blocks of each row at the last planning
        self._in_requests: Replacements = {Request: self._stand_ins.request}
        self._in_state: Replacements = {
            Request: self._stand_ins.request,
            ExecutorDescription: self._stand_ins.description,
            LiveRequest: self._live,
            **_UNINDEXED,
            Attachment: self._executor,
            RowColumns: self._rows,
        }
        self._model = ""  # of the executor whose rows are written
        for executor in state().executors:
            self._stand_ins.describe(executor.description)
            for row in np.flatnonzero(executor.ledger.rows.state != FREE).tolist():
                self._stand_ins.place(executor.description.address, row, executor.ledger.rows.token_ids(row))

    # Records

    def state(self, state: CoreState) -> bytes:
        for executor in state.executors:
            self._unpaired.update(executor.ledger.pool.keys())
        return wire.encode_state(state, self._in_state)

    def event(self, event: Event[Any], now: float, reply: Reply) -> RecordMaker:
        match event:
            case StepFinished(address, result):
                return partial(self._result, now, address, result)
            case Resume(requests):
                event = Resume(tuple(map(self._returning, requests, reply)))
                return partial(wire.encode_event, now, event, "", {})
            case ExecutorAttached(description, snapshot):
                self._stand_ins.know(description)
                self._num_tagged.pop(description.address, None)
                self._unpaired.update(key for _, key in snapshot.tags)
                return partial(self._attached, now, event)
        return partial(wire.encode_event, now, event, "", self._in_requests)

    def refused(self, event: Event[Any], now: float, error: SchedulerError) -> RecordMaker:
        match event:
            case StepFinished(address, result):
                nothing = replace(result, token_ids=np.zeros_like(result.token_ids), logprobs=(), prompt_logprobs=())
                return partial(wire.encode_result, now, address, nothing, is_refused=True)
            case Resume(requests):
                event = Resume(tuple(self._returning(request, None) for request in requests))
                return partial(wire.encode_event, now, event, type(error).__name__, {})
        return partial(wire.encode_event, now, event, type(error).__name__, self._in_requests)

    def planning(self, address: str, now: float, plan: BatchPlan | None) -> RecordMaker:
        planning = partial(self._planning, now, address, plan)
        executor = self._state().executors.by_address.get(address) if self._unpaired else None
        if executor is None:
            return planning
        # A row's keys are made when it is placed, as far as they are found, and when its blocks are tagged.
        placed = set() if plan is None else {new.row for new in plan.new_requests}
        num_tagged = executor.ledger.rows.num_tagged_blocks
        changed = np.flatnonzero(num_tagged != self._num_tagged.get(address, 0)).tolist()
        self._num_tagged[address] = num_tagged.copy()
        pairs = self._pairs(executor, sorted(placed.union(changed)))
        return lambda: planning() + pairs

    def last(self) -> RecordMaker:
        executors = self._state().executors
        pairs = [self._pairs(each, np.flatnonzero(each.ledger.rows.state != FREE).tolist()) for each in executors]
        return partial(b"".join, pairs)

    # Records that follow what the rows hold

    def _result(self, now: float, address: str, result: StepResult) -> bytes:
        token_ids = self._stand_ins.result(address, result)
        if result.logprobs or result.prompt_logprobs:
            logprobs, prompt_logprobs = without_values(result.logprobs), without_values(result.prompt_logprobs)
            result = replace(result, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        return wire.encode_result(now, address, result, is_refused=False, token_ids=token_ids)

    def _planning(self, now: float, address: str, plan: BatchPlan | None) -> bytes:
        for new in () if plan is None else plan.new_requests:
            self._stand_ins.place(address, new.row, new.prompt_token_ids, new.output_token_ids)
        return wire.encode_planning(now, address, plan, self.form)

    def _attached(self, now: float, event: ExecutorAttached) -> bytes:
        description, snapshot = event.description, event.snapshot
        self._stand_ins.describe(description)
        for seen in snapshot.rows:
            if seen.row is not None:
                self._stand_ins.place(description.address, seen.row, seen.prompt_token_ids, seen.output_token_ids)
        rows = tuple(self._stand_ins.seen_row(seen, description.model) for seen in snapshot.rows)
        hidden = ExecutorAttached(self._stand_ins.description(description), replace(snapshot, rows=rows))
        return wire.encode_event(now, hidden, "", {})

    # Keys

    def _pairs(self, executor: Attachment, rows: list[int]) -> bytes:
        """Return which keys of executors stand for what these rows hold."""
        found: dict[bytes, bytes] = {}
        for row in rows:
            live, description = executor.ledger.rows.live[row], executor.description
            if live is None:
                continue
            chain = live.output.chains.get((description.tag_key, description.block_size))
            known = () if chain is None else chain.known
            indices = [index for index, key in enumerate(known) if key in self._unpaired]
            if not indices:
                continue
            hidden = PrefixChain(
                self._stand_ins.digest(description.tag_key),
                description.block_size,
                self._stand_ins.request(live.request),
            )
            token_ids = self._stand_ins.of(description.model, executor.ledger.rows.token_ids(row))
            found |= {known[index]: hidden.key(index, token_ids) for index in indices}
        self._unpaired -= found.keys()
        return wire.encode_keys(found) if found else b""

    # Values

    def _returning(self, request: Request, resumed: Resumed | None) -> Request:
        """A request that goes on keeps the prompt that it began with."""
        requests, key = self._state().requests, request.key
        live = requests.by_key(key) or requests.retained(key)
        prompt = request.prompt_token_ids if live is None else live.request.prompt_token_ids
        held = None if resumed is None else resumed.prefix_token_ids
        return self._stand_ins.returning(request, prompt, held)

    def _live(self, live: LiveRequest) -> LiveRequest:
        output, request = live.output, live.request
        logprobs = None if output.logprobs is None else _nameless(output.logprobs)
        hidden = RetainedOutput(
            token_ids=self._stand_ins.output(request.model, request.prompt_token_ids, output.token_ids),
            logprobs=logprobs,
            prompt_logprobs=None if output.prompt_logprobs is None else (_NO_VALUES,) * len(output.prompt_logprobs),
            drafts=output.drafts,
        )
        return replace(live, output=hidden)

    def _executor(self, executor: Attachment) -> Attachment:
        self._model = executor.description.model
        return executor

    def _rows(self, rows: RowColumns) -> RowColumns:
        hidden = rows.with_tokens(lambda token_ids: self._stand_ins.of(self._model, token_ids))
        hidden.output_hash = np.zeros_like(rows.output_hash)
        hidden.prompt_logprobs = {
            row: list(map(columns_without_values, parts)) for row, parts in rows.prompt_logprobs.items()
        }
        return hidden


def _nameless(logprobs: RetainedLogprobs) -> RetainedLogprobs:
    return RetainedLogprobs(logprobs.offset, [_NO_VALUES] * len(logprobs.tokens))

"""A scheduler of a few lines in the engine's own process: places streams, cuts prompts into chunks, keeps steps ahead.

Knows plans and results. It refuses to know what runs them: the other side of every figure of the whole system.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from executor_rig.plans import GREEDY, Cell, placement, plan
from gpu.errors import CheckFailedError
from paceline.plan.sampling import SamplingParams
from paceline.plan.values import BatchPlan, NewRequest, RowLogprobs, StepResult
from paceline_executor.limits import RowLimits
from paceline_executor.link.engine import Engine, Ticket
from paceline_executor.weights.checkpoint import ModelConfig

_WAITING = -1
_BLOCK_SIZE = 16
_MAX_TOKENS = 128  # of a step


def limits_of(config: ModelConfig, num_rows: int, max_len: int, max_tokens: int = _MAX_TOKENS) -> RowLimits:
    """Rows that all may be as long as that at once."""
    num_blocks = num_rows * -(-max_len // _BLOCK_SIZE)
    return RowLimits(num_rows, max_len, max_tokens, num_blocks, _BLOCK_SIZE, config.vocab_size)


def prompts_of(config: ModelConfig, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    random = Random(seed)  # noqa: S311  repeatable, not secret
    return [[random.randrange(3, config.vocab_size) for _ in range(length)] for length in lengths]


@dataclass(slots=True, eq=False)
class Stream:
    """A request, and what is assumed of it while results are on their way."""

    name: str
    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    num_logprobs: int | None
    max_chunk: int
    num_cached: int
    num_drafts: int  # of each step in which it decodes
    output: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs] = field(default_factory=list)
    row: int = _WAITING
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0  # once all planned steps are done
    num_expected: int = 0  # output tokens once all planned steps are done
    is_preempted: bool = False  # by the next plan

    @property
    def num_ahead(self) -> int:
        """How many known tokens no planned step computes yet."""
        return len(self.prompt) + self.num_expected - self.num_computed

    @property
    def room_for_drafts(self) -> int:
        """A token comes behind them."""
        return max(0, min(self.num_drafts, self.max_tokens - self.num_expected - 1))

    @property
    def is_done(self) -> bool:
        return len(self.output) >= self.max_tokens


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has landed."""

    landed_s: float
    num_rows: int
    num_tokens: int
    num_output: int
    num_verified: int  # drafts
    forward_ns: int  # by the device's own clock, as is the next one
    sample_ns: int


def times_ms(*rounds: Sequence[Step]) -> list[float]:
    """From each landed step of a round to the next one."""
    return [1e3 * (now.landed_s - then.landed_s) for steps in rounds for then, now in itertools.pairwise(steps)]


def idle_percent(*rounds: Sequence[Step]) -> float:
    """Of the wall time of the steps behind the first one of each round: what the device's own stamps leave."""
    busy_ns = sum(step.forward_ns + step.sample_ns for steps in rounds for step in steps[1:])
    return max(0.0, 100 * (1 - busy_ns / 1e6 / sum(times_ms(*rounds))))


@dataclass(slots=True)
class _Planned:
    plan: BatchPlan
    ticket: Ticket
    released: list[Stream]
    num_tokens: int


class Feed:
    """Runs streams on an engine whose rows are all free."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.limits = limits = engine.table.limits
        self._waiting: deque[Stream] = deque()
        self._running: dict[int, Stream] = {}
        self._free_rows = list(range(limits.num_rows))[::-1]
        self._free_blocks = list(range(limits.num_blocks))[::-1]
        self._in_flight: deque[_Planned] = deque()
        self._forgotten: list[str] = []
        self._step_id, self._epoch, self._num_streams = 0, 1, 0

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        *,
        num_logprobs: int | None = None,
        max_chunk: int | None = None,
        num_cached: int = 0,
        num_drafts: int = 0,
    ) -> Stream:
        """A stream behind those that wait. num_cached: tokens of the prompt that are taken for computed. num_drafts: of
        each step in which it decodes.
        """
        self._num_streams += 1
        name, chunk = f"stream-{self._num_streams}", max_chunk or self.limits.max_num_batched_tokens
        stream = Stream(name, prompt, max_tokens, sampling, num_logprobs, chunk, num_cached, num_drafts)
        self._waiting.append(stream)
        return stream

    def run(
        self, on_step: Callable[[Step], None] = lambda _: None, *, until: Callable[[], bool] = lambda: False
    ) -> None:
        """Step until every stream is done and has left, or `until` says so; nothing is in flight then."""
        while (self._waiting or self._running or self._in_flight) and not until():
            is_full = len(self._in_flight) >= self._engine.max_in_flight
            if is_full or not self._launch(on_step):
                self._land(on_step)
        self.settle(on_step)

    def end(self, streams: Sequence[Stream]) -> None:
        """With what they have; others run to their ends."""
        for stream in streams:
            stream.max_tokens = min(stream.max_tokens, len(stream.output))
        self.run()

    def settle(self, on_step: Callable[[Step], None] = lambda _: None) -> None:
        while self._in_flight:
            self._land(on_step)

    def take_over(self) -> None:
        """Go on as another scheduler does, by what the rows themselves say."""
        self.settle()
        self._epoch, self._step_id = self._epoch + 1, 0
        states = {state.row: state for state in self._engine.table.states() if state.row is not None}
        for row, stream in self._running.items():
            told = states[row].output_token_ids.tolist()
            if told != stream.output:
                raise CheckFailedError(f"row {row} says that it generated {told}, and told {stream.output}")
            stream.num_computed, stream.num_expected = states[row].num_computed_tokens, len(told)

    def _launch(self, on_step: Callable[[Step], None]) -> bool:
        """Launch the next plan if there is anything to do."""
        released = [stream for stream in self._running.values() if stream.is_done or stream.is_preempted]
        finish = [(stream.row, len(stream.output)) for stream in released if stream.is_done]
        preempt = [stream.row for stream in released if not stream.is_done]
        for stream in released:
            self._running.pop(stream.row)
        grants: list[Cell] = []
        placed = []
        while self._waiting and self._free_rows:
            stream = self._waiting.popleft()
            stream.row = self._free_rows.pop()
            stream.num_computed, stream.num_expected = stream.num_cached, len(stream.output)
            self._running[stream.row] = stream
            placed.append(stream)
            grants += self._granted(stream, stream.num_cached)
        scheduled = self._schedule(grants)
        if not (scheduled or released):
            return False
        self._step_id += 1
        drafts = [num_drafts for _, _, num_drafts in scheduled]
        planned = plan(
            [(row, num) for row, num, _ in scheduled],
            drafts=drafts if any(drafts) else (),
            step_id=self._step_id,
            epoch=self._epoch,
            place=[_placement(stream) for stream in placed],
            finish=finish,
            preempt=preempt,
            forget=self._forgotten,
            grants=grants,
        )
        self._forgotten = []
        while not self._engine.can_launch(planned):
            self._land(on_step)
        num_tokens = sum(num for _, num, _ in scheduled)
        self._in_flight.append(_Planned(planned, self._engine.launch(planned), released, num_tokens))
        return True

    def _schedule(self, grants: list[Cell]) -> list[tuple[int, int, int]]:
        """Decodes first, then chunks as long as the budget lasts: rows, their tokens, the drafts among these."""
        budget = self.limits.max_num_batched_tokens
        scheduled = []
        for stream in sorted(self._running.values(), key=lambda one: one.num_ahead > 1):
            num_tokens = min(stream.num_ahead, stream.max_chunk, budget)
            if num_tokens <= 0 or stream.num_expected >= stream.max_tokens:
                continue
            num_drafts = stream.room_for_drafts if num_tokens == stream.num_ahead == 1 else 0
            stream.num_expected += 1 + num_drafts if num_tokens == stream.num_ahead else 0
            num_tokens += num_drafts
            stream.num_computed += num_tokens
            grants += self._granted(stream, stream.num_computed)
            budget -= num_tokens
            scheduled.append((stream.row, num_tokens, num_drafts))
        return scheduled

    def _granted(self, stream: Stream, num_tokens: int) -> list[Cell]:
        """The blocks that are missing for so many tokens."""
        held = len(stream.blocks)
        missing = -(-num_tokens // self.limits.block_size) - held
        if missing > len(self._free_blocks):
            raise CheckFailedError(f"{self.limits.num_blocks} blocks are too few for what is run on them")
        stream.blocks += [self._free_blocks.pop() for _ in range(missing)]
        return [(stream.row, index, stream.blocks[index]) for index in range(held, len(stream.blocks))]

    def _land(self, on_step: Callable[[Step], None]) -> None:
        planned = self._in_flight.popleft()
        result = self._engine.collect(planned.ticket)
        self._take(planned.plan, result)
        for stream in planned.released:
            self._free_rows.append(stream.row)
            self._free_blocks += stream.blocks
            stream.blocks, stream.row, stream.is_preempted = [], _WAITING, False
            if stream.is_done:
                self._forgotten.append(stream.name)
            else:
                stream.num_cached = 0
                self._waiting.append(stream)
        times = result.timings
        on_step(
            Step(
                time.perf_counter(),
                result.rows.size,
                planned.num_tokens,
                result.token_ids.size,
                int(result.num_draft_tokens.sum()),
                times.forward_ns,
                times.sample_ns,
            )
        )

    def _take(self, planned: BatchPlan, result: StepResult) -> None:
        if result.errors:
            raise CheckFailedError(f"a row failed: {result.errors[0]}")
        tokens = iter(result.token_ids.tolist())
        granted = planned.num_draft_tokens.tolist() or [0] * result.rows.size
        for row, count, num_drafts in zip(result.rows.tolist(), result.num_accepted.tolist(), granted, strict=True):
            stream = self._stream_of(row)
            stream.output += [next(tokens) for _ in range(count)]
            if num_drafts:
                stream.num_expected -= 1 + num_drafts - count
                stream.num_computed -= 1 + num_drafts - count
        for logprobs in result.logprobs:
            self._stream_of(logprobs.row).logprobs.append(logprobs)

    def _stream_of(self, row: int) -> Stream:
        """A stream that is leaving has still results on their way."""
        leaving = {stream.row: stream for planned in self._in_flight for stream in planned.released}
        return self._running.get(row) or leaving[row]


def _placement(stream: Stream) -> NewRequest:
    return placement(
        stream.row,
        stream.prompt,
        name=stream.name,
        output=stream.output,
        num_cached_tokens=stream.num_cached,
        max_tokens=stream.max_tokens,
        sampling=stream.sampling,
        num_logprobs=stream.num_logprobs,
    )

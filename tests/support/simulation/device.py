"""The device of a simulated executor, which computes hashes in virtual time, and the step thread that is none.

Knows the production's seam to a step thread and to a runner. Refuses to know plans: what should fail is told.
"""

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from executor_rig.hash_runner import HashRule, HashRunner
from paceline_executor.link.engine import Ticket
from paceline_executor.link.step_loop import Command
from paceline_executor.link.step_thread import Pause, Wait, Work
from paceline_executor.runner.interface import (
    FlatBatch,
    HostTokenLists,
    Int32Array,
    Runner,
    StepBatch,
    StepHandle,
    StepLostError,
    StepMasks,
    StepOutput,
)
from paceline_executor.runner.simulated import EMPTY_SLOT
from paceline_executor.runner.step_times import StepTimeCurve

_NO_TIME = StepTimeCurve()
_ROUNDING_S = 1e-6
NANOSECONDS = 1_000_000_000


class InjectedError(Exception):
    """A step fails because a fault wants it to."""


class StepFailure(enum.Enum):
    """When a step fails, and what else does."""

    AT_LAUNCH = enum.auto()
    STEP = enum.auto()
    """While it computes; the steps launched behind it are not computed."""
    DEVICE = enum.auto()
    """While it computes, and the device with it."""


class SlotRunner(HashRunner):
    """A hash runner that minds which slots were written since their blocks were granted; `report` hears of others."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        rule: HashRule,
        report: Callable[[str], None],
        step_times: StepTimeCurve = _NO_TIME,
    ) -> None:
        super().__init__(num_blocks, block_size, rule.vocab_size, rule, step_times)
        self._report = report
        self.in_order: Callable[[Callable[[], None]], None] = lambda work: work()  # with the steps

    def forget(self, block_ids: Int32Array) -> None:
        """What blocks hold counts no more."""

        def forget() -> None:
            self._slots[block_ids], self._digests[block_ids] = EMPTY_SLOT, 0

        self.in_order(forget)

    def reads(self, context: Int32Array) -> None:
        """A token is drawn behind this."""
        if (context == EMPTY_SLOT).any():
            self._report(f"read of an unwritten slot: position {int(context.argmin())}")

    def _draw(self, batch: FlatBatch) -> Int32Array:
        for row in batch.sampled.tolist():
            self.reads(self.context(batch, row))
        return super()._draw(batch)

    def context(self, batch: FlatBatch, row: int) -> Int32Array:
        """The token ids that a batch row's block table leads to."""
        num_tokens = int(batch.context_lens[row])
        num_blocks = -(-num_tokens // self._slots.shape[1])
        read: Int32Array = self._slots[batch.block_tables[row, :num_blocks]].reshape(-1)[:num_tokens]
        return read


@dataclass(frozen=True, slots=True)
class _Timed:
    """A launched step and when it will have ended."""

    handle: StepHandle | None
    """None of a step that was not computed."""
    took_ns: int
    end_ns: int
    fails: bool


class TimedRunner:
    """A runner whose steps take their time, one after another.

    `fails_next`: the next step fails, as steps of this device do.
    """

    def __init__(
        self,
        inner: Runner,
        step_ns: Callable[[int], int],
        clock_ns: Callable[[], int],
        failure: StepFailure = StepFailure.AT_LAUNCH,
    ) -> None:
        self.max_in_flight, self.kv_geometry, self.profiler = inner.max_in_flight, inner.kv_geometry, inner.profiler
        self.fails_next = False
        self._failure = failure
        self._lost: _Timed | None = None  # the last step launched since one was lost
        self._inner = inner
        self._step_ns = step_ns
        self._clock_ns = clock_ns
        self._end_ns = 0  # of all that was launched
        self._late_ns = 0

    def warm_up(self) -> tuple[tuple[int, int], ...]:
        return tuple((num_tokens, self._step_ns(num_tokens)) for num_tokens in (1, 64))

    def stall(self, seconds: float) -> None:
        self._late_ns += round(seconds * NANOSECONDS)

    def copy_blocks(self, sources: Int32Array, destinations: Int32Array) -> None:
        """In order with the steps."""
        self._inner.copy_blocks(sources, destinations)

    def launch(self, batch: StepBatch) -> StepHandle:
        """Let a step begin when the one before it has ended."""
        if self._lost is not None:
            self._lost = _Timed(None, 0, self._lost.end_ns, fails=True)
            return self._lost
        late_ns, self._late_ns = self._late_ns, 0
        took_ns = self._step_ns(int(batch.num_tokens.sum())) + late_ns
        self._end_ns = max(self._end_ns, self._clock_ns()) + took_ns
        fails, self.fails_next = self.fails_next, False
        if fails and self._failure is StepFailure.AT_LAUNCH:
            raise InjectedError("a fault lets this step fail")
        launched = _Timed(self._inner.launch(batch), took_ns, self._end_ns, fails=fails)
        if fails and self._failure is StepFailure.STEP:
            self._lost = launched
        return launched

    def drafts(self, handle: StepHandle) -> HostTokenLists | None:
        assert isinstance(handle, _Timed), "launch() made it"
        return None if handle.handle is None else self._inner.drafts(handle.handle)

    def draw(self, handle: StepHandle, masks: StepMasks | None) -> None:
        """Nothing of a step that is not computed."""
        assert isinstance(handle, _Timed), "launch() made it"
        if handle.handle is not None:
            self._inner.draw(handle.handle, masks)

    def is_done(self, handle: StepHandle) -> bool:
        """Whether its time is over, and the runner inside says so too."""
        assert isinstance(handle, _Timed), "launch() made it"
        return self._clock_ns() >= handle.end_ns and (handle.handle is None or self._inner.is_done(handle.handle))

    def wait(self, handle: StepHandle) -> StepOutput:
        """What the step produced, and how long it took by the virtual clock; its time is over."""
        assert isinstance(handle, _Timed), "launch() made it"
        assert self._clock_ns() >= handle.end_ns, "whoever runs the steps has waited"
        output = None if handle.handle is None else self._inner.wait(handle.handle)
        if handle is self._lost:
            self._lost = None
        if handle.fails and self._failure is StepFailure.DEVICE:
            raise InjectedError("a fault lets the device fail")
        if handle.fails or output is None:
            raise StepLostError from InjectedError("a fault lets this step fail while it computes")
        return replace(output, forward_ns=output.forward_ns + handle.took_ns)

    def end_of(self, ticket: Ticket) -> int:
        """When a step has ended; a failed one is the last that was launched."""
        if isinstance(ticket.handle, _Timed):
            return ticket.handle.end_ns
        return 0 if ticket.error is None else self._end_ns


class InlineThread:
    """Runs the work of a step thread on the event loop, turn by turn; a step takes its time on the virtual clock."""

    def __init__(self, clock_ns: Callable[[], int], end_of: Callable[[Ticket], int]) -> None:
        self._clock_ns = clock_ns
        self._end_of = end_of
        self._commands: deque[Command] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Work[Command]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(work), name="steps")

    def put(self, command: Command) -> None:
        self._commands.append(command)
        if self._waiter is not None:
            _wake(self._waiter)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def join(self, timeout_s: float) -> bool:
        """Tell whether it has ended: nothing else can run meanwhile."""
        del timeout_s
        return self._task is None or self._task.done()

    async def _run(self, work: Work[Command]) -> None:
        command: Command | None = None
        while True:
            try:
                wait = work.send(command)
            except StopIteration:
                return
            if isinstance(wait, Pause):
                command = None
                await _pause(wait)
            else:
                command = await self._next(wait)

    async def _next(self, wait: Wait) -> Command | None:
        end_ns = self._end_of(wait.step) if isinstance(wait.step, Ticket) else 0
        if wait.command_s is None:
            await asyncio.sleep(self._seconds_to(end_ns))
            return None
        # There is nothing to look for before the step has ended.
        seconds = max(wait.command_s, self._seconds_to(end_ns))
        if not self._commands and seconds:
            await self._look(seconds)
        return self._commands.popleft() if self._commands else None

    async def _look(self, seconds: float) -> None:
        """Wait for a command, for so long at most."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(seconds, _wake, self._waiter)
        await self._waiter
        timer.cancel()

    def _seconds_to(self, when_ns: int) -> float:
        """How long until a time, and a little longer: timers are rounded."""
        left_ns = when_ns - self._clock_ns()
        return left_ns / NANOSECONDS + _ROUNDING_S if left_ns > 0 else 0.0


async def _pause(pause: Pause) -> None:
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    timer = loop.call_later(pause.seconds, _wake, waiter)
    pause.work.add_done_callback(lambda _: _wake(waiter))
    await waiter
    timer.cancel()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

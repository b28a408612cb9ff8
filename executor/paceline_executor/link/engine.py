"""Steps from plan to result: rows change and the device is told to compute; later, what it computed comes in.

Calls table and runner from the thread it is called in. Refuses to know threads, queues and schedulers.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from paceline.plan.values import BatchPlan, StepResult, StepTimings
from paceline_executor.errors import DEVICE_FAILED, DeviceError, DeviceFaultError, ServiceError, StepFailedError
from paceline_executor.link.step_thread import Pause
from paceline_executor.memory import is_out_of_memory
from paceline_executor.rows.table import Launched, RowTable
from paceline_executor.runner.interface import Runner, StepHandle, StepLostError, StepOutput

_SURE = 0.7  # of a predicted time has to pass
_NOTHING = np.empty(0, dtype=np.int32)
_NO_OUTPUT = StepOutput(
    num_accepted=_NOTHING, token_ids=_NOTHING, logprobs=None, problems={}, forward_ns=0, sample_ns=0
)


@dataclass(slots=True, eq=False)
class Ticket:
    """A launch that failed on the device says so when it is collected, after those before it. So do draws."""

    launched: Launched
    handle: StepHandle | None  # None: there is nothing to compute, or the launch failed
    error: Exception | None
    prepare_ns: int
    is_to_draw: bool = False


class Engine:
    """Launches plans as many ahead as the runner allows, and collects them in the same order."""

    def __init__(self, table: RowTable, runner: Runner, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.table = table
        self.runner = runner
        self._clock_ns = clock_ns
        self._in_flight: deque[Ticket] = deque()  # oldest first
        self._begun_ns = 0  # the oldest
        self.profiler = runner.profiler
        table.begin_device()

    @property
    def max_in_flight(self) -> int:
        return self.runner.max_in_flight

    def can_launch(self, plan: BatchPlan) -> bool:
        if not self._in_flight:
            return True
        last = self._in_flight[-1]
        has_room = len(self._in_flight) < self.max_in_flight and last.error is None and not last.is_to_draw
        return has_room and self.table.can_launch(plan)

    def launch(self, plan: BatchPlan) -> Ticket:
        """Raises PlanError or UnsupportedPlanError for a bad plan, StepFailedError for another failure before the
        device starts; the rows are then as before.
        """
        start_ns = self._clock_ns()
        self.draw()
        try:
            with self.profiler.span("apply the plan"):
                launched = self.table.launch(plan, start_ns)
        except ServiceError:
            raise
        except Exception as error:
            raise _step_failed(error) from error
        ticket = self._start(launched, start_ns)
        if not self._in_flight:
            self._begun_ns = start_ns
        self._in_flight.append(ticket)
        return ticket

    def pause(self) -> Pause | None:
        """Before the oldest step in flight draws, until a form is compiled: as long as it computes anyway."""
        ticket = self._in_flight[0] if self._in_flight else None
        if ticket is None or not ticket.is_to_draw:
            return None
        left_ns = self._begun_ns + int(_SURE * ticket.launched.plan.predicted_ns) - self._clock_ns()
        waiting = self.table.waiting_form(ticket.launched)
        return None if waiting is None or left_ns <= 0 else Pause(waiting, left_ns / 1e9)

    def draw(self) -> None:
        """Lets the oldest step in flight draw, if it waited: masks follow from the tokens of the step before it."""
        ticket = self._in_flight[0] if self._in_flight else None
        if ticket is None or not ticket.is_to_draw:
            return
        ticket.is_to_draw = False
        try:
            with self.profiler.span("mask"):
                masks = self.table.masks(ticket.launched, self.runner.drafts(ticket.handle))
            self.runner.draw(ticket.handle, masks)
        except Exception as error:
            ticket.error = error

    def is_done(self, ticket: Ticket) -> bool:
        """True of a device that has failed: `collect` says so."""
        try:
            return ticket.handle is None or ticket.error is not None or self.runner.is_done(ticket.handle)
        except Exception:
            return True

    def collect(self, ticket: Ticket, waited_ns: int = 0, idle_ns: int = 0) -> StepResult:
        """`waited_ns`: the plan for the device; `idle_ns`: the device for the plan. Raises StepFailedError when the
        step failed: it and all later ones are then taken back. Raises DeviceFaultError when the device failed: nothing
        can go on then.
        """
        self.draw()
        try:
            if ticket.error is not None:
                raise ticket.error
            output = _NO_OUTPUT if ticket.handle is None else self._wait(ticket.handle)
            output_ns = self._clock_ns()
            with self.profiler.span("advance rows"):
                result = self.table.land(ticket.launched, output)
        except DeviceError:
            raise
        except Exception as error:
            self._take_back()
            cause = error.__cause__ if isinstance(error, StepLostError) and error.__cause__ is not None else error
            raise _step_failed(cause) from cause
        self._in_flight.popleft()
        self._begun_ns = output_ns
        # What follows the device's work is this side's own.
        prepare_ns = ticket.prepare_ns + self._clock_ns() - output_ns
        timings = StepTimings(waited_ns, prepare_ns, output.forward_ns, output.sample_ns, idle_ns, output.draft_ns)
        # The rows have advanced: what goes wrong here is no failed step.
        self.table.trim_records(self._clock_ns())
        return replace(result, timings=timings)

    def _start(self, launched: Launched, start_ns: int) -> Ticket:
        copies, prepared = launched.plan.copies, launched.prepared
        handle = None
        try:
            if copies.sources.size:
                with self.profiler.span("copy blocks"):
                    self.runner.copy_blocks(copies.sources, copies.destinations)
            prepare_ns = self._clock_ns() - start_ns
            if prepared.rows.size:
                with self.profiler.span("compute"):
                    handle = self.runner.launch(prepared.batch)
        except Exception as error:
            return Ticket(launched, None, error, 0)
        return Ticket(launched, handle, None, prepare_ns, prepared.batch.is_masked)

    def _wait(self, handle: StepHandle) -> StepOutput:
        try:
            with self.profiler.span("wait for the device"):
                return self.runner.wait(handle)
        except (StepLostError, DeviceError):
            raise
        except Exception as error:
            raise DeviceFaultError(DEVICE_FAILED) from error

    def _take_back(self) -> None:
        """After the device has ended them."""
        self._in_flight.popleft()
        while self._in_flight:
            later = self._in_flight.popleft()
            if later.handle is not None and later.error is None:
                with contextlib.suppress(StepLostError):
                    if later.is_to_draw:
                        self.runner.draw(later.handle, None)
                    self._wait(later.handle)
        self.table.take_back()


def _step_failed(error: BaseException) -> StepFailedError:
    what = "memory ran out" if is_out_of_memory(error) else f"an unexpected {type(error).__name__}"
    return StepFailedError(f"a step failed on the executor: {what}; its log says more")

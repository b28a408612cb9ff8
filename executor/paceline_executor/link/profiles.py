"""Profiles, as calls see them: one at a time, of so many steps, for so long at most.

Knows the step loop and the profiler of its runner. It refuses to know what a trace looks like, and gRPC.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TypeVar

from paceline_executor.errors import InvalidFieldError, NoStepsError, NotReadyError, ProfileRunningError
from paceline_executor.link.step_loop import StepLoop
from paceline_executor.profiling.profiler import MAX_NUM_STEPS, Profiler

MAX_PROFILE_S = 60.0
_LOOK_S = 0.1
_ANSWER_S = 5.0

Rates = Mapping[str, float]
T = TypeVar("T")


class Profiles:
    """Whether one is being recorded. `on_rates` is told what kernels reached in each, in bytes per second by kind."""

    def __init__(self, on_rates: Callable[[Rates], None], max_profile_s: float = MAX_PROFILE_S) -> None:
        self._on_rates = on_rates
        self._max_profile_s = max_profile_s
        self._is_recording = False
        self._ending: asyncio.Task[None] | None = None  # kept, or it might be forgotten

    async def record(self, steps: StepLoop, num_steps: int) -> AsyncGenerator[bytes, None]:
        """The parts of the trace of the next steps, as they come. Leaving it ends the recording.

        Raises InvalidFieldError, ProfileRunningError, NotReadyError while no step ends, NoStepsError if none ran.
        """
        if not 1 <= num_steps <= MAX_NUM_STEPS:
            raise InvalidFieldError(f"num_steps must be 1 to {MAX_NUM_STEPS}, not {num_steps}", "num_steps")
        if self._is_recording:
            sentence = "another profile is being recorded: wait until it has ended, or cancel that call"
            raise ProfileRunningError(sentence)
        self._is_recording, preparing = True, None
        try:
            profiler = await _answered(steps.ask_profiler(lambda one: one))
            preparing = asyncio.ensure_future(asyncio.to_thread(profiler.prepare))
            await asyncio.shield(preparing)
            await _answered(steps.ask_profiler(lambda one: one.start(num_steps)))
            deadline_s = time.monotonic() + self._max_profile_s
            while profiler.is_on and time.monotonic() < deadline_s:
                if part := await asyncio.to_thread(profiler.read):
                    yield part
                else:
                    await asyncio.sleep(_LOOK_S)
            await _answered(steps.ask_profiler(lambda one: one.stop()))
            if not profiler.num_steps:
                raise NoStepsError(f"no step ran within {self._max_profile_s:g} s: send requests while it records")
            self._on_rates(await asyncio.to_thread(profiler.rates))
            while (part := await asyncio.to_thread(profiler.read)) is not None:
                yield part
        finally:
            self._ending = asyncio.create_task(self._end(steps, preparing), name="end of a profile")

    async def _end(self, steps: StepLoop, preparing: asyncio.Future[None] | None) -> None:
        """Whatever ended the call: the next one may begin once the step thread has stopped, and no thread prepares."""
        try:
            if preparing is not None:
                await asyncio.gather(preparing, return_exceptions=True)
            await steps.ask_profiler(_stop_and_discard)
        finally:
            self._is_recording = False


def _stop_and_discard(profiler: Profiler) -> None:
    profiler.stop()
    profiler.discard()


async def _answered(answer: Awaitable[T]) -> T:
    try:
        return await asyncio.wait_for(answer, _ANSWER_S)
    except TimeoutError:
        raise NotReadyError(f"no step has ended for {_ANSWER_S:g} s, so no profile can begin or end") from None

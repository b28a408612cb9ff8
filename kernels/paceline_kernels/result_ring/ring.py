"""The ring itself: its memory, and the host's view of it.

Knows slots and their numbers; not who writes them.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.clock import CLOCK_SIZE
from paceline_kernels.errors import KernelArgumentError

_NO_STEP = -1
NUM_STAMPS = CLOCK_SIZE + 1


@dataclass(frozen=True, slots=True)
class ResultRing:
    """Memory that the device writes and the host reads, a slot per step in turn. All contiguous."""

    steps: torch.Tensor  # [num_slots] int64: whose results the slot holds, written last; -1 before the first
    num_accepted: torch.Tensor  # [num_slots, max_planned] int32: new tokens of each planned row
    num_draws: torch.Tensor  # [num_slots, max_planned] int32: none, or one and one for each draft that was verified
    finish: torch.Tensor  # [num_slots, max_planned] uint8, of RowFinish
    problems: torch.Tensor  # [num_slots, max_planned] uint8, of SampleOutcome: of the draw that ended a row, else DRAWN
    token_ids: torch.Tensor  # [num_slots, max_draws] int32: the new tokens, planned row after planned row
    logprobs: torch.Tensor  # [num_slots, max_draws] float32: theirs, where a step is written with any
    top_token_ids: torch.Tensor  # [num_slots, max_draws, max_logprobs] int32: the likeliest ones instead of them
    top_logprobs: torch.Tensor  # [num_slots, max_draws, max_logprobs] float32
    stamps: torch.Tensor  # [num_slots, NUM_STAMPS] int64: the clock's times, and when all this was written, in ns


@dataclass(frozen=True, slots=True)
class StepResults:
    """What a step brought its planned rows: views of its slot, which hold until the slot is written again."""

    num_accepted: npt.NDArray[np.int32]  # [num_planned]; 0 also for a row that had ended, and for padding
    num_draws: npt.NDArray[np.int32]  # [num_planned]
    finish: npt.NDArray[np.uint8]  # [num_planned], of RowFinish
    problems: npt.NDArray[np.uint8]  # [num_planned], of SampleOutcome; DRAWN unless a draw of this step failed
    token_ids: npt.NDArray[np.int32]  # [sum(num_accepted)]
    logprobs: npt.NDArray[np.float32]  # [sum(num_accepted)], this and the next two as in Samples; else anything
    top_token_ids: npt.NDArray[np.int32]  # [sum(num_accepted), max_logprobs]
    top_logprobs: npt.NDArray[np.float32]  # [sum(num_accepted), max_logprobs]
    stamps: npt.NDArray[np.int64]  # [NUM_STAMPS], by the device's time


def new_ring(num_slots: int, max_planned: int, max_draws: int, max_logprobs: int = 0, *, pinned: bool) -> ResultRing:
    """An empty ring in host memory.

    num_slots: as many steps as may be in flight, or have landed and not been read. max_planned, max_draws: of a step.
    max_logprobs: how many of the likeliest tokens a draw may tell. pinned: so that a GPU writes it, which needs one.
    """

    def column(value: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, pin_memory=pinned)

    return ResultRing(
        steps=column(_NO_STEP, torch.int64, num_slots),
        num_accepted=column(0, torch.int32, num_slots, max_planned),
        num_draws=column(0, torch.int32, num_slots, max_planned),
        finish=column(0, torch.uint8, num_slots, max_planned),
        problems=column(0, torch.uint8, num_slots, max_planned),
        token_ids=column(0, torch.int32, num_slots, max_draws),
        logprobs=column(0, torch.float32, num_slots, max_draws),
        top_token_ids=column(0, torch.int32, num_slots, max_draws, max_logprobs),
        top_logprobs=column(0, torch.float32, num_slots, max_draws, max_logprobs),
        stamps=column(0, torch.int64, num_slots, NUM_STAMPS),
    )


class RingReader:
    """The host's view of a ring. It waits for nothing and keeps no step: who reads knows which one comes next.

    A slot's number is read before what it stands for, in two loads that x86 keeps in this order. A processor that
    reorders loads, such as those of Arm, needs a barrier in between, which Python has not.
    """

    def __init__(self, ring: ResultRing) -> None:
        self._steps = ring.steps.numpy()
        self._num_accepted = ring.num_accepted.numpy()
        self._num_draws = ring.num_draws.numpy()
        self._finish = ring.finish.numpy()
        self._problems = ring.problems.numpy()
        self._token_ids = ring.token_ids.numpy()
        self._logprobs = ring.logprobs.numpy()
        self._top_token_ids = ring.top_token_ids.numpy()
        self._top_logprobs = ring.top_logprobs.numpy()
        self._stamps = ring.stamps.numpy()

    def has_step(self, step: int) -> bool:
        """Whether the step has landed. Raises KernelArgumentError if a later one has taken its slot."""
        held = int(self._steps[step % len(self._steps)])
        if held > step:
            problem = (
                f"step {step} is gone, its slot holds {held}: read a step before {len(self._steps)} more are launched"
            )
            raise KernelArgumentError("result_ring", problem)
        return held == step

    def results_of(self, step: int, num_planned: int) -> StepResults:
        """What a step with so many rows brought. Raises KernelArgumentError if it has not landed, or is gone."""
        if not self.has_step(step):
            raise KernelArgumentError("result_ring", f"step {step} has not landed: ask `has_step` until it has")
        slot = step % len(self._steps)
        num_accepted = self._num_accepted[slot, :num_planned]
        num_tokens = int(num_accepted.sum())
        return StepResults(
            num_accepted=num_accepted,
            num_draws=self._num_draws[slot, :num_planned],
            finish=self._finish[slot, :num_planned],
            problems=self._problems[slot, :num_planned],
            token_ids=self._token_ids[slot, :num_tokens],
            logprobs=self._logprobs[slot, :num_tokens],
            top_token_ids=self._top_token_ids[slot, :num_tokens],
            top_logprobs=self._top_logprobs[slot, :num_tokens],
            stamps=self._stamps[slot],
        )

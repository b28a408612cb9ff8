"""The ring itself: its memory, and how the host writes a slot. Knows slots and their sizes; not who reads them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline_kernels.errors import KernelArgumentError

_Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PlanRing:
    """Memory that the host writes and the device reads, a slot per step in turn. All int32 and contiguous."""

    counts: torch.Tensor  # [num_slots, 2]: how many words the slot has, and how many planned rows
    rows: torch.Tensor  # [num_slots, max_planned], this and the next as in PlanColumns
    num_tokens: torch.Tensor  # [num_slots, max_planned]
    places: torch.Tensor  # [num_slots, max_words]: which words of the device's change, no two alike
    values: torch.Tensor  # [num_slots, max_words]: to what


def new_plan_ring(num_slots: int, max_planned: int, max_words: int, *, pinned: bool) -> PlanRing:
    """An empty ring in host memory.

    num_slots: as many steps as may be launched and not have landed. max_planned, max_words: of a step. pinned: so that
    a GPU reads it, which needs one.
    """

    def column(width: int) -> torch.Tensor:
        return torch.zeros((num_slots, width), dtype=torch.int32, pin_memory=pinned)

    return PlanRing(column(2), column(max_planned), column(max_planned), column(max_words), column(max_words))


class PlanWriter:
    """The host's view of a ring. Who writes the slot of step n knows that step n - num_slots has landed."""

    def __init__(self, ring: PlanRing) -> None:
        self._counts = ring.counts.numpy()
        self._rows = ring.rows.numpy()
        self._num_tokens = ring.num_tokens.numpy()
        self._places = ring.places.numpy()
        self._values = ring.values.numpy()

    @property
    def max_words(self) -> int:
        """How many words a slot has room for."""
        return int(self._places.shape[1])

    def write(
        self, step: int, rows: _Int32Array, num_tokens: _Int32Array, places: _Int32Array, values: _Int32Array
    ) -> None:
        """Fill the slot of a step, before what reads it is launched.

        rows, num_tokens: [num_planned] int32. places, values: [num_words] int32. Raises KernelArgumentError for another
        type or shape, and for more than a slot holds: words beyond that go by `write_words`.
        """
        columns = {"rows": rows, "num_tokens": num_tokens, "places": places, "values": values}
        for name, column in columns.items():
            size = len(rows) if name in ("rows", "num_tokens") else len(places)
            if column.dtype != np.int32 or column.shape != (size,):
                problem = f"{name} must be int32 of shape [{size}], not {column.dtype} of {list(column.shape)}"
                raise KernelArgumentError("plan_ring", problem)
        slot, max_planned, max_words = step % len(self._counts), self._rows.shape[1], self._places.shape[1]
        if len(rows) > max_planned or len(places) > max_words:
            problem = (
                f"a slot has room for {max_planned} rows and {max_words} words, not for {len(rows)} and {len(places)}: "
                "plan less, and send other words by `write_words`"
            )
            raise KernelArgumentError("plan_ring", problem)
        self._counts[slot] = len(places), len(rows)
        self._rows[slot, : len(rows)] = rows
        self._num_tokens[slot, : len(rows)] = num_tokens
        self._places[slot, : len(places)] = places
        self._values[slot, : len(places)] = values

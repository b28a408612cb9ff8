"""Which drafts a device has found, told to its host while the step goes on: a form's masks are for what they are.

Copied behind the drafting, into memory that both share, the step's number last. Refuses to know who drafts.
"""

import numpy as np
import torch

from paceline_executor.runner.device.device import Device
from paceline_executor.runner.device.row_words import RowWords
from paceline_executor.runner.interface import HostTokenLists, Int32Array
from paceline_executor.runner.row_rules import NO_TOKENS


class FoundDrafts:
    """Of one step at a time: the next one is launched when this one's are read."""

    def __init__(self, device: Device, rows: RowWords, max_drafts: int) -> None:
        self._device = device
        self._rows = rows
        self._max_drafts = max_drafts
        self._step = torch.full((1,), -1, dtype=torch.int64, pin_memory=device.is_pinned)
        self._of: Int32Array = NO_TOKENS
        self._told: list[torch.Tensor] = []  # counts, tokens

    def look_at(self, rows: Int32Array) -> None:
        """Those of these rows of the executor."""
        self._of = rows

    def launch(self, step: torch.Tensor) -> None:
        """Behind the drafting of the step whose number this is, [1] int64 on the device."""
        rows, max_drafts, told = self._device.upload(self._of.astype(np.int64)), self._max_drafts, self._told
        state, num_known = self._rows.state, self._rows.draws.num_known

        def tell() -> None:
            known = num_known[rows]
            places = known[:, None] + torch.arange(max_drafts, dtype=torch.int32, device=known.device)
            tokens = state.token_ids[rows].gather(1, places.clamp(max=state.token_ids.shape[1] - 1).long())
            counts = (state.num_held[rows] - known).masked_fill(state.finish[rows] != 0, 0)
            told[:] = self._device.download(counts), self._device.download(tokens)
            self._step.copy_(step, non_blocking=True)

        self._device.launch(tell)

    def is_of(self, step: int) -> bool:
        return self._step.item() == step

    @property
    def lists(self) -> HostTokenLists:
        counts, tokens = (values.numpy() for values in self._told)
        return HostTokenLists.of([line[:count] for line, count in zip(tokens, counts.tolist(), strict=True)])

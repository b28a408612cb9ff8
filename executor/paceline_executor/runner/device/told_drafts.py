"""Drafts that a device and its host tell each other: what forms force, before they are verified, and what was found.

Found drafts are copied behind the drafting, into memory that both share, the step's number last: a form's masks are for
what they are. Refuses to know who drafts.
"""

import numpy as np
import torch

from paceline_executor.runner.device.device import Device
from paceline_executor.runner.device.row_words import RowWords
from paceline_executor.runner.interface import ForcedDrafts, HostTokenLists, StepBatch


class ToldDrafts:
    """Of one masked step at a time: the next one is launched when this one's are read."""

    def __init__(self, device: Device, rows: RowWords, max_drafts: int) -> None:
        self._device = device
        self._rows = rows
        self._max_drafts = max_drafts
        self._step = torch.full((1,), -1, dtype=torch.int64, pin_memory=device.is_pinned)
        self._told: list[torch.Tensor] = []  # counts, tokens

    def launch(self, batch: StepBatch, step: torch.Tensor) -> None:
        """Behind the drafting of the step whose number this is, [1] int64 on the device."""
        if batch.forced is not None:
            self._place(batch.forced, batch)
        rows, told = self._device.upload(batch.rows[batch.sampled].astype(np.int64)), self._told
        state, num_known = self._rows.state, self._rows.draws.num_known

        def tell() -> None:
            known = num_known[rows]
            tokens = state.token_ids[rows].gather(1, self._places(known, self._max_drafts))
            counts = (state.num_held[rows] - known).masked_fill(state.finish[rows] != 0, 0)
            told[:] = self._device.download(counts), self._device.download(tokens)
            self._step.copy_(step, non_blocking=True)

        self._device.launch(tell)

    def is_of(self, step: int) -> bool:
        return self._step.item() == step

    @property
    def lists(self) -> HostTokenLists:
        """Of each sampled row."""
        counts, tokens = (values.numpy() for values in self._told)
        return HostTokenLists.of([line[:count] for line, count in zip(tokens, counts.tolist(), strict=True)])

    def _places(self, starts: torch.Tensor, width: int) -> torch.Tensor:
        """[num_rows, width] int64: the columns from each start on, within the tokens of a row."""
        places = starts[:, None] + torch.arange(width, dtype=torch.int32, device=starts.device)
        return places.clamp(max=self._rows.state.token_ids.shape[1] - 1).long()

    def _place(self, forced: ForcedDrafts, batch: StepBatch) -> None:
        """Where a row has gone on with forced tokens so far, those behind take the place of its drafts."""
        upload, state, num_known = self._device.upload, self._rows.state, self._rows.draws.num_known
        lens = np.diff(forced.token_ids.cu_lens)
        padded = np.full((lens.size, int(lens.max()) + self._max_drafts), -1, dtype=np.int32)
        padded[np.arange(padded.shape[1]) < lens[:, None]] = forced.token_ids.token_ids
        planned = batch.num_tokens[[batch.rows.tolist().index(row) for row in forced.rows.tolist()]]
        rows, tokens = upload(forced.rows.astype(np.int64)), upload(padded)
        starts, num_planned, num_forced = upload(forced.starts), upload(planned), upload(lens.astype(np.int32))

        def place() -> None:
            known, held = num_known[rows], state.token_ids[rows]
            gone = known - starts  # tokens of the output since
            drawn = held.gather(1, self._places(starts, tokens.shape[1]))
            is_behind = torch.arange(tokens.shape[1], device=gone.device) >= gone[:, None]
            goes_on = ((drawn == tokens) | is_behind).all(1) & (state.finish[rows] == 0)
            wanted = num_planned - (known - state.num_computed[rows])
            counts = torch.minimum(num_forced - gone, wanted.clamp(max=self._max_drafts)).clamp(min=0) * goes_on
            drafts = torch.arange(self._max_drafts, device=gone.device)
            following = tokens.gather(1, (gone[:, None] + drafts).clamp(0, tokens.shape[1] - 1).long())
            places = self._places(known, self._max_drafts)
            is_forced = drafts < counts[:, None]
            state.token_ids[rows[:, None], places] = following.where(is_forced, held.gather(1, places))
            state.num_held[rows] = (known + counts).where(counts > 0, state.num_held[rows]).int()

        self._device.launch(place)

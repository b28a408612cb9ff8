"""Rows on the device: one flat tensor of words of which every column is a view, and what a batch changes of it.

So one kernel applies whatever the host knows better. Refuses to know who sends changes, and what becomes of rows.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline_executor.errors import StartError
from paceline_executor.limits import MAX_END_TOKENS, RowLimits
from paceline_executor.runner.interface import Int32Array, RowDescriptions, StepBatch
from paceline_kernels.draws import RowDraws
from paceline_kernels.step_inputs import RowBuffers

_MAX_WORDS = 2**31  # places are int32
_NO_TOKEN = -1

_Changes = list[tuple[npt.NDArray[np.integer], npt.NDArray[np.generic]]]  # places and values


@dataclass(frozen=True, slots=True)
class WordChanges:
    """No two words are alike."""

    places: Int32Array  # [num_words]
    values: Int32Array  # [num_words]

    @classmethod
    def of(cls, changes: _Changes) -> "WordChanges":
        """Values have 32 bits, whatever they stand for."""
        places = np.concatenate([places for places, _ in changes]).astype(np.int32)
        return cls(places, np.concatenate([np.ascontiguousarray(values).view(np.int32) for _, values in changes]))


class RowLayout:
    """Where each column begins among the words."""

    def __init__(self, limits: RowLimits) -> None:
        """Raises StartError if the rows have more words than places can name."""
        num_rows = limits.num_rows
        self.num_rows, self.max_model_len, self.max_blocks = num_rows, limits.max_model_len, limits.max_blocks_per_row
        # Seeds have 64 bits, so they come first.
        widths = {"seeds": 2, "token_ids": self.max_model_len, "block_table": self.max_blocks}
        widths |= {"end_tokens": MAX_END_TOKENS} | dict.fromkeys(_COLUMNS, 1)
        self.starts: dict[str, int] = {}
        self.num_words = 0
        for name, width in widths.items():
            self.starts[name] = self.num_words
            self.num_words += num_rows * width
        self.min_chance = self.num_words  # of drafts, one for all rows
        self.num_words += 1
        if self.num_words >= _MAX_WORDS:
            sentence = f"{num_rows} rows of {self.max_model_len} tokens are more than a device can keep"
            raise StartError(f"{sentence}; lower --max-num-seqs or --max-model-len")

    def cells(self, name: str, rows: Int32Array, width: int, indices: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Returns the places of these elements of a matrix."""
        return self.starts[name] + rows.astype(np.int64) * width + indices


class RowWords:
    def __init__(self, limits: RowLimits, device: torch.device) -> None:
        self.layout = layout = RowLayout(limits)
        self.words = torch.zeros(layout.num_words, dtype=torch.int32, device=device)
        self.state = RowBuffers(
            token_ids=self._matrix("token_ids", layout.max_model_len),
            num_held=self._column("num_held"),
            num_computed=self._column("num_computed"),
            finish=self._column("finish"),
            block_table=self._matrix("block_table", layout.max_blocks),
        )
        start, size = layout.starts["token_ids"] + 1, layout.num_rows * layout.max_model_len
        # At p the token of p + 1; the last place is of the next row.
        self.next_token_ids = self.words[start : start + size].view(layout.num_rows, layout.max_model_len)
        self.draws = RowDraws(
            num_prompt=self._column("num_prompt"),
            num_known=self._column("num_known"),
            max_known=self._column("max_known"),
            end_tokens=self._matrix("end_tokens", MAX_END_TOKENS),
            temperature=self._column("temperature", torch.float32),
            top_k=self._column("top_k"),
            top_p=self._column("top_p", torch.float32),
            min_p=self._column("min_p", torch.float32),
            seeds=self.words[: 2 * layout.num_rows].view(torch.int64),
            num_logprobs=self._column("num_logprobs"),
        )
        self.num_drafted = self._column("num_drafted")  # tokens that a draft model has computed
        self.min_chance = self.words[layout.min_chance :].view(torch.float32)  # [1]
        # The host's own copy, by row.
        self.num_logprobs: Int32Array = np.full(layout.num_rows, -1, dtype=np.int32)

    def changes(self, batch: StepBatch) -> WordChanges:
        layout, cells, described = self.layout, batch.cells, batch.described
        blocks = layout.cells("block_table", cells.rows, layout.max_blocks, cells.indices)
        changes: _Changes = [(blocks, cells.block_ids)]
        if described.rows.size:
            changes += _described(layout, described)
            self.num_logprobs[described.rows] = described.sampling.num_logprobs
        if batch.num_drafts is not None:
            changes.append((np.array([layout.min_chance]), np.array([batch.min_draft_chance], dtype=np.float32)))
        return WordChanges.of(changes)

    def computed(self, row: int, num_tokens: int) -> WordChanges:
        place = self.layout.starts["num_computed"] + row
        return WordChanges(np.array([place], dtype=np.int32), np.array([num_tokens], dtype=np.int32))

    def _column(self, name: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        start = self.layout.starts[name]
        return self.words[start : start + self.layout.num_rows].view(dtype)

    def _matrix(self, name: str, width: int) -> torch.Tensor:
        start, num_rows = self.layout.starts[name], self.layout.num_rows
        return self.words[start : start + num_rows * width].view(num_rows, width)


_COLUMNS = (
    "num_held",
    "num_computed",
    "num_drafted",
    "finish",
    "num_prompt",
    "num_known",
    "max_known",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "num_logprobs",
)


def _described(layout: RowLayout, described: RowDescriptions) -> _Changes:
    rows, sampling, known = described.rows, described.sampling, described.known
    columns = {
        "num_held": described.num_known,  # drafts are the device's own
        "num_computed": described.num_computed,
        "num_drafted": np.zeros_like(rows),
        "finish": np.zeros_like(rows),
        "num_prompt": described.num_prompt,
        "num_known": described.num_known,
        "max_known": described.max_known,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "num_logprobs": sampling.num_logprobs,
    }
    end_tokens = np.full((rows.size, MAX_END_TOKENS), _NO_TOKEN, dtype=np.int32)
    end_tokens[:, : described.end_token_ids.shape[1]] = described.end_token_ids
    ends = layout.cells("end_tokens", rows[:, None], MAX_END_TOKENS, np.arange(MAX_END_TOKENS))
    seeds = layout.cells("seeds", rows[:, None], 2, np.arange(2))
    lens = described.num_known
    positions = np.arange(known.token_ids.size) - np.repeat(known.cu_lens[:-1], lens)
    tokens = layout.cells("token_ids", np.repeat(rows, lens), layout.max_model_len, positions)
    return [
        *((layout.starts[name] + rows, column) for name, column in columns.items()),
        (ends.ravel(), end_tokens.ravel()),
        (seeds.ravel(), sampling.seeds),
        (tokens, known.token_ids),
    ]

"""What changes every step for every row, in numpy columns.

Refuses to decide anything: `table` checks and orders, `batch` reads, `outcome` advances.
"""

import numpy as np
import numpy.typing as npt

from paceline.plan.values import NewRequest, RowFinish
from paceline_executor.limits import MAX_END_TOKENS, RowLimits
from paceline_executor.rows.undo import Undo

NO_BLOCK = -1  # in cells at or beyond num_blocks; no kernel may read them
NOT_ASKED = -1  # in columns that count alternatives
GOES_ON = int(RowFinish.GOES_ON)  # numpy takes its time with members of an enum
_NO_TOKEN = -1  # pads a row's end tokens; no model draws it

RowProgress = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.uint8]]


class RowArrays:
    """One element, or one line of a matrix, per row. A row not in use is all zeros, `NO_BLOCK` and `NOT_ASKED`."""

    def __init__(self, limits: RowLimits) -> None:
        num_rows = limits.num_rows
        self.block_size = limits.block_size
        self.in_use = np.zeros(num_rows, dtype=np.bool_)  # by a request that no launched step releases
        self.finish = np.zeros(num_rows, dtype=np.uint8)
        self.is_closed = np.zeros(num_rows, dtype=np.bool_)  # until the step that releases it has landed
        self.num_prompt = np.zeros(num_rows, dtype=np.int32)
        self.num_known = np.zeros(num_rows, dtype=np.int32)
        self.num_computed = np.zeros(num_rows, dtype=np.int32)
        # If every launched step brings all it may; the same when none is in flight.
        self.known_bound = np.zeros(num_rows, dtype=np.int32)
        self.computed_bound = np.zeros(num_rows, dtype=np.int32)
        self.max_known = np.zeros(num_rows, dtype=np.int64)  # of tokens at which max_tokens is reached
        self.num_blocks = np.zeros(num_rows, dtype=np.int32)
        self.num_shared = np.zeros(num_rows, dtype=np.int32)  # leading blocks that are only read
        # To the runner: of the row, and of leading cells of its table.
        self.is_told = np.zeros(num_rows, dtype=np.bool_)
        self.told_blocks = np.zeros(num_rows, dtype=np.int32)
        self.temperature = np.zeros(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int32)
        self.top_p = np.zeros(num_rows, dtype=np.float32)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.seed = np.zeros(num_rows, dtype=np.uint64)
        self.num_logprobs = np.zeros(num_rows, dtype=np.int32)
        self.num_prompt_logprobs = np.full(num_rows, NOT_ASKED, dtype=np.int32)
        self.end_tokens = np.full((num_rows, MAX_END_TOKENS), _NO_TOKEN, dtype=np.int32)
        self.block_table = np.full((num_rows, limits.max_blocks_per_row), NO_BLOCK, dtype=np.int32)
        # Memory of a token is used only once a row reaches it.
        self.tokens = np.zeros((num_rows, limits.max_model_len), dtype=np.int32)
        self.max_end_tokens = 1  # columns of end_tokens worth comparing

    def output_of(self, row: int) -> npt.NDArray[np.int32]:
        """Returns a view of its output tokens that are known."""
        return self.tokens[row, self.num_prompt[row] : self.num_known[row]]

    def progress(self, rows: npt.NDArray[np.int32]) -> RowProgress:
        """Returns a copy of all but the tokens."""
        return self.num_computed[rows], self.num_known[rows], self.finish[rows]

    def restore(self, rows: npt.NDArray[np.int32], progress: RowProgress) -> None:
        """Later tokens stay behind, unread."""
        self.num_computed[rows], self.num_known[rows], self.finish[rows] = progress

    def count_as_told(self, rows: npt.NDArray[np.int32], undo: Undo) -> None:
        """With the step that is launched."""

        def forget() -> None:
            self.is_told[rows] = False

        undo.add(forget)
        self.is_told[rows] = True
        self.told_blocks[rows] = self.num_blocks[rows]

    def clear(self, row: int) -> None:
        for array in (*self._state(), self.is_told, self.told_blocks):
            array[row] = 0
        self.block_table[row] = NO_BLOCK
        self.end_tokens[row] = _NO_TOKEN
        self.num_prompt_logprobs[row] = NOT_ASKED

    def place(self, placement: NewRequest) -> None:
        """The placement's fields have been checked."""
        row = placement.row
        num_prompt = placement.prompt_token_ids.size
        num_known = num_prompt + placement.output_token_ids.size
        self.in_use[row] = True
        self.num_prompt[row] = num_prompt
        self.num_known[row] = num_known
        self.num_computed[row] = placement.num_cached_tokens
        self.known_bound[row], self.computed_bound[row] = num_known, placement.num_cached_tokens
        self.max_known[row] = num_prompt + placement.max_tokens
        self.tokens[row, :num_prompt] = placement.prompt_token_ids
        self.tokens[row, num_prompt:num_known] = placement.output_token_ids
        self._place_sampling(placement)

    def place_failed(self, placement: NewRequest) -> None:
        """The request cannot run; it has no tokens."""
        self.in_use[placement.row] = True
        self.finish[placement.row] = RowFinish.ERROR

    def _place_sampling(self, placement: NewRequest) -> None:
        row, sampling = placement.row, placement.sampling
        self.temperature[row] = sampling.temperature
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed
        self.num_logprobs[row] = _asked(placement.num_logprobs)
        self.num_prompt_logprobs[row] = _asked(placement.num_prompt_logprobs)
        num_end_tokens = len(placement.end_token_ids)
        self.end_tokens[row, :num_end_tokens] = placement.end_token_ids
        self.max_end_tokens = max(self.max_end_tokens, num_end_tokens)

    def _state(self) -> tuple[npt.NDArray[np.generic], ...]:
        return (
            self.in_use,
            self.finish,
            self.num_prompt,
            self.is_closed,
            self.num_known,
            self.num_computed,
            self.known_bound,
            self.computed_bound,
            self.max_known,
            self.num_blocks,
            self.num_shared,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seed,
            self.num_logprobs,
            self.num_prompt_logprobs,
            self.end_tokens,
            self.block_table,
        )


def _asked(num_logprobs: int | None) -> int:
    return NOT_ASKED if num_logprobs is None else num_logprobs

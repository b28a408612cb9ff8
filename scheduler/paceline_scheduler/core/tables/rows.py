"""The rows of one executor: what changes every step for every request, in numpy columns.

Knows token counts and token ids per row. Refuses to know why a row was chosen (planner) or what a block holds (blocks).

How a row's tokens lie, half-open from position 0:

    [0, num_computed)              in the KV cache, confirmed by a result
    [num_computed, num_scheduled)  planned, result outstanding: an upper bound, since drafts among them may be refused;
                                   each result lowers it by what was, and with no plan in flight it is num_computed
    [0, num_known)                 token ids known here: prompt, output of earlier attempts, confirmed output
    [0, target)                    known at placement: while num_scheduled < target the row prefills, afterwards it
                                   decodes, one token and its drafts per step, fed by the step before on the device
    [0, limit)                     all that is ever computed: the last output token never needs to be
    [0, num_slots)                 covered by the block table: what refused drafts leave serves the next tokens
"""

from collections.abc import Callable
from copy import copy

import numpy as np
import numpy.typing as npt

from paceline.plan.hashes import rolling_hashes
from paceline.plan.values import Int32Array, LogprobColumns
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.outputs import DraftCounts

RowIndex = npt.NDArray[np.intp]

_MIN_TOKEN_WIDTH = 256
NOT_WHILE_RUNNING = np.iinfo(np.int32).max


# numpy compares a column with an enum's member ten times slower.
FREE = 0
RUNNING = 1
ENDING = 2  # goes out with the next plan
LEAVING = 3  # its confirmation is awaited


class RowColumns:
    """Element i of each column belongs to row i."""

    def __init__(self, num_rows: int, max_model_len: int, max_drafts: int = 0) -> None:
        self.state = np.zeros(num_rows, dtype=np.uint8)
        self.ended = np.zeros(num_rows, dtype=np.bool_)  # nothing more of it is delivered
        self.num_prompt = np.zeros(num_rows, dtype=np.int32)
        self.num_known = np.zeros(num_rows, dtype=np.int32)
        self.num_scheduled = np.zeros(num_rows, dtype=np.int32)
        self.num_computed = np.zeros(num_rows, dtype=np.int32)
        self.target = np.zeros(num_rows, dtype=np.int32)
        self.limit = np.zeros(num_rows, dtype=np.int32)
        self.max_drafts = np.zeros(num_rows, dtype=np.int32)  # of each step in which the row decodes
        self.num_verified = np.zeros(num_rows, dtype=np.int32)  # drafts of its request, wherever it ran
        self.num_drafts_accepted = np.zeros(num_rows, dtype=np.int32)  # of these
        self.num_slots = np.zeros(num_rows, dtype=np.int32)
        self.num_tagged_blocks = np.zeros(num_rows, dtype=np.int32)  # from the beginning of the table
        self.tag_at = np.zeros(num_rows, dtype=np.int32)  # computed tokens that fill the next prompt block
        self.attempt = np.zeros(num_rows, dtype=np.int32)
        self.last_turn = np.zeros(num_rows, dtype=np.int64)  # counts all turns of all rows
        self.handle = np.zeros(num_rows, dtype=np.int64)
        self.urgency = np.zeros(num_rows, dtype=np.float64)
        self.arrival_number = np.zeros(num_rows, dtype=np.int64)
        self.output_hash = np.zeros(num_rows, dtype=np.uint64)
        self.token_s = np.full(num_rows, np.nan)  # of the newest token; NaN: none
        self.live: list[LiveRequest | None] = [None] * num_rows
        self.num_of_tenant: dict[str, int] = {}
        self.tables: list[list[int]] = [[] for _ in range(num_rows)]
        self.without_token: set[int] = set()
        # Of prompts being computed.
        self.prompt_logprobs: dict[int, list[LogprobColumns]] = {}
        self._max_drafts = max_drafts
        self._max_width = max_model_len + 1
        self._token_ids = np.zeros((num_rows, min(_MIN_TOKEN_WIDTH, self._max_width)), dtype=np.int32)
        self._most_known = 0
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free_rows)

    @property
    def num_running(self) -> int:
        return int(np.count_nonzero(self.state == RUNNING))

    def running(self) -> RowIndex:
        return _indices(self.state == RUNNING)

    def free_rows(self, count: int) -> list[int]:
        return self._free_rows[: -count - 1 : -1]

    def decoding_and_prefilling(self) -> tuple[RowIndex, RowIndex]:
        """Returns ascending rows that can compute their next token, and those with known tokens left, the most urgent
        first.
        """
        running, is_behind = self.state == RUNNING, self.num_scheduled < self.target
        prefilling = _indices(running & is_behind)
        if len(prefilling) > 1:
            prefilling = self.by_urgency(prefilling)
        return _indices(running & ~is_behind & (self.num_scheduled < self.limit)), prefilling

    def by_urgency(self, index: RowIndex) -> RowIndex:
        ordered: RowIndex = index[np.lexsort((self.arrival_number[index], self.urgency[index]))]
        return ordered

    def occupy(self, row: int, live: LiveRequest, known: Int32Array, num_cached: int, max_tokens: int) -> None:
        """`known` are prompt and output so far, of which `num_cached` are computed."""
        if row == self._free_rows[-1]:
            self._free_rows.pop()
        else:
            self._free_rows.remove(row)
        num_prompt = live.num_prompt_tokens
        self.state[row] = ENDING if live.is_orphan else RUNNING
        self.ended[row] = live.is_orphan
        self.num_prompt[row] = num_prompt
        self.num_known[row] = self.target[row] = len(known)
        self.num_scheduled[row] = self.num_computed[row] = num_cached
        self.limit[row] = num_prompt + max_tokens - 1
        wanted = live.request.max_num_draft_tokens
        self.max_drafts[row] = self._max_drafts if wanted is None else min(wanted, self._max_drafts)
        drafts = live.output.drafts
        self.num_verified[row], self.num_drafts_accepted[row] = drafts.num_verified, drafts.num_accepted
        self.attempt[row] = live.attempt
        self.last_turn[row] = 0
        self.handle[row] = live.request.handle
        self.urgency[row], self.arrival_number[row] = live.queue_key
        self.output_hash[row] = live.output.rolling_hash
        self.token_s[row] = np.nan if live.phases.token_s is None else live.phases.token_s
        self.live[row] = live
        self._count(live, 1)
        self.without_token.add(row)
        self._most_known = max(self._most_known, len(known))
        self._widen(len(known) + 1)
        self._token_ids[row, : len(known)] = known

    def vacate(self, row: int) -> None:
        live = self.live[row]
        assert live is not None, "an occupied row has a request"
        self._count(live, -1)
        self.state[row] = FREE
        self.live[row] = None
        self.without_token.discard(row)
        self.prompt_logprobs.pop(row, None)
        self._free_rows.append(row)

    def _count(self, live: LiveRequest, number: int) -> None:
        tenant = live.request.key.tenant
        count = self.num_of_tenant.get(tenant, 0) + number
        if count:
            self.num_of_tenant[tenant] = count
        else:
            del self.num_of_tenant[tenant]

    def set_table(self, row: int, blocks: list[int], block_size: int, num_tagged: int) -> None:
        self.tables[row] = blocks
        self.num_slots[row] = len(blocks) * block_size
        self.set_tagged(row, num_tagged, block_size)

    def set_tagged(self, row: int, num_blocks: int, block_size: int) -> None:
        """The output's blocks follow when it ends."""
        self.num_tagged_blocks[row] = num_blocks
        next_end = (num_blocks + 1) * block_size
        self.tag_at[row] = next_end if next_end <= self.target[row] else NOT_WHILE_RUNNING

    def append(self, rows: RowIndex, token_ids: Int32Array) -> None:
        """`rows` are distinct; each gets one token."""
        positions = self.num_known[rows]
        self._most_known += 1
        if self._most_known > self._token_ids.shape[1]:  # the longest may have left its row
            self._most_known = int(self.num_known[self.state != FREE].max(initial=0)) + 1
            self._widen(self._most_known)
        self._token_ids[rows, positions] = token_ids
        self.num_known[rows] = positions + 1
        self.output_hash[rows] = rolling_hashes(self.output_hash[rows], token_ids)

    def token_ids(self, row: int) -> Int32Array:
        """Returns a view that the next step may change."""
        return self._token_ids[row, : self.num_known[row]]

    def with_tokens(self, other: Callable[[Int32Array], Int32Array]) -> "RowColumns":
        """Return a copy that has as many other tokens in each row in use, and shares all the rest."""
        token_ids = np.zeros_like(self._token_ids)
        for row in np.flatnonzero(self.state != FREE).tolist():
            token_ids[row, : self.num_known[row]] = other(self.token_ids(row))
        copied = copy(self)
        vars(copied)["_token_ids"] = token_ids
        return copied

    def output_token_ids(self, row: int) -> Int32Array:
        return self._token_ids[row, self.num_prompt[row] : self.num_known[row]].copy()

    def num_output(self, row: int) -> int:
        return int(self.num_known[row] - self.num_prompt[row])

    def drafts(self, row: int) -> DraftCounts:
        return DraftCounts(int(self.num_verified[row]), int(self.num_drafts_accepted[row]))

    def _widen(self, width: int) -> None:
        """Doubles, so that memory follows the longest context."""
        current = self._token_ids.shape[1]
        if width <= current:
            return
        assert width <= self._max_width, "no row outgrows the context"
        wider = np.zeros((len(self.state), min(max(width, 2 * current), self._max_width)), dtype=np.int32)
        wider[:, :current] = self._token_ids
        self._token_ids = wider


def _indices(mask: npt.NDArray[np.bool_]) -> RowIndex:
    indices: RowIndex = mask.nonzero()[0]
    return indices

"""Which request is on which row, and what is kept of it beside the columns.

Knows how rows are shown to others. Refuses to know what may be placed or released.
"""

import numpy as np

from paceline.plan.values import NewRequest, RecordId, Release, RowFinish, RowState
from paceline_executor.rows.block_tables import BlockTables
from paceline_executor.rows.columns import RowArrays
from paceline_executor.rows.forms import FormMasker, RowForm
from paceline_executor.rows.logprobs import LogprobLog
from paceline_executor.rows.rules import rules_of
from paceline_executor.runner.interface import Int32Array
from paceline_executor.runner.row_rules import RowRules


class Occupants:
    """Includes those that a step in flight releases."""

    def __init__(self, columns: RowArrays, block_tables: BlockTables, forms: FormMasker | None) -> None:
        self._columns = columns
        self._block_tables = block_tables
        self._forms = forms
        self._placements: dict[int, NewRequest] = {}  # by row
        self._rows: dict[RecordId, int] = {}  # of requests that no launched step releases
        self.logprobs: dict[int, LogprobLog] = {}  # by row, where asked
        self.rules: dict[int, RowRules] = {}  # by row, where any
        self.forms: dict[int, RowForm] = {}  # by row, where any

    def __len__(self) -> int:
        return len(self._placements)

    def id_on(self, row: int) -> RecordId | None:
        placement = self._placements.get(row)
        return None if placement is None else placement.record_id

    def placement_on(self, row: int) -> NewRequest | None:
        return self._placements.get(row)

    def row_of(self, record_id: RecordId) -> int | None:
        return self._rows.get(record_id)

    def num_output(self, row: int, num_known: Int32Array) -> int:
        if num_known[row] == 0:  # a placement that failed
            return int(self._placements[row].output_token_ids.size)
        return int(num_known[row] - self._columns.num_prompt[row])

    def occupy(self, placement: NewRequest) -> None:
        self._placements[placement.row] = placement
        self._rows[placement.record_id] = placement.row

    def begin_state(self, placement: NewRequest, num_top: int | None, before: RowState | None) -> None:
        """`num_top` log-probabilities each. before: what is known of the former attempt."""
        rules = rules_of(placement)
        if rules is not None:
            self.rules[placement.row] = rules
        if placement.structured and self._forms is not None:
            self.forms[placement.row] = self._forms.begin(placement)
        if num_top is not None:
            self.logprobs[placement.row] = _log_of(placement, num_top, before)

    def release(self, row: int) -> None:
        """It may be placed elsewhere; its state stays until the row is free."""
        del self._rows[self._placements[row].record_id]

    def place_again(self, row: int) -> None:
        self._rows[self._placements[row].record_id] = row

    def vacate(self, row: int) -> None:
        self._columns.clear(row)
        self.logprobs.pop(row, None)
        self.rules.pop(row, None)
        self.forms.pop(row, None)
        del self._placements[row]

    def remove(self, row: int) -> None:
        self.release(row)
        self.vacate(row)

    def states(self) -> tuple[RowState, ...]:
        return tuple(self._state(row) for row in sorted(self._placements))

    def record_of(self, release: Release) -> RowState:
        state = self._state(release.row)
        num_output = state.output_token_ids.size if release.final is None else release.final.num_output_tokens
        return RowState(
            record_id=state.record_id,
            row=None,
            attempt=state.attempt,
            prompt_token_ids=state.prompt_token_ids,
            output_token_ids=state.output_token_ids[:num_output].copy(),
            num_computed_tokens=0,
            block_ids=state.block_ids[:0],
            finish=state.finish,
            released=release.final,
            max_tokens=state.max_tokens,
            sampling=state.sampling,
            end_token_ids=state.end_token_ids,
            context=state.context,
            logprobs=None if state.logprobs is None else state.logprobs.up_to(num_output),
        )

    def _state(self, row: int) -> RowState:
        columns, placement = self._columns, self._placements[row]
        output = columns.output_of(row).copy()
        is_failed_placement = columns.num_known[row] == 0
        logprobs = self.logprobs.get(row)
        return RowState(
            record_id=placement.record_id,
            row=row,
            attempt=placement.attempt,
            prompt_token_ids=placement.prompt_token_ids,
            output_token_ids=placement.output_token_ids if is_failed_placement else output,
            num_computed_tokens=int(columns.num_computed[row]),
            block_ids=self._block_tables.blocks_of(row),
            finish=RowFinish(int(columns.finish[row])),
            released=None,
            max_tokens=placement.max_tokens,
            sampling=placement.sampling,
            end_token_ids=placement.end_token_ids,
            context=placement.context,
            logprobs=None if logprobs is None else logprobs.columns(),
        )


def _log_of(placement: NewRequest, num_top: int, before: RowState | None) -> LogprobLog:
    """Has those of the output so far if the former attempt's record has them."""
    num_output = placement.output_token_ids.size
    if before is None or before.logprobs is None or before.logprobs.num_top != num_top:
        return LogprobLog(num_output, num_top)
    goes_on = np.array_equal(before.prompt_token_ids, placement.prompt_token_ids) and np.array_equal(
        before.output_token_ids[:num_output], placement.output_token_ids
    )
    return LogprobLog.continuing(before.logprobs.up_to(num_output)) if goes_on else LogprobLog(num_output, num_top)

"""The rules of rows on a device, as its kernels take them: all rows' lists one after another.

They are packed anew when rules have come or gone, which is rare beside steps.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline_executor.runner.interface import Int32Array, RowDescriptions
from paceline_executor.runner.row_rules import NO_TOKENS, RowRules
from paceline_kernels.sampling import PENALTIES, RuleTable, TokenLists

_Upload = Callable[[npt.NDArray[np.generic]], torch.Tensor]


class KeptRules:
    """Keeps them both here and on the device."""

    def __init__(self, num_rows: int, upload: _Upload) -> None:
        self._num_rows = num_rows
        self._upload = upload
        self._rules: dict[int, RowRules] = {}
        self._packed: RuleTable | None = None

    def tell(self, described: RowDescriptions) -> None:
        for row, rules in zip(described.rows.tolist(), described.rules, strict=True):
            if rules is None and row not in self._rules:
                continue
            self._rules.pop(row, None)
            if rules is not None:
                self._rules[row] = rules
            self._packed = None

    def of(self, rows: Iterable[int]) -> RuleTable | None:
        """None if these rows have none."""
        if not self._rules or self._rules.keys().isdisjoint(rows):
            return None
        if self._packed is None:
            self._packed = self._pack()
        return self._packed

    def _pack(self) -> RuleTable:
        rows = [self._rules.get(row) for row in range(self._num_rows)]
        words = [() if rules is None else rules.words for rules in rows]
        lists = [np.array(word, dtype=np.int32) for of_row in words for word in of_row]
        biases = [rules.biases for rules in rows if rules is not None]
        penalties = {name: self._penalty(rows, name, neutral) for name, neutral in PENALTIES.items()}
        return RuleTable(
            allowed=self._lists([NO_TOKENS if rules is None else rules.allowed for rules in rows]),
            biased=self._lists([NO_TOKENS if rules is None else rules.biased for rules in rows]),
            biases=self._upload(np.concatenate(biases)),
            min_tokens=self._upload(np.array([0 if one is None else one.min_tokens for one in rows], dtype=np.int32)),
            withheld=self._lists([NO_TOKENS if rules is None else rules.end_token_ids for rules in rows]),
            words=self._lists(lists),
            cu_words=self._upload(np.cumsum([0, *map(len, words)], dtype=np.int32)),
            **penalties,
        )

    def _penalty(self, rows: Sequence[RowRules | None], name: str, neutral: float) -> torch.Tensor:
        values = [neutral if rules is None else getattr(rules, name) for rules in rows]
        return self._upload(np.array(values, dtype=np.float32))

    def _lists(self, lists: Sequence[Int32Array]) -> TokenLists:
        cu_lens = np.cumsum([0, *(one.size for one in lists)], dtype=np.int32)
        return TokenLists(self._upload(cu_lens), self._upload(np.concatenate(lists) if lists else NO_TOKENS))

"""Log-probabilities of a row's output, kept as long as its tokens: the next scheduler may have to deliver them.

Refuses to know requests and rows. A token takes 4 bytes and 8 more per alternative, at most 164, and its KV slot a
hundred times that.
"""

from array import array

import numpy as np

from paceline.plan.values import LogprobColumns


class LogprobLog:
    """Of one row; memory follows the length of the output."""

    def __init__(self, offset: int, num_top: int) -> None:
        self._offset = offset
        self._num_top = num_top
        self._logprobs = array("f")
        self._top_token_ids = array("i")
        self._top_logprobs = array("f")

    @classmethod
    def continuing(cls, before: LogprobColumns) -> "LogprobLog":
        """The log begins with the known output."""
        log = cls(before.offset, before.num_top)
        log.append(before)
        return log

    @property
    def num_top(self) -> int:
        return self._num_top

    def append(self, values: LogprobColumns) -> None:
        self._logprobs.frombytes(values.logprobs.tobytes())
        self._top_token_ids.frombytes(values.top_token_ids.tobytes())
        self._top_logprobs.frombytes(values.top_logprobs.tobytes())

    def __len__(self) -> int:
        return len(self._logprobs)

    def cut(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens`."""
        del self._logprobs[num_tokens:]
        del self._top_token_ids[num_tokens * self._num_top :]
        del self._top_logprobs[num_tokens * self._num_top :]

    def columns(self) -> LogprobColumns:
        """Returns a copy."""
        num_tokens = len(self._logprobs)
        return LogprobColumns(
            offset=self._offset,
            logprobs=np.array(self._logprobs, dtype=np.float32),
            top_token_ids=np.array(self._top_token_ids, dtype=np.int32).reshape(num_tokens, self._num_top),
            top_logprobs=np.array(self._top_logprobs, dtype=np.float32).reshape(num_tokens, self._num_top),
        )

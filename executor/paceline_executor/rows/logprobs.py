"""Log-probabilities of a row's output, kept as long as its tokens: the next scheduler may have to deliver them.

Knows columns of numbers and the output offset at which they begin. It refuses to know requests and rows: `table` says
who asked. A token takes 4 bytes and 8 more per alternative, at most 164, and its KV slot takes a hundred times that.
"""

from array import array
from dataclasses import dataclass

import numpy as np

from paceline_executor.runner.interface import Float32Array, Int32Array, TokenLogprobs


@dataclass(frozen=True, slots=True)
class OutputLogprobs:
    """Of output tokens that follow one another; the first is token `offset` of the output."""

    offset: int
    logprobs: Float32Array  # [num_tokens]
    top_token_ids: Int32Array  # [num_tokens, num_top], best first
    top_logprobs: Float32Array  # [num_tokens, num_top]

    @property
    def num_tokens(self) -> int:
        """How many tokens these are of."""
        return self.logprobs.size

    @property
    def num_top(self) -> int:
        """How many alternatives stand beside each token."""
        return int(self.top_token_ids.shape[1])

    @property
    def bytes_per_token(self) -> int:
        """What one token takes."""
        return 4 + 8 * self.num_top

    @property
    def nbytes(self) -> int:
        """What all of them take."""
        return self.num_tokens * self.bytes_per_token

    def up_to(self, num_output_tokens: int) -> "OutputLogprobs":
        """A copy of what belongs to the first `num_output_tokens` tokens of the output."""
        kept = slice(0, max(0, num_output_tokens - self.offset))
        return OutputLogprobs(
            offset=min(self.offset, num_output_tokens),
            logprobs=self.logprobs[kept].copy(),
            top_token_ids=self.top_token_ids[kept].copy(),
            top_logprobs=self.top_logprobs[kept].copy(),
        )

    def split(self, num_tokens: int) -> tuple["OutputLogprobs", "OutputLogprobs"]:
        """Views of the first `num_tokens` tokens and of the rest."""
        num_tokens = min(num_tokens, self.num_tokens)
        head, tail = slice(0, num_tokens), slice(num_tokens, None)
        return (
            OutputLogprobs(self.offset, self.logprobs[head], self.top_token_ids[head], self.top_logprobs[head]),
            OutputLogprobs(
                self.offset + num_tokens, self.logprobs[tail], self.top_token_ids[tail], self.top_logprobs[tail]
            ),
        )


class LogprobLog:
    """Those of one row, one token after another; memory follows the length of the output."""

    def __init__(self, offset: int, num_top: int) -> None:
        self._offset = offset
        self._num_top = num_top
        self._logprobs = array("f")
        self._top_token_ids = array("i")
        self._top_logprobs = array("f")

    @classmethod
    def going_on(cls, before: OutputLogprobs) -> "LogprobLog":
        """One that begins with what is known of the output already."""
        log = cls(before.offset, before.num_top)
        log._logprobs.extend(before.logprobs.tolist())
        log._top_token_ids.extend(before.top_token_ids.ravel().tolist())
        log._top_logprobs.extend(before.top_logprobs.ravel().tolist())
        return log

    def append(self, values: TokenLogprobs) -> None:
        """Take those of the next token, which have passed `check`."""
        self._logprobs.append(values.chosen)
        self._top_token_ids.extend(values.top_token_ids)
        self._top_logprobs.extend(values.top_logprobs)

    def __len__(self) -> int:
        return len(self._logprobs)

    def cut(self, num_tokens: int) -> None:
        """Drop what belongs to tokens after the first `num_tokens` of these."""
        del self._logprobs[num_tokens:]
        del self._top_token_ids[num_tokens * self._num_top :]
        del self._top_logprobs[num_tokens * self._num_top :]

    def check(self, values: TokenLogprobs) -> None:
        """Raise ValueError unless there are as many alternatives as were asked for."""
        if not len(values.top_token_ids) == len(values.top_logprobs) == self._num_top:
            raise ValueError(f"{self._num_top} alternatives were asked for and {len(values.top_token_ids)} came")

    def columns(self) -> OutputLogprobs:
        """A copy of all of them."""
        num_tokens = len(self._logprobs)
        return OutputLogprobs(
            offset=self._offset,
            logprobs=np.array(self._logprobs, dtype=np.float32),
            top_token_ids=np.array(self._top_token_ids, dtype=np.int32).reshape(num_tokens, self._num_top),
            top_logprobs=np.array(self._top_logprobs, dtype=np.float32).reshape(num_tokens, self._num_top),
        )

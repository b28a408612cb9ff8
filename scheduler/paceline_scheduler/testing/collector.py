"""What a client of the core would see: outputs gathered by handle, checked for gaps and doubles as they come."""

import numpy as np

from paceline_scheduler.core.logprobs import TokenLogprobs
from paceline_scheduler.core.outputs import OUTPUT_HASH_START, FinishNotice, Outputs, TokenOutputs, fold_output_hash
from paceline_scheduler.errors import RequestFailedError


class OutputCollector:
    """An OutputSink that keeps everything; every attribute is by handle."""

    def __init__(self) -> None:
        self.token_ids: dict[int, list[int]] = {}
        self.finishes: dict[int, FinishNotice] = {}
        self.failures: dict[int, RequestFailedError] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        self.attempts: dict[int, int] = {}
        self._hashes: dict[int, int] = {}

    def deliver(self, outputs: Outputs) -> None:
        """Take outputs in; a gap, a double, a wrong rolling hash or a token after the end is an AssertionError."""
        for tokens in outputs.tokens:
            self._take(tokens)
        for failure in outputs.failures:
            self._require_running(failure.handle)
            self.failures[failure.handle] = failure.error

    @property
    def ended(self) -> set[int]:
        """The handles that finished or failed."""
        return self.finishes.keys() | self.failures.keys()

    def _take(self, outputs: TokenOutputs) -> None:
        start = 0
        for index, handle in enumerate(outputs.handles):
            self._require_running(handle)
            end = start + int(outputs.num_tokens[index])
            known = self.token_ids.setdefault(handle, [])
            if handle in outputs.prompt_logprobs:
                assert not known, f"handle {handle}: the prompt's log-probabilities come with the first token"
                self.prompt_logprobs[handle] = outputs.prompt_logprobs[handle]
            assert int(outputs.offsets[index]) == len(known), f"handle {handle}: a gap or a doubled token"
            new = outputs.token_ids[start:end].tolist()
            known.extend(new)
            start = end
            self._check_hash(handle, new, int(outputs.rolling_hashes[index]))
            attempt = int(outputs.attempts[index])
            assert attempt >= self.attempts.get(handle, 0), f"handle {handle}: an older attempt spoke"
            self.attempts[handle] = attempt
            if handle in outputs.finishes:
                self.finishes[handle] = outputs.finishes[handle]
                assert self.finishes[handle].num_output_tokens == len(known), f"handle {handle}: the end miscounts"
        for handle, logprobs in outputs.logprobs.items():
            self.logprobs.setdefault(handle, []).extend(logprobs)

    def _check_hash(self, handle: int, new: list[int], claimed: int) -> None:
        value = np.array([self._hashes.get(handle, OUTPUT_HASH_START)], dtype=np.uint64)
        for token in new:
            value = fold_output_hash(value, np.array([token], dtype=np.int32))
        self._hashes[handle] = int(value[0])
        assert claimed == self._hashes[handle], f"handle {handle}: the rolling hash is another one"

    def _require_running(self, handle: int) -> None:
        assert handle not in self.ended, f"handle {handle} had ended"

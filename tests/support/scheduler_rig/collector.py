"""What a client of the core would see: outputs gathered by handle, checked for gaps and doubles as they come."""

from collections.abc import Sequence

import numpy as np

from paceline.plan.hashes import HASH_START, rolling_hash, rolling_hashes
from paceline.plan.values import TokenLogprobs
from paceline_scheduler.core.outputs import Failure, FinishNotice, TokenOutputs
from paceline_scheduler.errors import RequestFailedError


class OutputCollector:
    """Every attribute is by handle."""

    def __init__(self) -> None:
        self.token_ids: dict[int, list[int]] = {}
        self.finishes: dict[int, FinishNotice] = {}
        self.failures: dict[int, RequestFailedError] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        self.attempts: dict[int, int] = {}
        self._hashes: dict[int, int] = {}
        self._closed: set[int] = set()

    def close(self, handle: int) -> None:
        self._closed.add(handle)

    def open(self, handle: int) -> None:
        self._closed.discard(handle)

    def _is_deaf(self, handle: int) -> bool:
        return handle < 0 or handle in self._closed  # below 0: the core's own, nobody listens

    def deliver(self, tokens: Sequence[TokenOutputs], failures: Sequence[Failure]) -> None:
        """A gap, a double, a wrong rolling hash or a token after the end is an AssertionError."""
        for batch in tokens:
            self._take(batch)
        for failure in failures:
            if self._is_deaf(failure.handle):
                continue
            self._require_running(failure.handle)
            self.failures[failure.handle] = failure.error

    @property
    def ended(self) -> set[int]:
        return self.finishes.keys() | self.failures.keys()

    def forget_after(self, handle: int, num_tokens: int) -> None:
        """Let the client have only so many tokens of an output, and not its end."""
        self.finishes.pop(handle, None)
        held = self.token_ids[handle] = self.token_ids[handle][:num_tokens]
        self._hashes[handle] = HASH_START
        self._check_hash(handle, held, rolling_hash(HASH_START, np.array(held, dtype=np.int32)))

    def _take(self, outputs: TokenOutputs) -> None:
        start = 0
        for index, handle in enumerate(outputs.handles):
            end = start + int(outputs.num_tokens[index])
            if self._is_deaf(handle):
                start = end
                continue
            self._require_running(handle)
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
            if self._is_deaf(handle):
                continue
            self.logprobs.setdefault(handle, []).extend(logprobs)

    def _check_hash(self, handle: int, new: list[int], claimed: int) -> None:
        value = np.array([self._hashes.get(handle, HASH_START)], dtype=np.uint64)
        for token in new:
            value = rolling_hashes(value, np.array([token], dtype=np.int32))
        self._hashes[handle] = int(value[0])
        assert claimed == self._hashes[handle], f"handle {handle}: the rolling hash is another one"

    def _require_running(self, handle: int) -> None:
        assert handle not in self.ended, f"handle {handle} had ended"

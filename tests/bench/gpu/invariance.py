"""Whether a stream's bits depend on anything but itself: batch mates, chunks, graphs, preemption, another scheduler.

Knows the ways to run the same streams. In batch-invariant mode all of them must give the same tokens and the same
log-probabilities, bit for bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

from gpu.equality import limits_of, prompts_of
from gpu.errors import CheckFailedError
from gpu.feed import Feed, Stream
from gpu.rigs import Place, make_rig, random_model
from paceline.plan.values import SamplingParams
from paceline_executor.testing.models import TINY_CONFIG
from paceline_executor.testing.plans import GREEDY
from paceline_executor.weights.checkpoint import ModelConfig
from paceline_kernels.attention import Splits

# Large enough for every product and every way to attend that full sizes have.
_GPU_CONFIG = replace(
    TINY_CONFIG, num_layers=3, hidden_size=1024, intermediate_size=2816, num_heads=8, head_dim=128, vocab_size=8192
)
_NUM_ROWS = 32
_NUM_MATES = 24
_MAX_TOKENS = 512
_SAMPLINGS = (GREEDY, SamplingParams(temperature=0.9, seed=3, top_p=0.9), SamplingParams(temperature=0.7, seed=2**63))
_NUM_TOP = 4

_Bits = list[tuple[list[int], bytes]]


class Variants:
    """Streams that have run by themselves, to be run again in other ways. `NAMES` are these."""

    NAMES: ClassVar[tuple[str, ...]] = (
        "with batch mates",
        "in small chunks",
        "in uneven chunks",
        "without graphs",
        "preempted",
        "taken over",
    )

    def __init__(self, place: Place, numbers: str, num_tokens: int) -> None:
        config: ModelConfig = _GPU_CONFIG if place.is_cuda else TINY_CONFIG
        lengths = (300, 70, 500) if place.is_cuda else (30, 7, 45)
        self._num_tokens = num_tokens
        self._numerics = place.numerics[numbers]
        self._limits = limits_of(config, _NUM_ROWS, max(lengths) + num_tokens, _MAX_TOKENS if place.is_cuda else 64)
        self._model = random_model(place, config, self._numerics, self._limits.max_model_len)
        self._place, self._config = place, config
        self._prompts = prompts_of(config, lengths)
        self._mates = prompts_of(config, [1 + 5 * index % max(lengths) for index in range(_NUM_MATES)], seed=1)
        self._feed = self._make_feed(is_captured=True)
        self._alone = self._one_by_one()
        self._ways: Mapping[str, Callable[[], _Bits]] = dict(
            zip(
                self.NAMES,
                (
                    self._with_mates,
                    lambda: self._in_chunks(16),
                    lambda: self._in_chunks(23),
                    lambda: self._together(self._make_feed(is_captured=False)),
                    self._preempted,
                    self._taken_over,
                ),
                strict=True,
            )
        )

    @property
    def num_values(self) -> int:
        """How many tokens and log-probabilities are compared."""
        return sum(len(tokens) + len(numbers) // 4 for tokens, numbers in self._alone)

    def compare(self, name: str) -> str:
        """Run the streams in another way. Raises CheckFailedError."""
        try:
            found = self._ways[name]()
        except Exception:
            self._feed = self._make_feed(is_captured=True)  # whatever is still in the old one's rows
            raise
        for index, (expected, got) in enumerate(zip(self._alone, found, strict=True)):
            if expected[0] != got[0]:
                raise CheckFailedError(f"stream {index} has the tokens {got[0]}, not {expected[0]}")
            if expected[1] != got[1]:
                raise CheckFailedError(f"stream {index} has the same tokens, and other log-probabilities")
        return f"{len(found)} streams"

    def _make_feed(self, *, is_captured: bool) -> Feed:
        rig = make_rig(
            self._place,
            self._model,
            self._config,
            self._limits,
            self._numerics,
            splits=Splits.FIXED,
            is_captured=is_captured,
        )
        return Feed(rig.engine, self._limits)

    def _add(self, feed: Feed, index: int, max_chunk: int | None = None) -> Stream:
        sampling = _SAMPLINGS[index % len(_SAMPLINGS)]
        prompt = self._prompts[index]
        return feed.add(prompt, self._num_tokens, sampling, num_logprobs=_NUM_TOP, max_chunk=max_chunk)

    def _one_by_one(self) -> _Bits:
        bits = []
        for index in range(len(self._prompts)):
            stream = self._add(self._feed, index)
            self._feed.run()
            bits.append(_bits_of(stream))
        return bits

    def _together(self, feed: Feed) -> _Bits:
        streams = [self._add(feed, index) for index in range(len(self._prompts))]
        feed.run()
        return [_bits_of(stream) for stream in streams]

    def _with_mates(self) -> _Bits:
        """Mates come and go, and have prompts of their own between the streams' tokens."""
        for index, mate in enumerate(self._mates):
            self._feed.add(mate, 2 + index % self._num_tokens)
        return self._together(self._feed)

    def _in_chunks(self, max_chunk: int) -> _Bits:
        streams = [self._add(self._feed, index, max_chunk) for index in range(len(self._prompts))]
        self._feed.run()
        return [_bits_of(stream) for stream in streams]

    def _preempted(self) -> _Bits:
        """Each in the middle of its output, computed again from its first token on."""
        streams = [self._add(self._feed, index) for index in range(len(self._prompts))]
        self._feed.run(until=lambda: all(len(one.output) > self._num_tokens // 2 for one in streams))
        for stream in streams:
            stream.is_preempted = not stream.is_done
        self._feed.run()
        return [_bits_of(stream) for stream in streams]

    def _taken_over(self) -> _Bits:
        streams = [self._add(self._feed, index) for index in range(len(self._prompts))]
        self._feed.run(until=lambda: all(len(one.output) > self._num_tokens // 2 for one in streams))
        self._feed.take_over()
        self._feed.run()
        return [_bits_of(stream) for stream in streams]


def _bits_of(stream: Stream) -> tuple[list[int], bytes]:
    columns = [told.columns for told in stream.logprobs]
    numbers = [column.tobytes() for one in columns for column in (one.logprobs, one.top_token_ids, one.top_logprobs)]
    return stream.output, b"".join(numbers)

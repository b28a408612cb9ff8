"""Whether a stream's bits depend on anything but itself: batch mates, chunks, graphs, preemption, another scheduler.

Knows the ways to run the same streams. In batch-invariant mode all of them must give the same tokens and the same
log-probabilities, bit for bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from executor_rig.plans import GREEDY
from gpu.errors import CheckFailedError
from gpu.feed import Feed, Stream, limits_of, prompts_of
from gpu.rigs import EXPERTS, Place, make_feed, random_model
from paceline.plan.sampling import SamplingParams
from paceline_executor.weights.checkpoint import Mixture
from paceline_kernels.attention import Splits
from paceline_kernels.routing import Routing
from random_models import MIXTURE_CONFIGS, TINY_CONFIG

# Large enough for every product and every way to attend that full sizes have.
_GPU_CONFIG = replace(
    TINY_CONFIG, num_layers=3, hidden_size=1024, intermediate_size=2816, num_heads=8, head_dim=128, vocab_size=8192
)
_GPU_MIXTURE = replace(_GPU_CONFIG, qk_norm=True, experts=Mixture(Routing(32, 4), 512, (True, True, True), 512, True))
_NUM_ROWS = 32
_NUM_MATES = 24
_SAMPLINGS = (GREEDY, SamplingParams(temperature=0.9, seed=3, top_p=0.9), SamplingParams(temperature=0.7, seed=2**63))
_NUM_TOP = 4

_Bits = list[tuple[list[int], bytes]]


class Variants:
    """Streams that have run one by one, to be run again in other ways."""

    def __init__(self, place: Place, numbers: str, num_tokens: int) -> None:
        tiny, full = (MIXTURE_CONFIGS["qwen2moe"], _GPU_MIXTURE) if numbers == EXPERTS else (TINY_CONFIG, _GPU_CONFIG)
        config, lengths, max_tokens = tiny, (30, 7, 45), 64
        if place.is_cuda:
            config, lengths, max_tokens = full, (300, 70, 500), 512
        self._num_tokens = num_tokens
        limits = limits_of(config, _NUM_ROWS, max(lengths) + num_tokens, max_tokens)
        numerics = place.numerics[numbers]
        model = random_model(place, config, numbers, limits.max_model_len)
        self._make_feed = partial(make_feed, place, model, config, limits, numerics, splits=Splits.FIXED)
        self._prompts = prompts_of(config, lengths)
        self._mates = prompts_of(config, [1 + 5 * index % max(lengths) for index in range(_NUM_MATES)], seed=1)
        self._feed = self._make_feed()
        self._alone = [bits for index in range(len(lengths)) for bits in self._run([index])]
        everyone = range(len(lengths))
        self.ways: Mapping[str, Callable[[], _Bits]] = {
            "with batch mates": self._with_mates,
            "in small chunks": partial(self._run, everyone, max_chunk=16),
            "in uneven chunks": partial(self._run, everyone, max_chunk=23),
            "without graphs": self._without_graphs,
            "preempted": partial(self._run, everyone, halfway=_preempt),
            "taken over": partial(self._run, everyone, halfway=lambda _: self._feed.take_over()),
        }

    @property
    def num_values(self) -> int:
        """How many tokens and log-probabilities are compared."""
        return sum(len(tokens) + len(numbers) // 4 for tokens, numbers in self._alone)

    def compare(self, name: str) -> str:
        """Run the streams in another way. Raises CheckFailedError."""
        try:
            found = self.ways[name]()
        except Exception:
            self._feed = self._make_feed()  # whatever is still in the old one's rows
            raise
        for index, (expected, got) in enumerate(zip(self._alone, found, strict=True)):
            if expected[0] != got[0]:
                raise CheckFailedError(f"stream {index} has the tokens {got[0]}, not {expected[0]}")
            if expected[1] != got[1]:
                raise CheckFailedError(f"stream {index} has the same tokens, and other log-probabilities")
        return f"{len(found)} streams"

    def _run(
        self,
        indices: Sequence[int],
        *,
        max_chunk: int | None = None,
        halfway: Callable[[Sequence[Stream]], None] | None = None,
    ) -> _Bits:
        """Some of the streams together. halfway: what is done once each has half of its output."""
        streams = [self._add(self._feed, index, max_chunk) for index in indices]
        if halfway is not None:
            self._feed.run(until=lambda: all(len(one.output) > self._num_tokens // 2 for one in streams))
            halfway(streams)
        self._feed.run()
        return list(map(_bits_of, streams))

    def _with_mates(self) -> _Bits:
        """Mates come and go, and have prompts of their own between the streams' tokens."""
        for index, mate in enumerate(self._mates):
            self._feed.add(mate, 2 + index % self._num_tokens)
        return self._run(range(len(self._prompts)))

    def _without_graphs(self) -> _Bits:
        feed = self._make_feed(is_captured=False)
        streams = [self._add(feed, index) for index in range(len(self._prompts))]
        feed.run()
        return list(map(_bits_of, streams))

    def _add(self, feed: Feed, index: int, max_chunk: int | None = None) -> Stream:
        sampling = _SAMPLINGS[index % len(_SAMPLINGS)]
        prompt = self._prompts[index]
        return feed.add(prompt, self._num_tokens, sampling, num_logprobs=_NUM_TOP, max_chunk=max_chunk)


def _preempt(streams: Sequence[Stream]) -> None:
    """Each is computed again from its first token on."""
    for stream in streams:
        stream.is_preempted = not stream.is_done


def _bits_of(stream: Stream) -> tuple[list[int], bytes]:
    columns = [told.columns for told in stream.logprobs]
    numbers = [column.tobytes() for one in columns for column in (one.logprobs, one.top_token_ids, one.top_logprobs)]
    return stream.output, b"".join(numbers)

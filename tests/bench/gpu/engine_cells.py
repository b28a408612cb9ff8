"""The engine's side of the figures: rows and runner in this process, fed by a scheduler of a few lines.

Knows streams and landed steps. Decodes begin with contexts that are taken for computed; their numbers are random.
"""

import itertools
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from gpu.cells import (
    DECODE,
    IDLE,
    PREFILL,
    PREFILL_RATE,
    Cell,
    Kind,
    Shapes,
    gap_of,
    gap_spread_of,
    has_rules,
    mixed_of,
    rows_at,
    ruled_at,
    spread_of,
    throughput_of,
)
from gpu.errors import DoesNotFitError
from gpu.feed import Feed, Step, Stream
from gpu.report import Figure
from gpu.rigs import Rig
from paceline.plan.values import SamplingParams
from paceline_executor.weights.checkpoint import ModelConfig

_WARM_STEPS = 8
_ASKING: Mapping[str, Any] = {
    "sampling": SamplingParams(temperature=0.8, seed=1, repetition_penalty=1.1, logit_bias=((5, 1.0), (9, -1.0))),
    "num_logprobs": 5,
}
_NUM_MIXED = 16  # prompts, one after the other
_STEPS_PER_PROMPT = 4  # until the next one comes, at most
_ARRIVAL_CHUNK = 512  # tokens of a prompt that comes beside streams, in each step


@dataclass(slots=True)
class EngineCells:
    """Measures one engine, cell by cell. Every method returns its figures."""

    numbers: str
    rig: Rig
    config: ModelConfig
    shapes: Shapes
    _feed: Feed = field(init=False)
    _random: Random = field(default_factory=lambda: Random(0))  # noqa: S311  repeatable, not secret

    def __post_init__(self) -> None:
        self._feed = Feed(self.rig.engine, self.rig.limits)

    def measure(self, cell: Cell) -> list[Figure]:
        """The figures of a cell."""
        match cell.kind:
            case Kind.DECODE:
                return self.decode(cell.first, cell.second)
            case Kind.RULED:
                return self.decode(cell.first, cell.second, with_rules=True)
            case Kind.PREFILL:
                return self.prefill(cell.first)
            case Kind.ARRIVAL:
                return self.arrival(cell.first)
            case Kind.THROUGHPUT:
                return self.throughput(cell.first, cell.second)

    def decode(self, num_rows: int, context: int, *, with_rules: bool = False) -> list[Figure]:
        """The median step, and how long the device waited between steps: of its own stamps and the steps' ends.

        with_rules: a quarter of the rows have penalties and tell log-probabilities.
        """
        num_tokens = self.shapes.num_steps + _WARM_STEPS
        self._check_room(num_rows * (context + num_tokens))
        start = max(2, context - num_tokens // 2)
        for index in range(num_rows):
            asking = _ASKING if with_rules and has_rules(index) else {}
            self._feed.add(self._prompt(start), num_tokens, num_cached=start - 1, **asking)
        steps: list[Step] = []
        self._feed.run(steps.append)
        timed = [step for step in steps if step.num_rows == num_rows][_WARM_STEPS:]
        times_ms = [1e3 * (now.landed_s - then.landed_s) for then, now in itertools.pairwise(timed)]
        wall_ns = 1e9 * (timed[-1].landed_s - timed[0].landed_s)
        busy_ns = sum(step.forward_ns + step.sample_ns for step in timed[1:])
        idle = max(0.0, 100 * (1 - busy_ns / wall_ns))
        shape = ruled_at(num_rows, context) if with_rules else rows_at(num_rows, context)
        return [
            Figure(self.numbers, DECODE, shape, "ms", engine=statistics.median(times_ms)),
            Figure(self.numbers, IDLE, shape, "%", engine=idle),
        ]

    def mixed(self, num_rows: int, context: int) -> list[Figure]:
        """The median of the steps in which all rows decode and a whole prompt comes beside them."""
        num_prompt = self.shapes.mixed_prompt
        num_tokens = _STEPS_PER_PROMPT * _NUM_MIXED + _WARM_STEPS
        self._check_room(num_rows * (context + num_tokens) + 2 * num_prompt)
        streams = [self._feed.add(self._prompt(context), num_tokens, num_cached=context - 1) for _ in range(num_rows)]
        self._feed.run(until=lambda: all(len(stream.output) >= _WARM_STEPS for stream in streams))
        arriving = [self._feed.add(self._prompt(num_prompt), 1)]
        steps: list[Step] = []

        def on_step(step: Step) -> None:
            steps.append(step)
            if arriving[-1].is_done and len(arriving) < _NUM_MIXED:
                arriving.append(self._feed.add(self._prompt(num_prompt), 1))

        self._feed.run(on_step, until=lambda: len(arriving) == _NUM_MIXED and arriving[-1].is_done)
        self._end(streams)
        pairs = [pair for pair in itertools.pairwise(steps) if pair[1].num_tokens == num_rows + num_prompt]
        median = statistics.median(1e3 * (now.landed_s - then.landed_s) for then, now in pairs)
        return [Figure(self.numbers, mixed_of(num_prompt), rows_at(num_rows, context), "ms", engine=median)]

    def prefill(self, num_tokens: int) -> list[Figure]:
        """From an idle engine to the first token; the first time is not counted."""
        self._check_room(num_tokens)
        times_ms = []
        for _ in range(self.shapes.num_repeats + 1):
            self._feed.add(self._prompt(num_tokens), 1)
            landed: list[float] = []
            begun = time.perf_counter()
            self._feed.run(lambda step, landed=landed: landed.append(step.landed_s) if step.num_rows else None)  # type: ignore[misc]
            times_ms.append(1e3 * (landed[-1] - begun))
        median, shape = statistics.median(times_ms[1:]), f"tokens {num_tokens}"
        rate = flops_of(self.config, num_tokens) / median / 1e9
        return [
            Figure(self.numbers, PREFILL, shape, "ms", engine=median),
            Figure(self.numbers, PREFILL_RATE, shape, "TFLOP/s", engine=rate),
        ]

    def arrival(self, num_tokens: int) -> list[Figure]:
        """Streams decode, a prompt comes beside them in chunks: the largest gap between two of their tokens."""
        rows, context = self.shapes.arrival_rows, self.shapes.arrival_context
        num_chunks = -(-num_tokens // _ARRIVAL_CHUNK)
        self._check_room(rows * (context + num_chunks + 64) + num_tokens)
        streams = [self._feed.add(self._prompt(context), num_chunks + 64, num_cached=context - 1) for _ in range(rows)]
        self._feed.run(until=lambda: all(len(stream.output) >= _WARM_STEPS for stream in streams))
        landed = [time.perf_counter()]
        arriving = self._feed.add(self._prompt(num_tokens), 1, max_chunk=_ARRIVAL_CHUNK)
        self._feed.run(lambda step: landed.append(step.landed_s), until=lambda: arriving.is_done)
        self._end(streams)
        gaps, shape = [now - then for then, now in itertools.pairwise(landed)], rows_at(rows, context)
        return [
            Figure(self.numbers, gap_of(rows, num_tokens), shape, "ms", engine=1e3 * max(gaps)),
            Figure(self.numbers, gap_spread_of(rows, num_tokens), shape, "x", engine=spread_of(gaps)),
        ]

    def throughput(self, tokens_in: int, tokens_out: int) -> list[Figure]:
        """All requests at once, from the first launch to the last token."""
        num_requests = self.shapes.num_requests
        self._check_room(num_requests * (tokens_in + tokens_out))
        for _ in range(num_requests):
            self._feed.add(self._prompt(tokens_in), tokens_out)
        begun = time.perf_counter()
        self._feed.run()
        rate = num_requests * tokens_out / (time.perf_counter() - begun)
        shape = f"{tokens_in} in {tokens_out} out"
        return [Figure(self.numbers, throughput_of(num_requests), shape, "output tok/s", engine=rate)]

    def _end(self, streams: list[Stream]) -> None:
        """With what they have."""
        for stream in streams:
            stream.max_tokens = min(stream.max_tokens, len(stream.output))
        self._feed.run()

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(3, self.config.vocab_size) for _ in range(num_tokens)]

    def _check_room(self, num_slots: int) -> None:
        limits = self.rig.limits
        has_slots = limits.num_blocks * limits.block_size
        if num_slots + limits.num_rows * limits.block_size > has_slots:
            raise DoesNotFitError(f"{num_slots} tokens do not fit into the {has_slots} of this device's KV cache")


def flops_of(config: ModelConfig, num_tokens: int) -> float:
    """Operations of a prompt: the layers' products for each token, logits of the last one, attention to all before."""
    layers = sum(
        rows * columns
        for name, (rows, *rest) in config.tensor_shapes().items()
        if name.endswith("_proj.weight")
        for columns in rest
    )
    pairs = num_tokens * (num_tokens + 1) / 2
    attention = 4 * pairs * config.num_heads * config.head_dim * config.num_layers
    return 2.0 * layers * num_tokens + 2.0 * config.vocab_size * config.hidden_size + attention

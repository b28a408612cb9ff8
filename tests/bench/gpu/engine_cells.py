"""The engine's side of the figures: rows and runner in this process, fed by a scheduler of a few lines.

Knows streams and landed steps. Decodes begin with contexts that are taken for computed; their numbers are random.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from gpu.cells import Cell, Kind, Shapes, spread_of
from gpu.errors import DoesNotFitError
from gpu.feed import Feed, Step, idle_percent, times_ms
from gpu.report import Figure
from paceline_executor.weights.checkpoint import ModelConfig

_WARM_STEPS = 8
_NUM_MIXED = 16  # prompts, one after the other
_STEPS_PER_PROMPT = 4  # until the next one comes, at most
_ARRIVAL_CHUNK = 512  # tokens of a prompt that comes beside streams, in each step


@dataclass(slots=True)
class EngineCells:
    """Measures one engine, cell by cell. The methods of cells return values in the order of `Shapes.figures_of`."""

    numbers: str
    feed: Feed
    config: ModelConfig
    shapes: Shapes
    _random: Random = field(default_factory=lambda: Random(0))  # noqa: S311  repeatable, not secret

    def measure(self, cell: Cell) -> list[Figure]:
        measured: Mapping[Kind, Callable[..., tuple[float, ...]]] = {
            Kind.DECODE: self._decode,
            Kind.PREFILL: self._prefill,
            Kind.ARRIVAL: self._arrival,
            Kind.THROUGHPUT: self._throughput,
            Kind.MIXED: self._mixed,
        }
        values = measured[cell.kind](*cell.sizes)
        figures = zip(self.shapes.figures_of(cell), values, strict=True)
        return [Figure(self.numbers, *figure, engine=value) for figure, value in figures]

    def _decode(self, num_rows: int, context: int) -> tuple[float, ...]:
        """The median step, and how long the device waited between steps: of its own stamps and the steps' ends."""
        num_tokens = self.shapes.num_steps + _WARM_STEPS
        self._check_room(num_rows * (context + num_tokens))
        start = max(2, context - num_tokens // 2)
        for _ in range(num_rows):
            self.feed.add(self._prompt(start), num_tokens, num_cached=start - 1)
        steps: list[Step] = []
        self.feed.run(steps.append)
        timed = [step for step in steps if step.num_rows == num_rows][_WARM_STEPS:]
        return statistics.median(times_ms(timed)), idle_percent(timed)

    def _mixed(self, num_rows: int, context: int) -> tuple[float, ...]:
        """The median of the steps in which all rows decode and a whole prompt comes beside them."""
        num_prompt = self.shapes.mixed_prompt
        num_tokens = _STEPS_PER_PROMPT * _NUM_MIXED + _WARM_STEPS
        self._check_room(num_rows * (context + num_tokens) + 2 * num_prompt)
        streams = [self.feed.add(self._prompt(context), num_tokens, num_cached=context - 1) for _ in range(num_rows)]
        self.feed.run(until=lambda: all(len(stream.output) >= _WARM_STEPS for stream in streams))
        arriving = [self.feed.add(self._prompt(num_prompt), 1)]
        steps: list[Step] = []

        def on_step(step: Step) -> None:
            steps.append(step)
            if arriving[-1].is_done and len(arriving) < _NUM_MIXED:
                arriving.append(self.feed.add(self._prompt(num_prompt), 1))

        self.feed.run(on_step, until=lambda: len(arriving) == _NUM_MIXED and arriving[-1].is_done)
        self.feed.end(streams)
        pairs = [pair for pair in itertools.pairwise(steps) if pair[1].num_tokens == num_rows + num_prompt]
        return (statistics.median(1e3 * (now.landed_s - then.landed_s) for then, now in pairs),)

    def _prefill(self, num_tokens: int) -> tuple[float, ...]:
        """From an idle engine to the first token; the first time is not counted."""
        self._check_room(num_tokens)
        first_ms = []
        for _ in range(self.shapes.num_repeats + 1):
            self.feed.add(self._prompt(num_tokens), 1)
            landed: list[float] = []
            begun = time.perf_counter()
            self.feed.run(lambda step, landed=landed: landed.append(step.landed_s) if step.num_rows else None)  # type: ignore[misc]
            first_ms.append(1e3 * (landed[-1] - begun))
        median = statistics.median(first_ms[1:])
        return median, flops_of(self.config, num_tokens) / median / 1e9

    def _arrival(self, num_tokens: int) -> tuple[float, ...]:
        """Streams decode, a prompt comes beside them in chunks: the largest gap between two of their tokens."""
        rows, context = self.shapes.arrival_rows, self.shapes.arrival_context
        num_chunks = -(-num_tokens // _ARRIVAL_CHUNK)
        self._check_room(rows * (context + num_chunks + 64) + num_tokens)
        streams = [self.feed.add(self._prompt(context), num_chunks + 64, num_cached=context - 1) for _ in range(rows)]
        self.feed.run(until=lambda: all(len(stream.output) >= _WARM_STEPS for stream in streams))
        landed = [time.perf_counter()]
        arriving = self.feed.add(self._prompt(num_tokens), 1, max_chunk=_ARRIVAL_CHUNK)
        self.feed.run(lambda step: landed.append(step.landed_s), until=lambda: arriving.is_done)
        self.feed.end(streams)
        gaps = [now - then for then, now in itertools.pairwise(landed)]
        return 1e3 * max(gaps), spread_of(gaps)

    def _throughput(self, tokens_in: int, tokens_out: int) -> tuple[float, ...]:
        """All requests at once, from the first launch to the last token."""
        num_requests = self.shapes.num_requests
        self._check_room(num_requests * (tokens_in + tokens_out))
        for _ in range(num_requests):
            self.feed.add(self._prompt(tokens_in), tokens_out)
        begun = time.perf_counter()
        self.feed.run()
        return (num_requests * tokens_out / (time.perf_counter() - begun),)

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(3, self.config.vocab_size) for _ in range(num_tokens)]

    def _check_room(self, num_slots: int) -> None:
        limits = self.feed.limits
        has_slots = limits.num_blocks * limits.block_size
        if num_slots + limits.num_rows * limits.block_size > has_slots:
            raise DoesNotFitError(f"{num_slots} tokens do not fit into the {has_slots} of this device's KV cache")


def flops_of(config: ModelConfig, num_tokens: int) -> float:
    """Operations of a prompt: the layers' products for each token, of a mixture those of the experts that it goes to,
    logits of the last one, attention to all before.
    """
    routing = None if config.experts is None else config.experts.routing
    share = 1.0 if routing is None else routing.top_k / routing.num_experts
    layers = sum(
        math.prod(shape) * (share if ".experts." in name else 1.0)
        for name, shape in config.tensor_shapes().items()
        if name.endswith("_proj.weight")
    )
    pairs = num_tokens * (num_tokens + 1) / 2
    attention = 4 * pairs * config.num_heads * config.head_dim * config.num_layers
    return 2.0 * layers * num_tokens + 2.0 * config.vocab_size * config.hidden_size + attention

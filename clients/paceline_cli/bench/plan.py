"""From options to rungs: which requests are sent under which loads. Reads the trace and nothing else.

Knows which options exclude each other. Refuses to know how they were typed and to what they are sent.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from paceline_cli.bench.errors import WorkloadError
from paceline_cli.bench.rungs import ClosedLoop, OpenLoop, Replay, Rung
from paceline_cli.bench.traces import Scale, read_trace, replay
from paceline_cli.bench.workload import Lengths, Synthetic

Value = TypeVar("Value")

DEFAULT_LADDER = "1,4,16,32,64"
DEFAULT_NUM_PROMPTS = 200
DEFAULT_LEN = "128"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """The options that say what is sent and when, as they were given; None where they were not."""

    max_concurrency: str | None = None
    request_rate: str | None = None
    burstiness: float | None = None
    trace: Path | None = None
    scale_lengths: float | None = None
    scale_rate: float | None = None
    input_len: str | None = None
    output_len: str | None = None
    shared_prefix_len: int | None = None
    num_prompts: int | None = None
    seed: int = 0

    def rungs(self) -> list[Rung]:
        """What they mean.

        `WorkloadError` for what does not go together or cannot be meant, `TraceError` for the trace.
        """
        if self.trace is not None:
            self._refuse("--trace", "max_concurrency", "request_rate", "burstiness")
            self._refuse("--trace", "input_len", "output_len", "shared_prefix_len")
            scale = Scale(_or(self.scale_lengths, 1.0), _or(self.scale_rate, 1.0))
            return [Rung(Replay(self.trace.name, scale), replay(read_trace(self.trace, self.num_prompts), scale))]
        for name in ("scale_lengths", "scale_rate"):
            if getattr(self, name) is not None:
                raise WorkloadError(f"{_option(name)} needs a --trace to scale")
        if self.request_rate is not None:
            self._refuse("--request-rate", "max_concurrency")
            return self._open_loops(_numbers("--request-rate", self.request_rate))
        if self.burstiness is not None:
            raise WorkloadError("--burstiness is that of an open loop: it needs a --request-rate")
        return self._closed_loops()

    def _closed_loops(self) -> list[Rung]:
        synthetic = self._synthetic()
        ladder = _numbers("--max-concurrency", _or(self.max_concurrency, DEFAULT_LADDER))
        if not all(step.is_integer() for step in ladder):
            raise WorkloadError(f"--max-concurrency: {self.max_concurrency!r} would split a request")
        return [Rung(ClosedLoop(int(step)), synthetic.requests(number)) for number, step in enumerate(ladder)]

    def _open_loops(self, rates: Sequence[float]) -> list[Rung]:
        synthetic = self._synthetic()
        burstiness = _or(self.burstiness, 1.0)
        if not 0 < burstiness < float("inf"):
            raise WorkloadError(f"--burstiness: {burstiness:g} is not above 0")
        return [
            Rung(
                OpenLoop(rate, burstiness),
                synthetic.requests(
                    number,
                    gamma_arrivals(rate, burstiness, Random(f"{self.seed} arrivals {number}")),  # noqa: S311  repeatable
                ),
            )
            for number, rate in enumerate(rates)
        ]

    def _synthetic(self) -> Synthetic:
        return Synthetic(
            input_len=Lengths.parse(_or(self.input_len, DEFAULT_LEN), "--input-len"),
            output_len=Lengths.parse(_or(self.output_len, DEFAULT_LEN), "--output-len"),
            shared_prefix_len=_or(self.shared_prefix_len, 0),
            num_prompts=_or(self.num_prompts, DEFAULT_NUM_PROMPTS),
            seed=self.seed,
        )

    def _refuse(self, because_of: str, *names: str) -> None:
        for name in names:
            if getattr(self, name) is not None:
                raise WorkloadError(f"{_option(name)} does not go together with {because_of}, which decides that")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _or(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _numbers(option: str, text: str) -> list[float]:
    """Above 0, with commas between them."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise WorkloadError(f"{option}: {text!r} is no list of numbers above 0, such as 1,4,16")
    return numbers


def gamma_arrivals(request_rate: float, burstiness: float, draws: Random) -> Iterator[float]:
    """Seconds since the start, without end, of arrivals whose gaps are gamma distributed with mean 1 / `request_rate`.

    `burstiness` is the shape of that distribution, as in `vllm bench serve`: 1 is a Poisson process, below 1 arrivals
    come in bursts, above 1 they are more even. Unlike there, the drawn gaps are not stretched to a given total.
    """
    scale = 1.0 / (request_rate * burstiness)
    return itertools.accumulate(draws.gammavariate(burstiness, scale) for _ in itertools.repeat(None))

"""What is to be sent: prompts by their structure, output lengths and arrival times. Values, drawn from a seed.

Knows lengths and what prompts have in common. Refuses to know tokens, traces and targets.
"""

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline_cli.bench.errors import WorkloadError


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt. Equal keys mean equal content, as far as the shorter of the two goes."""

    key: str
    num_tokens: int
    serial: int | None = None
    """Written into the first tokens: a segment differs there from those with other numbers."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    segments: tuple[Segment, ...]
    num_output_tokens: int
    at_seconds: float | None = None
    """When it is due, counted from the start; None: as soon as there is room for it."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)


@dataclass(frozen=True, slots=True)
class Lengths:
    """From which lengths one is drawn, both ends included."""

    shortest: int
    longest: int

    @classmethod
    def parse(cls, text: str, option: str) -> "Lengths":
        """`128`, or `64-256` for lengths drawn evenly. `WorkloadError` for anything else, naming the option."""
        first, dash, last = text.partition("-")
        try:
            lengths = cls(int(first), int(last if dash else first))
        except ValueError:
            raise WorkloadError(f"{option}: {text!r} is no length: write 128, or 64-256 for random ones") from None
        if not 1 <= lengths.shortest <= lengths.longest:
            raise WorkloadError(f"{option}: {text!r} is no length of at least 1, nor a range of such lengths")
        return lengths

    def draw(self, draws: random.Random) -> int:
        return draws.randint(self.shortest, self.longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Random prompts, no two alike, behind a prefix that all share where one is asked for."""

    input_len: Lengths
    output_len: Lengths
    shared_prefix_len: int
    """Tokens in front of each prompt, in addition to `input_len`."""
    num_prompts: int
    seed: int

    def requests(self, rung: int, arrivals: Iterable[float | None] = itertools.repeat(None)) -> list[PlannedRequest]:
        """The requests of one rung, by its number; those of two rungs have nothing but the shared prefix in common."""
        draws = random.Random(f"{self.seed} lengths {rung}")  # noqa: S311  repeatable, not secret
        shared = (Segment("shared", self.shared_prefix_len),) if self.shared_prefix_len else ()
        serials = range(rung * self.num_prompts, (rung + 1) * self.num_prompts)
        return [
            PlannedRequest(
                (*shared, Segment(f"own {serial}", self.input_len.draw(draws), serial)),
                self.output_len.draw(draws),
                at_seconds,
            )
            for serial, at_seconds in zip(serials, arrivals, strict=False)
        ]


def num_too_long(requests: Sequence[PlannedRequest], max_model_len: int) -> int:
    return sum(request.num_prompt_tokens + request.num_output_tokens > max_model_len for request in requests)

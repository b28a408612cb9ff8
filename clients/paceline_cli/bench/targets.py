"""What a benchmark sends to: the border between the load and the ways to a server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline_cli.bench.records import Counted


@dataclass(frozen=True, slots=True)
class Outgoing:
    symbols: Sequence[int]
    """The prompt, in numbers below the target's `num_symbols`."""
    num_output_tokens: int
    cache_group: str
    """Requests of different groups must not share prefix-cache hits, where the target can be told so."""


@dataclass(frozen=True, slots=True)
class Served:
    """What is known of the model that answers."""

    model: str
    max_model_len: int | None
    """Prompt and output tokens together; None where the target does not say."""


class Target(Protocol):
    """A server that answers prompts with streams of tokens."""

    @property
    def served(self) -> Served:
        """The model."""

    @property
    def num_symbols(self) -> int:
        """How many different tokens, or words of about one token, prompts are made of."""

    async def send(self, request: Outgoing, times: list[float]) -> Counted:
        """Read the answer to its end, appending the time of every message with tokens. Raises a `PacelineError`."""

    async def close(self) -> None:
        """Disconnect."""

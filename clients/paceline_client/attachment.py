"""What a client says of itself when it comes to a request, first and again.

The fields they become are explained at `GenerateRequest.attachment` and below it in `paceline/v1/inference.proto`.
Apart from `session`, because the wires translate it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """What has arrived of one completion, whether it was read or not."""

    index: int
    token_ids: tuple[int, ...]
    rolling_hash: int
    """Of these tokens."""
    last_attempt: int
    """The highest attempt seen, 1 or more."""
    is_finished: bool = False
    """Whether its finish has arrived too."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """Of several attachments the one with the highest number has the request."""

    number: int = 1
    waited_seconds: float = 0.0
    """Since the request was first sent."""
    held: tuple[Held, ...] = ()
    """By index, of the completions of which something has arrived."""

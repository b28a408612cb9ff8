"""What a caller gets back: frozen values. Knows nothing of how they arrived."""

from dataclasses import dataclass
from enum import StrEnum

from paceline_client.requests import Sampling


class FinishReason(StrEnum):
    """Why the output ended. Failures are errors, not reasons."""

    STOP = "stop"
    """An end token, a stop token id or a stop text."""
    LENGTH = "length"
    """`max_tokens`, or the context is full."""
    CANCELLED = "cancelled"
    """Somebody cancelled the request; what came before is whole."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability under the model, before temperature."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The drawn token's log-probability at one position, and the most likely tokens there, best first."""

    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens."""

    num_prompt_tokens: int
    num_cached_tokens: int
    """How many prompt tokens came from the prefix cache."""
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one request. Deltas follow each other without gap or overlap."""

    text: str
    """Lags behind the tokens while they end inside a character or inside what may become a stop text."""
    token_ids: tuple[int, ...]
    offset: int
    """The index of the first of these tokens in the output."""
    attempt: int
    """How often the request has been placed on an executor."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    """Set on the last delta."""


@dataclass(frozen=True, slots=True)
class Result:
    """The whole output of one request."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    """The stop text or token id that ended the output; None for other reasons."""
    usage: Usage
    attempt: int
    """How often the request was placed on an executor: 1 unless something failed on the way."""
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be used now."""

    name: str
    architecture: str
    max_model_len: int
    """Prompt and output tokens together."""
    vocab_size: int
    end_token_ids: tuple[int, ...]
    has_chat_template: bool
    num_executors: int
    num_parameters: int | None
    quantization: str
    """The weight format, such as "Q4_1"; empty when unquantised."""
    default_sampling: Sampling


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a prompt."""

    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...]
    """The text of each token; empty unless asked for."""
    max_model_len: int

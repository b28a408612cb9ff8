"""What a caller asks for: frozen values named as in other engines. Unset (None) is not zero.

Knows how the parts of a request are spelled. Ranges are the server's to check, which names the field at fault; only
what would be a different request than the one meant is refused here.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline_client.config import Timeout
from paceline_client.errors import FieldViolation, InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. None takes the model's generation default, else the server's."""

    temperature: float | None = None
    """0 picks the most likely token; default 1."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    """Makes the draw repeatable, alone and in any batch."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """When the output ends."""

    max_tokens: int | None = None
    """None: up to the model's context limit."""
    min_tokens: int | None = None
    stop: Sequence[str] | str | None = None
    """Texts that end the output; one text may stand alone."""
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What is returned beside the text."""

    logprobs: int | None = None
    """How many alternatives to return with each token's log-probability; 0 returns the token's alone."""
    skip_special_tokens: bool | None = None
    stream_interval: int | None = None
    """How many tokens are gathered into one delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """How the scheduler treats the request beside its content."""

    priority: int | None = None
    """Lower runs earlier, inside the tenant; default 0."""
    cache_salt: str = ""
    """Only requests with the same salt share prefix-cache hits."""
    bypass_prefix_cache: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat. `role` is usually "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt that is tokenised as it stands."""

    text: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt that goes through the model's chat template."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt that is tokenised already."""

    ids: tuple[int, ...]


Prompt = Text | Chat | TokenIds
MessageLike = Message | Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request in full. `(tenant, request_id)` is its identity."""

    prompt: Prompt
    request_id: str
    tenant: str
    model: str
    sampling: Sampling
    stopping: Stopping
    output: Output
    scheduling: Scheduling
    timeout: Timeout


def make_prompt(
    text: str | None, messages: Sequence[MessageLike] | None, token_ids: Sequence[int] | None = None
) -> Prompt:
    """The one prompt that was given; `InvalidRequestError` when it is none or several."""
    given = [value for value in (text, messages, token_ids) if value is not None]
    if len(given) != 1:
        raise invalid("prompt", f"give exactly one of prompt, messages and token_ids, not {len(given)}")
    if text is not None:
        return Text(text)
    if messages is not None:
        return Chat(tuple(_as_message(message) for message in messages))
    return TokenIds(tuple(token_ids or ()))


def new_request_id() -> str:
    """An id nobody else has."""
    return uuid.uuid4().hex


def invalid(name: str, description: str) -> InvalidRequestError:
    """The error for one field that is refused before anything is sent."""
    return InvalidRequestError(
        f"{name}: {description}", reason="INVALID_FIELD", violations=(FieldViolation(name, description),)
    )


def _as_message(value: MessageLike) -> Message:
    if isinstance(value, Message):
        return value
    if set(value) != {"role", "content"}:
        raise invalid("messages", f"a message has 'role' and 'content', not {sorted(value)}")
    return Message(value["role"], value["content"])

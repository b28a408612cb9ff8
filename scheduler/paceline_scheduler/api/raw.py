"""A request as it was sent, in plain values: nothing checked, nothing filled in.

None means unset, which is not the same as zero. The paths that errors name are those of paceline.v1.GenerateRequest.
Lists may be of any length, so they stay as they came until their length has been checked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to tokenise as it stands."""

    text: str


class ChatTurn(Protocol):
    """One turn of a conversation."""

    @property
    def role(self) -> str:
        """Who speaks."""

    @property
    def content(self) -> str:
        """What is said."""

    @property
    def reasoning(self) -> str:
        """What was thought before; empty for nothing."""

    @property
    def tool_calls(self) -> Sequence[object]:
        """The calls that were made."""

    @property
    def tool_call_id(self) -> str:
        """The call that is answered; empty for none."""

    @property
    def name(self) -> str:
        """Which of several speakers, or tools; empty for none."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template."""

    messages: Sequence[ChatTurn]
    unsupported_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Tokens to take as they are."""

    token_ids: Sequence[int]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class RawSampling:
    """paceline.v1.SamplingParams."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    n: int | None = None


@dataclass(frozen=True, slots=True)
class RawStopping:
    """paceline.v1.StoppingParams."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None


@dataclass(frozen=True, slots=True)
class RawOutput:
    """paceline.v1.OutputOptions."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    stream_interval: int | None = None


class ResumePoint(Protocol):
    """paceline.v1.ResumePoint: what the client holds of a completion but the first."""

    @property
    def index(self) -> int:
        """Which completion."""

    @property
    def resume_from(self) -> int:
        """The offset of the first token that is still wanted."""

    @property
    def resume_hash(self) -> int:
        """The rolling hash of what is held; 0 is unset."""

    @property
    def last_attempt(self) -> int:
        """The highest attempt seen; 0 is unset."""

    @property
    def prior_output_token_ids(self) -> Sequence[int]:
        """What is held, or nothing."""


@dataclass(frozen=True, slots=True)
class RawResumption:
    """The fields with which a client comes back to a request."""

    resumable: bool = False
    attachment: int = 0
    resume_from: int | None = None
    resume_hash: int | None = None
    last_attempt: int | None = None
    waited_s: float | None = None
    prior_output_token_ids: Sequence[int] = ()
    resume_points: Sequence[ResumePoint] = ()

    @property
    def number(self) -> int:
        """Which attachment of its client this is: 1, 2, …."""
        return max(1, self.attachment)

    @property
    def is_begun(self) -> bool:
        """Whether the client says that the request was taken once already."""
        return self.number > 1 or bool(self.resume_from or self.prior_output_token_ids or self.resume_points)


FIRST_ATTACHMENT = RawResumption()


@dataclass(frozen=True, slots=True)
class RawRequest:
    """paceline.v1.GenerateRequest.

    `unsupported_fields` are the paths of what is asked for and this version does not act on; those of a chat stand with
    it. `body_digest` is the BLAKE2b-128 digest of the message without what changes from one attachment to the next;
    `origin` the same message, serialised, with the trace it came in, also without its prompt and fields that nobody
    knows.
    """

    model: str = ""
    request_id: str = ""
    tenant: str = ""
    prompt: Prompt | None = None
    sampling: RawSampling = field(default_factory=RawSampling)
    stopping: RawStopping = field(default_factory=RawStopping)
    output: RawOutput = field(default_factory=RawOutput)
    resumption: RawResumption = field(default_factory=RawResumption)
    unsupported_fields: tuple[str, ...] = ()
    priority: int | None = None
    timeout_s: float | None = None
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    trace_parent: str = ""
    trace_state: str = ""
    origin: bytes = b""
    body_digest: bytes = b""

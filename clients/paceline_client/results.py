"""What a caller gets back: frozen values. Knows nothing of how they arrived."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from paceline_client.errors import IncompleteOutputError, PacelineError
from paceline_client.forms import Form
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
    token_bytes: bytes | None = None
    """As in `TokenLogprobs`."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The drawn token's log-probability at one position, and the most likely tokens there, best first."""

    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...]
    token_bytes: bytes | None = None
    """What the token stands for, which need not be whole characters; None unless asked for."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens."""

    num_prompt_tokens: int
    num_cached_tokens: int
    """How many prompt tokens came from the prefix cache."""
    num_output_tokens: int
    num_draft_tokens: int = 0
    """How many drafts were verified."""
    num_accepted_draft_tokens: int = 0
    """How many of them became output: so many steps were saved."""


@dataclass(frozen=True, slots=True)
class Times:
    """Where the time of a completion went, in seconds, over all its placements."""

    queued: float
    """Until it was placed first."""
    prefill: float
    """On an executor, before the first token."""
    decode: float
    preempted: float
    """Off executors after it was placed first, whatever the reason."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one completion. Deltas of a completion follow each other without gap or overlap."""

    text: str
    """Lags behind the tokens while they end inside a character or inside what may become a stop text."""
    token_ids: tuple[int, ...]
    offset: int
    """The index of the first of these tokens in the output."""
    attempt: int
    """How often the request has been placed on an executor."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    """Set on the last delta of the completion."""
    index: int = 0
    """Which completion: 0 to `Sampling.n` - 1."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens from the second one on, if asked for: in the first delta of completion 0 only."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The whole output of one completion."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    """The stop text or token id that ended the output; None for other reasons."""
    usage: Usage
    attempt: int
    """How often it was placed on an executor: 1 unless something failed on the way."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    times: Times | None = None
    """None where a scheduler that is gone had known that."""


@dataclass(frozen=True, slots=True)
class Result:
    """The whole output of one request. What it says of a completion is said of the first, which is usually the only."""

    request_id: str
    completions: tuple[Completion, ...]
    """By index, as many as `Sampling.n` asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens from the second one on, if asked for."""
    structured: Form | None = None
    """The form that was asked for."""

    @property
    def parsed(self) -> Any:  # noqa: ANN401 (what the caller's class or JSON makes of it)
        """The text as the form means it: an object of the class, or JSON; of other forms the text.

        `IncompleteOutputError` where the form is not complete, as behind `max_tokens`, or the class does not take it;
        `ValueError` where no form was asked for.
        """
        if self.structured is None:
            raise ValueError(f"request {self.request_id} asked for no form; see its text")
        if self.finish_reason is not FinishReason.STOP:
            what = f"the output ended with {self.finish_reason} before its form was complete"
            raise IncompleteOutputError(f"request {self.request_id}: {what}", reason="INCOMPLETE_OUTPUT")
        try:
            return self.structured.parse(self.text)
        except ValueError as error:
            what = f"request {self.request_id}: the output cannot be parsed: {error}"
            raise IncompleteOutputError(what, reason="INCOMPLETE_OUTPUT") from error

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def matched_stop(self) -> str | int | None:
        """The stop text or token id that ended the output; None for other reasons."""
        return self.completions[0].matched_stop

    @property
    def usage(self) -> Usage:
        return self.completions[0].usage

    @property
    def attempt(self) -> int:
        """How often the request was placed on an executor: 1 unless something failed on the way."""
        return self.completions[0].attempt

    @property
    def times(self) -> Times | None:
        return self.completions[0].times

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """The log-probabilities of the output's tokens, if asked for."""
        return self.completions[0].logprobs


class RequestState(StrEnum):
    """Where a request stands."""

    UNKNOWN = "unknown"
    """The server says something that this version does not know."""
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Taken off an executor, to go on later."""
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where a request is and what it waits for; of several completions, of the first that has not ended."""

    state: RequestState
    waiting_for: str
    """A sentence; empty when it runs."""
    queue_position: int
    """How many requests are ahead of it; 0 when it runs."""
    num_preemptions: int
    preemption_reason: str
    """A sentence about the last preemption; empty if there was none."""
    executor: str
    """The address of the executor that runs it; empty when none does."""
    num_computed_tokens: int
    num_output_tokens: int
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    times: Times | None = None
    """So far; None while its prompt is being tokenised."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What would become of a request if it were sent now."""

    time_to_first_token_seconds: float | None
    """None where it would be refused."""
    inter_token_seconds: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    """How many of them the prefix cache holds now."""
    refusal: PacelineError | None
    """The error that it would get, if it would be refused."""


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
    default_system_text: str = ""
    """The system message of a chat that has none; empty: the model's chat template decides."""
    weight_bytes: int | None = None
    """Of an executor's memory, the most where executors differ."""
    weights_digest: str = ""
    """Executors whose digests differ do not serve a model together; empty when unknown."""
    structured_output: str = ""
    """What holds outputs to a form, with its version; empty: nothing does."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a prompt."""

    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...]
    """The text of each token; empty unless asked for."""
    max_model_len: int

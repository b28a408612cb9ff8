"""The steps a fake server plays for a request. Values only; `played` plays them.

`Break` and `Die` happen once in a request's life. A request that was forgotten is played again from its beginning; what
its client says to hold is passed over, and so is everything between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from paceline.v1 import inference_pb2 as pb
from paceline_client.results import FinishReason, OutputPart


@dataclass(frozen=True, slots=True)
class Tokens:
    """Send tokens and the text they add. The errors make the delta a false one, to see it refused."""

    token_ids: tuple[int, ...]
    text: str = ""
    offset_error: int = 0
    """Added to the offset: above 0 tokens seem lost, below 0 doubled."""
    hash_error: int = 0
    """Xored into the rolling hash."""
    logprob: float | None = None
    completion: int = 0
    prompt_logprob: float | None = None
    """The log-probability of a prompt's second token, which is 0."""
    parts: tuple[OutputPart, ...] | None = None
    """What the tokens add to the parts of the output, which are told to who asks; None: their text."""


@dataclass(frozen=True, slots=True)
class End:
    """Send the finish of a completion. A request without one for each stays open."""

    reason: FinishReason | None = FinishReason.STOP
    """None: the server failed."""
    matched_stop: str | int | None = None
    num_prompt_tokens: int = 1
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    times_ms: tuple[int, int, int, int] | None = None
    """Queued, prefill, decode, preempted."""
    completion: int = 0


@dataclass(frozen=True, slots=True)
class Fail:
    """End the request with an error and its google.rpc details."""

    code: grpc.StatusCode
    message: str
    reason: str = "TEST"
    field: str | None = None
    retry_after_seconds: float | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    """Names and values of its google.rpc.ErrorInfo."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait until `FakeServer.release` is called; it lets every hold pass, also later ones."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Announce on this session that the server goes away; the session ends when its requests are done."""

    reason: str = "the server is being upgraded"


@dataclass(frozen=True, slots=True)
class Break:
    """End the whole session at once with this status. Its requests play on, for whoever comes back to them."""

    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    message: str = "connection reset"


@dataclass(frozen=True, slots=True)
class Die:
    """End every session and forget every request, as if scheduler and executors had died and come up again."""


Step = Tokens | End | Fail | Hold | Drain | Break | Die
Script = Sequence[Step] | Callable[[pb.GenerateRequest], Sequence[Step]]


def standby(active_address: str = "", retry_after_seconds: float = 0.15) -> Fail:
    """What a scheduler says that stands by for another one."""
    return Fail(
        grpc.StatusCode.UNAVAILABLE,
        f"this scheduler stands by; {active_address or 'another one'} serves",
        "STANDBY",
        retry_after_seconds=retry_after_seconds,
        metadata=(("active_address", active_address),),
    )


def say(text: str) -> list[Step]:
    """One token per word, then a stop; the ids are the words' positions."""
    words = text.split(" ")
    texts = [word if number == 0 else f" {word}" for number, word in enumerate(words)]
    return [*(Tokens((number,), word) for number, word in enumerate(texts)), End()]


def echo(request: pb.GenerateRequest) -> Sequence[Step]:
    """Say the prompt again: its text, or the content of its last message."""
    return say(request.chat.messages[-1].content if request.HasField("chat") else request.text)


def fail_then(failures: Sequence[Fail], steps: Sequence[Step]) -> Script:
    """Refuse as often as there are failures, one each, and then play the steps."""
    remaining = list(failures)

    def script(_: pb.GenerateRequest) -> Sequence[Step]:
        return [remaining.pop(0)] if remaining else steps

    return script

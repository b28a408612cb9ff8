"""What a caller asks for: frozen values named as in other engines. Unset (None) is not zero.

Knows how the parts of a request are spelled. Ranges are the server's to check, which names the field at fault; only
what would be a different request than the one meant is refused here.
"""

import dataclasses
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline_client.config import Timeout
from paceline_client.errors import FieldViolation, InvalidRequestError
from paceline_client.forms import Form, FormLike, as_form
from paceline_client.tools import Tool, ToolCall, ToolChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. None takes the model's generation default, else the server's."""

    temperature: float | None = None
    """Divides the logits, 0 to 100; 0 picks the most likely token; default 1."""
    top_k: int | None = None
    """Draw from this many most likely tokens."""
    top_p: float | None = None
    """Draw from the most likely tokens that together have at least this probability, above 0 to 1."""
    min_p: float | None = None
    """Leave out tokens that are less likely than this share of the most likely one, 0 to 1."""
    seed: int | None = None
    """Makes the draw repeatable, alone and in any batch."""
    presence_penalty: float | None = None
    """Subtracted from the logits of tokens that the output has already, -2 to 2."""
    frequency_penalty: float | None = None
    """The same, once for each time the output has the token, -2 to 2."""
    repetition_penalty: float | None = None
    """Divides positive and multiplies negative logits of tokens in prompt and output; above 1 discourages them."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids, -100 to 100."""
    allowed_token_ids: Sequence[int] = ()
    """The only tokens that may be drawn; empty: all."""
    bad_words: Sequence[str] | str = ()
    """Texts whose tokens are never completed; one text may stand alone."""
    n: int | None = None
    """How many completions of the prompt, 1 to 16, each with a seed of its own that follows from `seed`; default 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """When the output ends."""

    max_tokens: int | None = None
    """None: up to the model's context limit."""
    min_tokens: int | None = None
    """Before so many tokens nothing but the context's end ends the output; at most `max_tokens`."""
    stop: Sequence[str] | str | None = None
    """Texts that end the output, and are no part of it unless `include_stop_str_in_output`; one may stand alone."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the output, like the model's own end tokens."""
    ignore_eos: bool | None = None
    """True: the model's own end tokens end nothing."""
    include_stop_str_in_output: bool | None = None
    """True: what ended the output stays in its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What is returned beside the text."""

    logprobs: int | None = None
    """How many alternatives to return with each token's log-probability; 0 returns the token's alone."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, from the second one on."""
    skip_special_tokens: bool | None = None
    """False shows the text of special tokens too."""
    stream_interval: int | None = None
    """How many tokens are gathered into one delta; the first token and the end come at once."""
    parts: bool | None = None
    """True returns the output cut into text, reasoning and calls of tools, too; default: where there are tools."""
    token_bytes: bool | None = None
    """True returns the bytes of each token beside its log-probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """How the scheduler treats the request beside its content."""

    priority: int | None = None
    """Lower runs earlier, -100 to 100, inside the tenant; default 0."""
    cache_salt: str = ""
    """Only requests with the same salt share prefix-cache hits."""
    bypass_prefix_cache: bool = False
    """True neither reads nor feeds the prefix cache."""
    max_num_draft_tokens: int | None = None
    """Drafts of a step at most, 0 to 63; 0 switches drafting off. It changes how fast tokens come, never which."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat. `role` is usually "system", "user", "assistant" or "tool"."""

    role: str
    content: str = ""
    reasoning: str | None = field(default=None, kw_only=True)
    """What the model thought before it."""
    tool_calls: Sequence[ToolCall] = field(default=(), kw_only=True)
    tool_call_id: str | None = field(default=None, kw_only=True)
    """Of the call that a tool's turn answers."""
    name: str | None = field(default=None, kw_only=True)
    """Who speaks, or which tool."""


@dataclass(frozen=True, slots=True)
class Text:
    """Tokenised as it stands."""

    text: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Goes through the model's chat template."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    template_arguments: Mapping[str, "TemplateValue"] = field(default_factory=dict)
    continue_final_message: bool | None = None


@dataclass(frozen=True, slots=True)
class TokenIds:
    ids: tuple[int, ...]


Prompt = Text | Chat | TokenIds
TOOL_CHOICE_MODES = ("auto", "none", "required")
TemplateValue = bool | int | float | str
MessageLike = Message | Mapping[str, Any]
ToolLike = Tool | Mapping[str, Any]
ToolChoiceLike = ToolChoice | str
"""A text is a mode, or else a tool's name."""
SamplingLike = Sampling | Mapping[str, Any]
StoppingLike = Stopping | Mapping[str, Any]
OutputLike = Output | Mapping[str, Any]
SchedulingLike = Scheduling | Mapping[str, Any]
TimeoutLike = Timeout | float
"""A number is the seconds that a whole request may take."""

Value = TypeVar("Value", Sampling, Stopping, Output, Scheduling, Message, Tool, ToolCall)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
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
    structured: Form | None = None
    trace_parent: str | None = None
    trace_state: str | None = None
    max_outage_seconds: float | None = None
    """None: as long as the scheduler lets requests wait for an executor."""
    is_idempotent: bool = False
    """One of this id that is known is read from its beginning, instead of being refused."""

    @property
    def num_completions(self) -> int:
        """What cannot be is the server's to refuse."""
        return self.sampling.n or 1


def make_request(
    prompt: Prompt,
    *,
    sampling: SamplingLike | None,
    stopping: StoppingLike | None,
    output: OutputLike | None,
    scheduling: SchedulingLike | None,
    structured: FormLike | None,
    model: str | None,
    tenant: str,
    timeout: Timeout,
    request_id: str | None = None,
    is_idempotent: bool = False,
    trace: Mapping[str, str] | None = None,
) -> GenerationRequest:
    """`InvalidRequestError` for what is of another type."""
    trace = _current_trace() if trace is None else trace
    return GenerationRequest(
        prompt=prompt,
        request_id=request_id or new_request_id(),
        tenant=tenant,
        model=model or "",
        sampling=_as_value("sampling", Sampling, sampling),
        stopping=_as_value("stopping", Stopping, stopping),
        output=_as_value("output", Output, output),
        scheduling=_as_value("scheduling", Scheduling, scheduling),
        structured=as_form(structured),
        timeout=timeout,
        trace_parent=trace.get("traceparent"),
        trace_state=trace.get("tracestate"),
        is_idempotent=is_idempotent,
    )


def make_timeout(value: TimeoutLike | None, default: Timeout) -> Timeout:
    """A number bounds the whole request and leaves the rest as it is."""
    if value is None or isinstance(value, Timeout):
        return value or default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid("timeout", f"must be a number of seconds or a Timeout, not {type(value).__name__}")
    try:
        return dataclasses.replace(default, total_seconds=value)
    except ValueError as error:
        raise invalid("timeout", str(error)) from None


def make_prompt(
    text: str | None,
    messages: Sequence[MessageLike] | None,
    token_ids: Sequence[int] | None = None,
    *,
    tools: Sequence[ToolLike] | None = None,
    tool_choice: ToolChoiceLike | None = None,
    template_arguments: Mapping[str, TemplateValue] | None = None,
    continue_final_message: bool | None = None,
) -> Prompt:
    """`InvalidRequestError` when none or several were given, or what goes with messages without these."""
    given = [value for value in (text, messages, token_ids) if value is not None]
    if len(given) != 1:
        raise invalid("prompt", f"give exactly one of prompt, messages and token_ids, not {len(given)}")
    if messages is None and (tools or tool_choice or template_arguments or continue_final_message):
        raise invalid("messages", "are what tools, template_arguments and continue_final_message go with: give these")
    if text is not None:
        if not isinstance(text, str):
            raise invalid("prompt", f"must be a str, not {type(text).__name__}")
        return Text(text)
    if messages is not None:
        if isinstance(messages, str | bytes | Mapping):
            raise invalid("messages", f"must be a list of messages, not {type(messages).__name__}")
        if not isinstance(template_arguments or {}, Mapping):
            raise invalid("template_arguments", f"must be a dict, not {type(template_arguments).__name__}")
        return Chat(
            tuple(_as_message(f"messages[{number}]", message) for number, message in enumerate(messages)),
            _as_values("tools", Tool, tools or ()),
            _as_choice(tool_choice),
            template_arguments or {},
            continue_final_message,
        )
    try:
        return TokenIds(tuple(token_ids if token_ids is not None else ()))
    except TypeError as error:
        raise invalid("token_ids", str(error)) from None


def new_request_id() -> str:
    return uuid.uuid4().hex


def invalid(name: str, description: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name}: {description}", reason="INVALID_FIELD", violations=(FieldViolation(name, description),)
    )


def _current_trace() -> Mapping[str, str]:
    """The W3C headers of the caller's span, where the caller uses OpenTelemetry."""
    headers: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(headers)
    return headers


def _as_value(name: str, kind: type[Value], given: Value | Mapping[str, Any] | None) -> Value:
    if isinstance(given, kind):
        return given
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise invalid(name, f"must be a {kind.__name__} or a dict, not {type(given).__name__}")
    known = [part.name for part in dataclasses.fields(kind)]
    unknown = [str(key) for key in given if key not in known]
    if unknown:
        raise invalid(name, f"has no {', '.join(map(repr, unknown))}; there is {', '.join(known)}")
    try:
        return kind(**given)
    except TypeError as error:  # a field that it needs is not there
        raise invalid(name, str(error).removeprefix(f"{kind.__name__}.__init__() ")) from None


def _as_message(name: str, given: MessageLike) -> Message:
    """What is None is unset, as in messages of others."""
    if isinstance(given, Mapping):
        given = {key: value for key, value in given.items() if value is not None}
    message = _as_value(name, Message, given)
    for part in ("role", "content"):
        if not isinstance(value := getattr(message, part), str):
            raise invalid(f"{name}.{part}", f"must be a str, not {type(value).__name__}")
    return dataclasses.replace(message, tool_calls=_as_values(f"{name}.tool_calls", ToolCall, message.tool_calls))


def _as_values(name: str, kind: type[Value], given: Sequence[Value | Mapping[str, Any]]) -> tuple[Value, ...]:
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise invalid(name, f"must be a list of {kind.__name__} or dict, not {type(given).__name__}")
    return tuple(_as_value(f"{name}[{number}]", kind, _flat(each)) for number, each in enumerate(given))


def _flat(given: Value | Mapping[str, Any]) -> Value | Mapping[str, Any]:
    """Tools and calls as others write them have a function inside."""
    if not isinstance(given, Mapping) or not isinstance(function := given.get("function"), Mapping):
        return given
    return {key: value for key, value in given.items() if key not in ("type", "function")} | dict(function)


def _as_choice(given: ToolChoiceLike | None) -> ToolChoice | None:
    if isinstance(given, str):
        return ToolChoice(mode=given) if given in TOOL_CHOICE_MODES else ToolChoice(name=given)
    if given is None or isinstance(given, ToolChoice):
        return given
    raise invalid("tool_choice", f"must be a ToolChoice or a str, not {type(given).__name__}")

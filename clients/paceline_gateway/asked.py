"""A body as what the client library is asked for: sampling, stopping, output, scheduling, a form, turns of a chat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline_client import (
    AsyncClient,
    AsyncStream,
    Choice,
    Grammar,
    JsonObject,
    JsonSchema,
    Message,
    Output,
    Regex,
    Sampling,
    Scheduling,
    Stopping,
)
from paceline_client.forms import Form
from paceline_gateway.bodies import ChatBody, CompletionBody, GenerationBody, ResponseFormat, StructuredOutputs, Turn
from paceline_gateway.errors import refused

# Of a request whose output goes out as a whole: fewer messages, and what is lost with a scheduler stays little.
_WHOLE_INTERVAL = 64
_LEAST_TOP_P = 1e-6  # 0 means the most likely token alone
_PRIORITY_OF_TIER = {"flex": 50, "priority": -50}
_UINT64 = 2**64
_TEXT_PARTS = ("text", "input_text", "output_text")  # the latter two in `/v1/responses`
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Asked:
    """What to generate, beside the prompt."""

    model: str
    sampling: Sampling
    stopping: Stopping
    output: Output
    scheduling: Scheduling
    form: Form | None

    def begin(
        self, client: AsyncClient, prompt: Prompt, request_id: str, trace: Mapping[str, str], *, idempotent: bool
    ) -> AsyncStream:
        is_text = isinstance(prompt, str)
        is_chat = not is_text and bool(prompt) and isinstance(prompt[0], Message)
        return client.stream(
            prompt if is_text else None,  # type: ignore[arg-type]  # told apart above
            messages=prompt if is_chat else None,  # type: ignore[arg-type]
            token_ids=None if is_text or is_chat else prompt,  # type: ignore[arg-type]
            sampling=self.sampling,
            stopping=self.stopping,
            output=self.output,
            scheduling=self.scheduling,
            structured=self.form,
            model=self.model,
            request_id=request_id,
            idempotent=idempotent,
            trace=trace,
        )


def asked_of_chat(body: ChatBody, model: str) -> Asked:
    """Raises ApiError."""
    if body.top_logprobs and not body.logprobs:
        raise refused("top_logprobs", "needs logprobs: true")
    if body.modalities not in (None, [], ["text"]):
        raise refused("modalities", "is text only", code="unsupported_parameter")
    if body.tool_choice not in (None, "none", "auto"):
        raise refused("tool_choice", "is not supported; leave it out", code="unsupported_parameter")
    if body.add_generation_prompt is False:
        raise refused("add_generation_prompt", "is always true", code="unsupported_parameter")
    most = body.max_tokens
    if body.max_completion_tokens is not None:
        if most not in (None, body.max_completion_tokens):
            raise refused("max_tokens", "is the older name of max_completion_tokens: give one of them")
        most = body.max_completion_tokens
    return _asked(body, model, most, (body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs)


def asked_of_completion(body: CompletionBody, model: str) -> Asked:
    """Raises ApiError."""
    if body.best_of not in (None, body.n or 1):
        raise refused("best_of", "is not supported; leave it out", code="unsupported_parameter")
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = body.logprobs
    # An echo alone is not asked of a model; one token is, and left out.
    most = 1 if body.echo and body.max_tokens == 0 else body.max_tokens
    return _asked(body, model, most, body.logprobs, prompt_logprobs)


def _asked(
    body: GenerationBody, model: str, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> Asked:
    has_logprobs = logprobs is not None or prompt_logprobs is not None
    return Asked(
        model=model,
        sampling=Sampling(
            temperature=body.temperature,
            top_k=body.top_k if body.top_k is None or body.top_k > 0 else None,  # vLLM's -1 and 0: all of them
            top_p=_LEAST_TOP_P if body.top_p == 0 else body.top_p,
            min_p=body.min_p,
            seed=_seed(body.seed),
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=_biases(body.logit_bias or {}),
            allowed_token_ids=body.allowed_token_ids or (),
            bad_words=body.bad_words or (),
            n=body.n,
        ),
        stopping=Stopping(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            stop=body.stop,
            stop_token_ids=body.stop_token_ids or (),
            ignore_eos=body.ignore_eos,
            include_stop_str_in_output=body.include_stop_str_in_output,
        ),
        output=Output(
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            token_bytes=True if has_logprobs else None,
            skip_special_tokens=body.skip_special_tokens,
            stream_interval=None if body.stream else _WHOLE_INTERVAL,
        ),
        scheduling=Scheduling(
            priority=_PRIORITY_OF_TIER.get(body.service_tier or "") if body.priority is None else body.priority
        ),
        form=_form(body),
    )


def _seed(seed: int | None) -> int | None:
    if seed is None or 0 <= seed < _UINT64:
        return seed
    if seed < -(_UINT64 // 2) or seed >= _UINT64:
        raise refused("seed", "is no integer of 64 bits")
    return seed + _UINT64


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise refused("logit_bias", "has token ids as keys") from None


def _form(body: GenerationBody) -> Form | None:
    forms = [form for form in (_form_of_response(body.response_format), *_forms_of_vllm(body)) if form is not None]
    if len(forms) > 1:
        raise refused("response_format", "is one of several forms: give one")
    return forms[0] if forms else None


def _form_of_response(asked: ResponseFormat | None) -> Form | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return JsonObject()
    if asked.type != "json_schema":
        raise refused("response_format.type", f"{asked.type!r} is none of text, json_object, json_schema")
    if asked.json_schema is None:
        raise refused("response_format.json_schema", "is missing")
    return JsonObject() if asked.json_schema.schema is None else JsonSchema(asked.json_schema.schema)


def _forms_of_vllm(body: GenerationBody) -> list[Form]:
    named = body.structured_outputs or StructuredOutputs()
    forms: list[Form] = [JsonObject()] if named.json_object else []
    forms += [JsonSchema(schema) for schema in (named.json, body.guided_json) if schema is not None]
    forms += [Regex(pattern) for pattern in (named.regex, body.guided_regex) if pattern is not None]
    forms += [Choice(options) for options in (named.choice, body.guided_choice) if options is not None]
    return forms + [Grammar(lark) for lark in (named.grammar, body.guided_grammar) if lark is not None]


def turns(messages: Sequence[Turn]) -> list[Message]:
    """Raises ApiError for what a turn may not have."""
    if not messages:
        raise refused("messages", "is empty")
    return [message_of(turn, f"messages[{number}]") for number, turn in enumerate(messages)]


def message_of(turn: Turn, path: str) -> Message:
    """Raises ApiError, with `path` as the name of the turn."""
    # Calls, their answers, names and reasoning of earlier turns come with the client library's.
    for name in ("tool_calls", "tool_call_id", "function_call", "name", "audio", "reasoning_content", "reasoning"):
        if getattr(turn, name):
            raise refused(f"{path}.{name}", "is not supported; leave it out", code="unsupported_parameter")
    return Message("system" if turn.role == "developer" else turn.role, _content(turn, path))


def _content(turn: Turn, path: str) -> str:
    if turn.content is None:
        return turn.refusal or ""
    if isinstance(turn.content, str):
        return turn.content
    texts = []
    for number, part in enumerate(turn.content):
        text = part.refusal if part.type == "refusal" else part.text if part.type in _TEXT_PARTS else None
        if text is None:
            sentence = f"{part.type!r} is not taken: parts are text" if part.type not in _TEXT_PARTS else "has no text"
            raise refused(f"{path}.content[{number}].type", sentence, code="unsupported_parameter")
        texts.append(text)
    return "\n".join(texts)

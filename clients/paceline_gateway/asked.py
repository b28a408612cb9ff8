"""A body as what the client library is asked for: sampling, stopping, output, scheduling, a form, tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
    Tool,
    ToolChoice,
)
from paceline_client.forms import Form
from paceline_gateway.bodies import ChatBody, CompletionBody, GenerationBody, ResponseFormat, StructuredOutputs
from paceline_gateway.conversation import choice_of, tools_of
from paceline_gateway.errors import refused

# Of a request whose output goes out as a whole: fewer messages, and what is lost with a scheduler stays little.
_WHOLE_INTERVAL = 64
_LEAST_TOP_P = 1e-6  # 0 means the most likely token alone
_PRIORITY_OF_TIER = {"flex": 50, "priority": -50}
_UINT64 = 2**64
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
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool | None = None

    @property
    def has_parts(self) -> bool:
        """The output comes cut into text, reasoning and calls."""
        return bool(self.output.parts)

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
            tools=self.tools,
            tool_choice=self.tool_choice,
            template_arguments=self.template_arguments,
            continue_final_message=self.continue_final_message,
            model=self.model,
            request_id=request_id,
            idempotent=idempotent,
            trace=trace,
        )


def asked_of_chat(body: ChatBody, model: str, may_reason: bool) -> Asked:
    """Raises ApiError."""
    if body.top_logprobs and not body.logprobs:
        raise refused("top_logprobs", "needs logprobs: true")
    if body.modalities not in (None, [], ["text"]):
        raise refused("modalities", "is text only", code="unsupported_parameter")
    if body.add_generation_prompt is not None and body.add_generation_prompt == bool(body.continue_final_message):
        raise refused("add_generation_prompt", "is true unless continue_final_message is, and false with that")
    most = body.max_tokens
    if body.max_completion_tokens is not None:
        if most not in (None, body.max_completion_tokens):
            raise refused("max_tokens", "is the older name of max_completion_tokens: give one of them")
        most = body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    asked = _asked(body, model, most, logprobs, body.prompt_logprobs)
    tools = tools_of(body.tools or ())
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return replace(
        asked,
        output=replace(asked.output, parts=True if tools or may_reason else None),
        tools=tools,
        tool_choice=choice_of(body.tool_choice, body.parallel_tool_calls if tools else None),
        template_arguments=effort | (body.chat_template_kwargs or {}),
        continue_final_message=body.continue_final_message,
    )


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

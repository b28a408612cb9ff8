"""The bodies of requests as typed values: what OpenAI's API names, and what clients of vLLM send besides.

Knows types, and which fields are refused by name. Ranges are the scheduler's to check, which names the field.
"""

from typing import Any, ClassVar, TypeVar

import msgspec

from paceline_gateway.errors import ApiError, refused

_AT = " - at `$"


class ContentPart(msgspec.Struct, frozen=True):
    """A piece of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str = ""


class CallOfTurn(msgspec.Struct, frozen=True):
    id: str
    type: str = "function"
    function: CalledFunction | None = None


class Turn(msgspec.Struct, frozen=True):
    """One message of a chat."""

    role: str
    content: str | list[ContentPart] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[CallOfTurn] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    audio: Any = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(msgspec.Struct, frozen=True):
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolOfBody(Function, frozen=True):
    """Chats have the function inside, `/v1/responses` its fields here."""

    type: str = "function"
    function: Function | None = None


class ToolSelection(msgspec.Struct, frozen=True):
    """The same."""

    type: str
    name: str | None = None
    function: Function | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class NamedSchema(msgspec.Struct, frozen=True):
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None  # enforced whatever it says
    description: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: str
    json_schema: NamedSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """As vLLM takes them: one of these."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Fields(msgspec.Struct, frozen=True):
    """Those of a body."""

    not_done: ClassVar[tuple[str, ...]] = ()
    """What else is known by name, and refused unless it asks for nothing."""


class GenerationBody(Fields, frozen=True):
    """What a request for a chat and one for a completion have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    service_tier: str | None = None
    user: Any = None
    response_format: ResponseFormat | None = None
    # Of vLLM.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    priority: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None


class ChatBody(GenerationBody, frozen=True):
    not_done = (
        "functions", "function_call", "audio", "web_search_options", "prediction", "store", "chat_template",
        "documents",
    )  # fmt: skip

    messages: list[Turn] = msgspec.field(default_factory=list)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    tools: list[ToolOfBody] | None = None
    tool_choice: str | ToolSelection | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    # Of vLLM.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class CompletionBody(GenerationBody, frozen=True):
    not_done = ("suffix", "prompt_embeds")

    prompt: str | list[Any] | None = None  # which list, `completions` finds out
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class TextFormat(NamedSchema, frozen=True):
    type: str = "text"


class TextSettings(msgspec.Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class InputItem(msgspec.Struct, frozen=True):
    """A message, reasoning, a call of a tool or its output, told by `type`; other types are refused by theirs."""

    content: str | list[ContentPart] | None = None
    role: str = "user"
    type: str = "message"
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class Reasoning(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


class ResponsesBody(Fields, frozen=True):
    not_done = (
        "store", "previous_response_id", "background", "conversation", "prompt", "include", "max_tool_calls",
        "top_logprobs", "context_management",
    )  # fmt: skip

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextSettings | None = None
    truncation: str | None = None
    service_tier: str | None = None
    metadata: dict[str, Any] | None = None
    tools: list[ToolOfBody] | None = None
    tool_choice: str | ToolSelection | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    stream_options: Any = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class TokenizeBody(Fields, frozen=True):
    not_done = ("tools", "continue_final_message", "chat_template", "chat_template_kwargs")

    model: str | None = None
    prompt: str | None = None
    messages: list[Turn] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Fields, frozen=True):
    tokens: list[int]
    model: str | None = None


FieldsT = TypeVar("FieldsT", bound=Fields)


def read_body(kind: type[FieldsT], content: bytes) -> tuple[FieldsT, tuple[str, ...]]:
    """Also returns the names of fields that nobody knows, which are ignored. Raises ApiError."""
    try:
        fields = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body has to be a JSON object")
    try:
        body = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(_AT)
        param = path.rstrip("`").removeprefix(".") or None
        if param is None and "required field" in what:
            param = what.split("`")[1]
        raise ApiError(400, f"{param}: {what}" if param else what, param=param) from None
    for name in kind.not_done:
        if fields.get(name) not in (None, False, [], {}):
            raise refused(name, "is not supported; leave it out", code="unsupported_parameter")
    return body, tuple(name for name in fields if name not in (*kind.__struct_fields__, *kind.not_done))

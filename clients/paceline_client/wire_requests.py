"""A request as a message: every field that is set, under the name it has there.

protobuf's complaints become errors that name the field.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import EncodeError, Message

from paceline.v1 import inference_pb2 as pb
from paceline.v1 import sampling_pb2 as sampling_pb
from paceline_client.forms import Choice, Form, Grammar, JsonObject, JsonSchema, Regex, Tags
from paceline_client.requests import (
    TOOL_CHOICE_MODES,
    Chat,
    GenerationRequest,
    Output,
    Prompt,
    Sampling,
    Stopping,
    Text,
    invalid,
)
from paceline_client.tools import ToolChoice

# A year, as good as for ever: servers take 366 days at most, and clocks and messages cannot hold every float.
_LONGEST_SECONDS = 365 * 86400.0


@dataclass(frozen=True, slots=True)
class Held:
    """What has arrived of one completion, whether it was read or not. `rolling_hash` is that of these tokens,
    `last_attempt` the highest attempt seen, 1 or more.
    """

    index: int
    token_ids: tuple[int, ...]
    rolling_hash: int
    last_attempt: int
    is_finished: bool = False
    """Whether its finish has arrived too."""


def generate_request(request: GenerationRequest, *, max_bytes: int) -> pb.GenerateRequest:
    """`InvalidRequestError` for what has no place in a message, or is too large."""
    message = pb.GenerateRequest()
    set_field(message, "model", request.model)
    set_field(message, "request_id", request.request_id)
    set_field(message, "tenant", request.tenant)
    set_prompt(message, request.prompt)
    _set_part(message.sampling, request.sampling, "sampling.")
    _set_part(message.stopping, request.stopping, "stopping.")
    _set_part(message.output, request.output, "output.")
    for name in ("priority", "cache_salt", "bypass_prefix_cache"):
        set_field(message, name, getattr(request.scheduling, name))
    if (max_drafts := request.scheduling.max_num_draft_tokens) is not None:
        set_field(message.speculation, "max_num_draft_tokens", max_drafts, "speculation.")
    if request.structured is not None:
        _set_form(message.structured, request.structured)
    set_field(message, "trace_parent", request.trace_parent)
    set_field(message, "trace_state", request.trace_state)
    if request.timeout.total_seconds is not None:
        message.timeout.CopyFrom(_duration(request.timeout.total_seconds))
    if request.max_outage_seconds is not None:
        message.max_outage.CopyFrom(_duration(request.max_outage_seconds))
    if (size := message.ByteSize()) > max_bytes:
        raise invalid("prompt", f"the request has {size} bytes, the limit is {max_bytes}")
    return message


def set_attachment(
    message: pb.GenerateRequest, held: tuple[Held, ...], number: int, waited_seconds: float, *, max_bytes: int
) -> None:
    """Say what the client of a request that goes on without a stream holds: of each completion of which something has
    arrived, by index.
    """
    message.resumable = True
    message.attachment = number
    if waited_seconds > 0:
        message.waited.CopyFrom(_duration(waited_seconds))
    for each in held:
        _set_held(message.resume_points.add(index=each.index) if each.index else message, each)
    if held and message.ByteSize() > max_bytes:
        # Without its tokens it can still be found: by the hash, where there is a record of it.
        for part in (message, *message.resume_points):
            part.ClearField("prior_output_token_ids")


def _set_held(message: pb.GenerateRequest | pb.ResumePoint, held: Held) -> None:
    message.resume_from = len(held.token_ids)
    message.resume_hash = held.rolling_hash
    message.last_attempt = held.last_attempt
    message.prior_output_token_ids.extend(held.token_ids)
    message.resume_finished = held.is_finished


def set_field(message: object, name: str, value: object, path: str = "") -> None:
    """Set a field unless it is None. protobuf's complaints about type, range and encoding name the field."""
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError, EncodeError) as error:
        raise invalid(path + name, str(error)) from None


def set_all(message: object, name: str, values: Iterable[object] | None, path: str = "") -> None:
    """Complaints are as in `set_field`."""
    if values is None:
        return
    try:
        items = list(values)  # arrays too, which are neither true nor false
        if items:  # touching a list would mark the message around it as set
            getattr(message, name).extend(items)
    except (TypeError, ValueError, EncodeError) as error:
        raise invalid(path + name, str(error)) from None


def set_prompt(message: pb.GenerateRequest | pb.TokenizeRequest, prompt: Prompt) -> None:
    match prompt:
        case Text(text):
            set_field(message, "text", text)
        case Chat():
            _set_chat(message.chat, prompt)
        case _:
            if isinstance(message, pb.TokenizeRequest):
                raise invalid("token_ids", "these are tokens already")
            message.token_ids.SetInParent()
            set_all(message.token_ids, "ids", prompt.ids, "token_ids.")


def _set_chat(message: pb.Chat, chat: Chat) -> None:
    message.SetInParent()
    for number, turn in enumerate(chat.messages):
        path, added = f"chat.messages[{number}].", message.messages.add()
        for name in ("role", "content", "reasoning", "tool_call_id", "name"):
            set_field(added, name, getattr(turn, name), path)
        for place, call in enumerate(turn.tool_calls):
            made = added.tool_calls.add()
            for name in ("id", "name", "arguments"):
                set_field(made, name, getattr(call, name), f"{path}tool_calls[{place}].")
    for number, tool in enumerate(chat.tools):
        shown = message.tools.add()
        for name in ("name", "description", "parameters_json_schema", "strict"):
            set_field(shown, name, getattr(tool, name), f"chat.tools[{number}].")
    if chat.tool_choice is not None:
        _set_choice(message.tool_choice, chat.tool_choice)
    for name, value in chat.template_arguments.items():
        kind = next((kind for of, kind in _ARGUMENT_KINDS.items() if isinstance(value, of)), None)
        if kind is None or not isinstance(name, str):
            raise invalid(f"chat.template_arguments[{name}]", "must be a bool, a number or a str, by its name")
        set_field(message.template_arguments[name], kind, value, f"chat.template_arguments[{name}].")
    set_field(message, "continue_final_message", chat.continue_final_message, "chat.")


_ARGUMENT_KINDS: dict[type, str] = {bool: "flag", int: "integer", float: "number", str: "text"}  # a bool is an int, too


def _set_choice(message: pb.ToolChoice, choice: ToolChoice) -> None:
    message.SetInParent()
    if choice.mode is not None:
        if choice.mode not in TOOL_CHOICE_MODES:
            raise invalid(
                "chat.tool_choice.mode", f"must be one of {', '.join(TOOL_CHOICE_MODES)}, not {choice.mode!r}"
            )
        message.mode = pb.ToolChoiceMode.Value(f"TOOL_CHOICE_MODE_{choice.mode.upper()}")
    set_field(message, "name", choice.name, "chat.tool_choice.")
    set_field(message, "parallel_calls", choice.parallel_calls, "chat.tool_choice.")


def _set_form(message: sampling_pb.StructuredOutput, form: Form) -> None:
    match form:
        case JsonObject():
            message.json_object = True
        case Choice(options):
            if isinstance(options, str):
                raise invalid("structured.choice.options", "must be a list of texts, not one text")
            message.choice.SetInParent()
            set_all(message.choice, "options", options, "structured.choice.")
        case Tags():
            message.tags.SetInParent()
            message.tags.required, message.tags.at_most_one = form.required, form.at_most_one
            for number, tag in enumerate(form.tags):
                path, added = f"structured.tags.tags[{number}].", message.tags.tags.add()
                set_field(added, "begin", tag.begin, path)
                _set_text_form(added, tag.form, path)
                set_field(added, "end", tag.end, path)
        case _:
            _set_text_form(message, form, "structured.")
    if isinstance(form, JsonSchema | JsonObject | Tags) and form.compact:
        message.whitespace = sampling_pb.WHITESPACE_COMPACT


def _set_text_form(
    message: sampling_pb.StructuredOutput | sampling_pb.Tag, form: JsonSchema | Regex | Grammar, path: str
) -> None:
    match form:
        case JsonSchema():
            set_field(message, "json_schema", form.text, path)
        case Regex(pattern):
            set_field(message, "regex", pattern, path)
        case Grammar(lark):
            set_field(message, "grammar", lark, path)


def _set_part(message: Message, part: Sampling | Stopping | Output, path: str) -> None:
    """In the fields of the same names."""
    for field in fields(part):
        name, value = field.name, getattr(part, field.name)
        kind = message.DESCRIPTOR.fields_by_name[name]
        if not kind.is_repeated:
            set_field(message, name, value, path)
        elif kind.message_type is None:
            set_all(message, name, (value,) if isinstance(value, str) else value, path)  # one text may stand alone
        else:
            _set_map(message, name, value, path)


def _set_map(message: object, name: str, pairs: Mapping[int, float], path: str) -> None:
    try:
        for key, value in pairs.items():
            getattr(message, name)[key] = value
    except (AttributeError, TypeError, ValueError) as error:
        raise invalid(path + name, str(error)) from None


def sendable_seconds(seconds: float) -> float:
    """Infinity and other huge limits are a year."""
    return min(seconds, _LONGEST_SECONDS)


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(sendable_seconds(seconds) * 1e9))
    return duration

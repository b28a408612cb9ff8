"""From a request as it was sent to one whose every value is in range and filled in; nothing after it checks again.

Does not tokenise. A field that this version does not act on is refused unless it asks for what happens anyway.
"""

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from paceline.plan.codec.columns import fields_set
from paceline.plan.codec.requests import SAMPLING_NUMBERS
from paceline.plan.durations import read_duration
from paceline.plan.ranges import Range
from paceline.plan.sampling import MAX_LOGIT_BIAS, SAMPLING_RANGES, GenerationDefaults, SamplingParams
from paceline.plan.values import Int32Array, RecordId
from paceline.process.trace_ids import MAX_TRACE_PARENT_BYTES, MAX_TRACE_STATE_BYTES
from paceline.v1 import inference_pb2, sampling_pb2
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.resumption import ValidResumption, body_of, number_of
from paceline_scheduler.api.rules import (
    Prompt,
    check_count,
    check_ids,
    check_num_bytes,
    check_prompt_length,
    check_range,
    check_texts,
)
from paceline_scheduler.api.text.conversations import check_chat, num_chars
from paceline_scheduler.api.text.output_forms import binds_calls
from paceline_scheduler.api.text.stop_texts import MatchedText
from paceline_scheduler.backend import ServedModel
from paceline_scheduler.core.request import MAX_OUTAGE_S, Request
from paceline_scheduler.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NoExecutorError,
    PromptTooLongError,
    UnknownModelError,
    UnsupportedError,
)

MAX_MODEL_NAME_BYTES = 256
MAX_KEY_BYTES = 128  # of tenant, request_id and cache_salt each
MAX_COMPLETIONS = 16
MAX_TIMEOUT_S = 366 * 86_400
MAX_PRIORITY = 100  # and down to its negative
MAX_STOP_TEXTS = 16
MAX_STOP_TEXT_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_CHAT_MESSAGES = 4096
# In every plan that places the request: more than all its fields together may have (182 KiB), less than what an
# executor keeps (512 KiB).
MAX_ORIGIN_BYTES = 192 * 1024
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 64
# One delta of them takes 256 KiB and keeps everybody waiting.
MAX_PROMPT_LOGPROBS = 16_384
MAX_DRAFTS = 63  # of a row and step
_NO_MODEL_RETRY_S = 1.0
_NO_TOKENS: Int32Array = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What of a request only the edge acts on."""

    bad_words: tuple[str, ...]
    stop_texts: tuple[str, ...]
    skip_special_tokens: bool
    matched_text: MatchedText
    stream_interval: int  # in tokens
    wants_parts: bool
    wants_token_bytes: bool


_BOUNDS = {
    "timeout": Range(0, MAX_TIMEOUT_S, is_open=True),
    "max_outage": Range(0, MAX_TIMEOUT_S, is_open=True),
    "waited": Range(0, MAX_TIMEOUT_S),
    "priority": Range(-MAX_PRIORITY, MAX_PRIORITY),
    **{f"sampling.{name}": allowed for name, allowed in SAMPLING_RANGES.items()},
    "sampling.top_k": Range(1),
    "sampling.n": Range(1, MAX_COMPLETIONS),
    "stopping.max_tokens": Range(1),
    "stopping.min_tokens": Range(0),
    "speculation.max_num_draft_tokens": Range(0, MAX_DRAFTS),
    "output.logprobs": Range(0, 20),
    "output.prompt_logprobs": Range(0, 20),
    "output.stream_interval": Range(1),
}
"""By path; each may be unset."""

_BOUNDED_PARTS = tuple(dict.fromkeys(path.split(".")[0] for path in _BOUNDS if "." in path))

_UNSUPPORTED = ("adapter",)


def check_alone(message: inference_pb2.GenerateRequest) -> None:
    """What can be said without its model. Raises InvalidRequestError and UnsupportedError."""
    check_key(key_of(message))
    check_num_bytes("cache_salt", message.cache_salt, MAX_KEY_BYTES)
    check_num_bytes("trace_parent", message.trace_parent, MAX_TRACE_PARENT_BYTES)
    check_num_bytes("trace_state", message.trace_state, MAX_TRACE_STATE_BYTES)
    for prefix, part in (("", message), *((f"{name}.", getattr(message, name)) for name in _BOUNDED_PARTS)):
        for field, value in part.ListFields():
            if allowed := _BOUNDS.get(path := prefix + field.name):
                check_range(path, read_duration(value) if isinstance(value, Duration) else value, allowed)
    _check_supported(message, _UNSUPPORTED)


def validate(
    message: inference_pb2.GenerateRequest,
    models: tuple[ServedModel, ...],
    came_s: float,
    max_seconds: float | None,
    limits: EdgeLimits,
) -> tuple[Request, ServedModel]:
    """It came at `came_s`, with `max_seconds` left of its call. Returns its first completion, without handle, tokens of
    the prompt and bad words, and its model. Raises InvalidRequestError, UnsupportedError, UnknownModelError,
    NoExecutorError, and DeadlineExceededError for one that waited too long.
    """
    check_alone(message)
    key = key_of(message)
    body_digest, origin = body_of(message)
    if len(origin) > MAX_ORIGIN_BYTES:
        sentence = f"has {len(origin)} bytes beside its prompt, at most {MAX_ORIGIN_BYTES} are allowed"
        raise InvalidRequestError("message", sentence)
    model = choose_model(message.model, models)
    check_prompt(message, model, limits)
    stopping, output, speculation = message.stopping, message.output, message.speculation
    check_texts("stopping.stop", stopping.stop, MAX_STOP_TEXTS, MAX_STOP_TEXT_CHARS)
    check_texts("sampling.bad_words", message.sampling.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
    request = Request(
        handle=0,
        key=key,
        model=model.name,
        prompt_token_ids=_NO_TOKENS,
        sampling=_fill_in_sampling(message.sampling, model, key),
        end_token_ids=_end_token_ids(stopping, model),
        max_tokens=stopping.max_tokens or None,
        num_logprobs=output.logprobs if output.HasField("logprobs") else None,
        min_tokens=_check_min_tokens(stopping),
        ignored_end_token_ids=model.end_token_ids if stopping.ignore_eos else (),
        num_prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        deadline_s=deadline_of(message, came_s, max_seconds),
        cache_salt=message.cache_salt,
        bypass_prefix_cache=message.bypass_prefix_cache,
        priority=message.priority,
        num_completions=num_completions(message),
        max_num_draft_tokens=speculation.max_num_draft_tokens if speculation.HasField("max_num_draft_tokens") else None,
        is_resumable=message.resumable,
        attachment=number_of(message),
        waited_s=waited_of(message),
        origin=origin,
        body_digest=body_digest,
        trace_parent=message.trace_parent,
        structured=_structured(message),
        max_outage_s=max_outage_of(message),
    )
    return request, model


def text_options(message: inference_pb2.GenerateRequest) -> TextOptions:
    """Of one that is valid."""
    stopping, output = message.stopping, message.output
    return TextOptions(
        bad_words=tuple(message.sampling.bad_words),
        stop_texts=tuple(stopping.stop),
        skip_special_tokens=output.skip_special_tokens or not output.HasField("skip_special_tokens"),
        matched_text=MatchedText.INCLUDED if stopping.include_stop_str_in_output else MatchedText.DROPPED,
        stream_interval=output.stream_interval or 1,
        wants_parts=output.parts if output.HasField("parts") else bool(message.chat.tools),
        wants_token_bytes=output.token_bytes,
    )


def key_of(request: inference_pb2.GenerateRequest) -> RecordId:
    """The key is that of the first completion, unchecked."""
    return RecordId(request.tenant, request.request_id)


def check_key(key: RecordId) -> None:
    """Raises InvalidRequestError."""
    if not key.request_id:
        raise InvalidRequestError("request_id", "is empty; choose one, it identifies the request inside its tenant")
    check_num_bytes("request_id", key.request_id, MAX_KEY_BYTES)
    check_num_bytes("tenant", key.tenant, MAX_KEY_BYTES)


def num_completions(request: inference_pb2.GenerateRequest) -> int:
    """An impossible number counts as one: it is refused later."""
    n = request.sampling.n
    return n if 1 <= n <= MAX_COMPLETIONS else 1


def choose_model(name: str, models: tuple[ServedModel, ...]) -> ServedModel:
    """The empty name means the only one."""
    check_num_bytes("model", name, MAX_MODEL_NAME_BYTES)
    if not models:
        raise NoExecutorError("no executor is attached yet; try again", _NO_MODEL_RETRY_S)
    names = ", ".join(repr(model.name) for model in models)
    if not name:
        if len(models) > 1:
            raise InvalidRequestError("model", f"is missing; choose one of {names}")
        return models[0]
    for model in models:
        if model.name == name:
            return model
    raise UnknownModelError(f"no executor serves the model {name!r}; choose one of {names}")


def check_prompt(prompt: Prompt, model: ServedModel, limits: EdgeLimits) -> None:
    match prompt.WhichOneof("prompt"):
        case "text":
            if not prompt.text:
                raise InvalidRequestError("text", "is empty")
            _check_num_chars("text", len(prompt.text), model, limits)
        case "chat":
            _check_chat(prompt.chat, model, limits)
        case "token_ids" if isinstance(prompt, inference_pb2.GenerateRequest):
            if not prompt.token_ids.ids:
                raise InvalidRequestError("token_ids", "is empty")
            check_prompt_length(len(prompt.token_ids.ids), model)
        case _:
            raise InvalidRequestError("prompt", "is missing: set one of text, chat and token_ids")


def check_context(num_prompt_tokens: int, resumption: ValidResumption, model: ServedModel) -> None:
    num_held = max(point.resume_from for point in resumption.points)
    if num_prompt_tokens + num_held > model.max_model_len:
        room = max(0, model.max_model_len - num_prompt_tokens)
        sentence = f"is {num_held}, but {num_prompt_tokens} prompt tokens leave room for {room} output tokens"
        raise InvalidRequestError("resume_from", sentence)


def check_prompt_logprobs(num_prompt_logprobs: int | None, num_prompt_tokens: int) -> None:
    if num_prompt_logprobs is None:
        return
    num_values = num_prompt_tokens * (num_prompt_logprobs + 1)
    if num_values > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            "output.prompt_logprobs",
            f"asks for {num_values} values for {num_prompt_tokens} prompt tokens, at most {MAX_PROMPT_LOGPROBS} fit",
        )


def derived_seed(key: RecordId) -> int:
    """It is the same whenever the request is sent again."""
    tenant = key.tenant.encode()
    digest = hashlib.blake2b(len(tenant).to_bytes(4, "big") + tenant, digest_size=8, person=b"paceline-seed")
    digest.update(key.request_id.encode())
    return int.from_bytes(digest.digest(), "big")


def _check_supported(message: Message, paths: Iterable[str]) -> None:
    """They may ask for what happens anyway."""
    for path in paths:
        *parts, name = path.split(".")
        part = functools.reduce(getattr, parts, message)
        value = getattr(part, name)
        if part.HasField(name) if isinstance(value, Message) else value:
            raise UnsupportedError(path)


def _check_chat(chat: inference_pb2.Chat, model: ServedModel, limits: EdgeLimits) -> None:
    if model.tokenizer.template_for(has_tools=bool(chat.tools)) is None:
        raise InvalidRequestError("chat", f"the model {model.name!r} has no chat template; send text instead")
    check_count("chat.messages", len(chat.messages), 1, MAX_CHAT_MESSAGES)
    check_chat(chat)
    _check_num_chars("chat", num_chars(chat), model, limits)


def _check_num_chars(field: str, num_chars: int, model: ServedModel, limits: EdgeLimits) -> None:
    max_chars = limits.max_prompt_chars(model.max_model_len)
    if num_chars > max_chars:
        raise PromptTooLongError(
            field,
            f"has {num_chars} characters; at most {max_chars} are taken for a context of {model.max_model_len} tokens",
        )


def _fill_in_sampling(sent: sampling_pb2.SamplingParams, model: ServedModel, key: RecordId) -> SamplingParams:
    if sent.top_k > model.vocab_size:
        raise InvalidRequestError(
            "sampling.top_k", f"is {sent.top_k}, must be at most {model.vocab_size}, the size of the vocabulary"
        )
    allowed = check_ids("sampling.allowed_token_ids", sent.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS, model.vocab_size)
    numbers = SAMPLING_NUMBERS | {"seed": derived_seed(key)} | _recommended(model) | fields_set(sent, SAMPLING_NUMBERS)
    return SamplingParams(
        **numbers,
        logit_bias=_check_logit_bias(sent.logit_bias, model),
        allowed_token_ids=tuple(dict.fromkeys(allowed)),
    )


def _recommended(model: ServedModel) -> dict[str, float]:
    return _values_of(model.tokenizer.defaults, model.vocab_size)


@functools.lru_cache(maxsize=64)
def _values_of(defaults: GenerationDefaults, vocab_size: int) -> dict[str, float]:
    named = asdict(defaults)
    if named["top_k"] is not None:
        # Models write 0 for unlimited, and some name more tokens than there are.
        named["top_k"] = min(max(named["top_k"], 0), vocab_size)
    return {name: value for name, value in named.items() if value is not None}


def _check_logit_bias(biases: Mapping[int, float], model: ServedModel) -> tuple[tuple[int, float], ...]:
    field = "sampling.logit_bias"
    check_count(field, len(biases), 0, MAX_LOGIT_BIASES)
    for token_id, bias in biases.items():
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequestError(field, f"names token {token_id}, token ids are 0 to {model.vocab_size - 1}")
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            limit = f"must be at least {-MAX_LOGIT_BIAS} and at most {MAX_LOGIT_BIAS}"
            raise InvalidRequestError(f"{field}[{token_id}]", f"is {bias:.7g}, {limit}")
    return tuple(sorted(biases.items()))


def _structured(message: inference_pb2.GenerateRequest) -> bytes:
    if message.stopping.ignore_eos and (message.HasField("structured") or binds_calls(message.chat)):
        sentence = "is set beside a form of the output, which ends where the form is complete"
        raise InvalidRequestError("stopping.ignore_eos", sentence)
    if message.structured.HasField("composed"):
        raise InvalidRequestError("structured.composed", "is for schedulers to write; set another form")
    form = sampling_pb2.StructuredOutput()
    form.CopyFrom(message.structured)
    form.DiscardUnknownFields()
    return form.SerializeToString(deterministic=True)


def _check_min_tokens(stopping: sampling_pb2.StoppingParams) -> int:
    if stopping.HasField("max_tokens") and stopping.min_tokens > stopping.max_tokens:
        sentence = f"is {stopping.min_tokens}, must be at most max_tokens, which is {stopping.max_tokens}"
        raise InvalidRequestError("stopping.min_tokens", sentence)
    return stopping.min_tokens


def waited_of(request: inference_pb2.GenerateRequest) -> float:
    return read_duration(request.waited)


def max_outage_of(request: inference_pb2.GenerateRequest) -> float:
    return read_duration(request.max_outage) if request.HasField("max_outage") else MAX_OUTAGE_S


def deadline_of(request: inference_pb2.GenerateRequest, came_s: float, max_seconds: float | None) -> float | None:
    """The timeout began with the first submission."""
    left = [] if max_seconds is None else [max_seconds]
    if request.HasField("timeout"):
        timeout_s, waited_s = read_duration(request.timeout), waited_of(request)
        if waited_s >= timeout_s:
            sentence = (
                f"the timeout of {timeout_s:.7g} s passed before the request came: it has waited {waited_s:.7g} s"
            )
            raise DeadlineExceededError(sentence)
        left.append(timeout_s - waited_s)
    return came_s + min(*left, MAX_TIMEOUT_S) if left else None


def _end_token_ids(stopping: sampling_pb2.StoppingParams, model: ServedModel) -> tuple[int, ...]:
    token_ids = check_ids("stopping.stop_token_ids", stopping.stop_token_ids, MAX_STOP_TOKEN_IDS, model.vocab_size)
    own = () if stopping.ignore_eos else model.end_token_ids
    return tuple(dict.fromkeys((*own, *token_ids)))

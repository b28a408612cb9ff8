"""From a request as it was sent to one whose every value is in range and filled in; nothing after it checks again.

Knows the rules for each field and the defaults. Does not tokenise: how long a text prompt is in tokens shows later. A
field that this version does not act on is refused when it asks for something else than what happens anyway.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from paceline.plan.values import GenerationDefaults, RecordId, SamplingParams
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.raw import ChatPrompt, Prompt, RawRequest, RawSampling, RawStopping, TextPrompt, TokenPrompt
from paceline_scheduler.api.resumption import OutputBounds, ValidResumption, check_resumption
from paceline_scheduler.api.rules import check_count, check_ids, check_num_bytes, check_range, check_texts
from paceline_scheduler.api.stop_texts import MatchedText
from paceline_scheduler.backend import ServedModel
from paceline_scheduler.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NoExecutorError,
    UnknownModelError,
    UnsupportedError,
)

_T = TypeVar("_T")

MAX_MODEL_NAME_BYTES = 256
MAX_KEY_BYTES = 128  # of tenant, request_id and cache_salt each
MAX_TRACE_PARENT_BYTES = 128
MAX_TRACE_STATE_BYTES = 512
MAX_COMPLETIONS = 16
MAX_TIMEOUT_S = 366 * 86_400
MAX_PRIORITY = 100  # and down to its negative
MAX_STOP_TEXTS = 16
MAX_STOP_TEXT_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_CHAT_MESSAGES = 4096
_UNSUPPORTED_TURN_FIELDS = ("reasoning", "tool_calls", "tool_call_id", "name")
# What is kept of a request beside its prompt, in every plan that places it and in the executor: more than all fields
# together that pass their own checks (118 KiB), and far less than what an executor keeps (512 KiB).
MAX_ORIGIN_BYTES = 128 * 1024
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0  # and down to its negative
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 64
# Prompt tokens times values of each: making one delta of them keeps everybody else waiting, and takes 256 KiB.
MAX_PROMPT_LOGPROBS = 16_384
_NO_MODEL_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """A request that can be run, if its prompt is not too long. `deadline_s` is on the backend's clock."""

    key: RecordId
    model: ServedModel
    prompt: Prompt
    sampling: SamplingParams
    end_token_ids: tuple[int, ...]
    stop_texts: tuple[str, ...]
    skip_special_tokens: bool
    matched_text: MatchedText
    stream_interval: int  # in tokens
    max_tokens: int | None
    num_logprobs: int | None
    min_tokens: int
    ignored_end_token_ids: tuple[int, ...]
    bad_words: tuple[str, ...]
    num_prompt_logprobs: int | None
    deadline_s: float | None
    cache_salt: str
    bypass_prefix_cache: bool
    priority: int
    resumption: ValidResumption
    origin: bytes
    body_digest: bytes
    bad_word_token_ids: tuple[tuple[int, ...], ...] = ()  # filled in when they are tokenised


@dataclass(frozen=True, slots=True)
class _Range:
    """The values a number may have: from `low` on, or above it where `is_open`, up to `high` if there is one."""

    field: str
    value: Callable[[RawRequest], float | None]
    low: float
    high: float = math.inf
    is_open: bool = False

    def check(self, request: RawRequest) -> None:
        check_range(self.field, self.value(request), self.low, self.high, is_open=self.is_open)


_RULES = (
    _Range("timeout", lambda r: r.timeout_s, 0, MAX_TIMEOUT_S, is_open=True),
    _Range("waited", lambda r: r.resumption.waited_s, 0, MAX_TIMEOUT_S),
    _Range("sampling.temperature", lambda r: r.sampling.temperature, 0, 100),
    _Range("sampling.top_k", lambda r: r.sampling.top_k, 1),
    _Range("sampling.top_p", lambda r: r.sampling.top_p, 0, 1, is_open=True),
    _Range("sampling.min_p", lambda r: r.sampling.min_p, 0, 1),
    _Range("stopping.max_tokens", lambda r: r.stopping.max_tokens, 1),
    _Range("output.logprobs", lambda r: r.output.logprobs, 0, 20),
    _Range("output.stream_interval", lambda r: r.output.stream_interval, 1),
    _Range("sampling.n", lambda r: r.sampling.n, 1, MAX_COMPLETIONS),
    _Range("priority", lambda r: r.priority, -MAX_PRIORITY, MAX_PRIORITY),
    _Range("sampling.presence_penalty", lambda r: r.sampling.presence_penalty, -2, 2),
    _Range("sampling.frequency_penalty", lambda r: r.sampling.frequency_penalty, -2, 2),
    _Range("sampling.repetition_penalty", lambda r: r.sampling.repetition_penalty, 0, 10, is_open=True),
    _Range("stopping.min_tokens", lambda r: r.stopping.min_tokens, 0),
    _Range("output.prompt_logprobs", lambda r: r.output.prompt_logprobs, 0, 20),
)


def validate(
    request: RawRequest, models: tuple[ServedModel, ...], came_s: float, max_seconds: float | None, limits: EdgeLimits
) -> ValidRequest:
    """Check every field and fill in what is unset.

    The request came at `came_s`, and its call had `max_seconds` left then. Raises InvalidRequestError,
    UnsupportedError, UnknownModelError, NoExecutorError, or DeadlineExceededError for one that has waited too long.
    """
    key = RecordId(request.tenant, request.request_id)
    check_key(key)
    check_num_bytes("cache_salt", request.cache_salt, MAX_KEY_BYTES)
    check_num_bytes("trace_parent", request.trace_parent, MAX_TRACE_PARENT_BYTES)
    check_num_bytes("trace_state", request.trace_state, MAX_TRACE_STATE_BYTES)
    for rule in _RULES:
        rule.check(request)
    _check_supported(request.unsupported_fields)
    if len(request.origin) > MAX_ORIGIN_BYTES:
        sentence = f"has {len(request.origin)} bytes beside its prompt, at most {MAX_ORIGIN_BYTES} are allowed"
        raise InvalidRequestError("message", sentence)
    model = choose_model(request.model, models)
    return ValidRequest(
        key=key,
        model=model,
        prompt=check_prompt(request.prompt, model, limits),
        sampling=_fill_in_sampling(request.sampling, model, key),
        end_token_ids=_end_token_ids(request, model),
        stop_texts=check_texts("stopping.stop", request.stopping.stop, MAX_STOP_TEXTS, MAX_STOP_TEXT_CHARS),
        skip_special_tokens=request.output.skip_special_tokens is not False,
        matched_text=MatchedText.KEPT if request.stopping.include_stop_str_in_output else MatchedText.DROPPED,
        stream_interval=request.output.stream_interval or 1,
        max_tokens=request.stopping.max_tokens,
        num_logprobs=request.output.logprobs,
        min_tokens=_check_min_tokens(request.stopping),
        ignored_end_token_ids=model.end_token_ids if request.stopping.ignore_eos else (),
        bad_words=check_texts("sampling.bad_words", request.sampling.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS),
        num_prompt_logprobs=request.output.prompt_logprobs,
        deadline_s=_deadline_s(request, came_s, max_seconds),
        cache_salt=request.cache_salt,
        bypass_prefix_cache=request.bypass_prefix_cache,
        priority=request.priority or 0,
        resumption=_resumption(request, model),
        origin=request.origin,
        body_digest=request.body_digest,
    )


def check_key(key: RecordId) -> None:
    """Refuse a key without a request_id, or with a part that is too long."""
    if not key.request_id:
        raise InvalidRequestError("request_id", "is empty; choose one, it identifies the request inside its tenant")
    check_num_bytes("request_id", key.request_id, MAX_KEY_BYTES)
    check_num_bytes("tenant", key.tenant, MAX_KEY_BYTES)


def num_completions(n: int | None) -> int:
    """Return how many completions a request that asks for `n` has. One that asks for what cannot be never has any."""
    return n if n is not None and 1 <= n <= MAX_COMPLETIONS else 1


def choose_model(name: str, models: tuple[ServedModel, ...]) -> ServedModel:
    """Return the model of this name, or the only one for the empty name."""
    check_num_bytes("model", name, MAX_MODEL_NAME_BYTES)
    if not models:
        raise NoExecutorError("no executor is attached yet; try again", _NO_MODEL_RETRY_S)
    names = ", ".join(repr(model.name) for model in models)
    if not name:
        if len(models) > 1:
            raise InvalidRequestError("model", f"must be set, as several are served: {names}")
        return models[0]
    for model in models:
        if model.name == name:
            return model
    raise UnknownModelError(f"no executor serves the model {name!r}; there is {names}")


def check_prompt(prompt: Prompt | None, model: ServedModel, limits: EdgeLimits) -> Prompt:
    """Return the prompt; refuses one that is missing, empty, or too long whatever its tokens are."""
    match prompt:
        case TextPrompt(text=text):
            if not text:
                raise InvalidRequestError("text", "is empty")
            _check_num_chars("text", len(text), model, limits)
        case ChatPrompt():
            _check_chat(prompt, model, limits)
        case TokenPrompt(token_ids=token_ids):
            if not token_ids:
                raise InvalidRequestError("token_ids", "is empty")
            check_prompt_length(len(token_ids), model)
        case None:
            raise InvalidRequestError("prompt", "is missing: set one of text, chat and token_ids")
    return prompt


def check_prompt_length(num_tokens: int, model: ServedModel) -> None:
    """Refuse a prompt that leaves no room for output."""
    if num_tokens == 0:
        raise InvalidRequestError("prompt", "has no tokens")
    if num_tokens >= model.max_model_len:
        raise InvalidRequestError(
            "prompt",
            f"has {num_tokens} tokens; at most {model.max_model_len - 1} fit, as prompt and output share the "
            f"{model.max_model_len} tokens of the context",
        )


def check_context(num_prompt_tokens: int, resumption: ValidResumption, model: ServedModel) -> None:
    """Refuse a client that says it holds more output than the context has room for behind the prompt."""
    num_held = max(progress.resume_from for progress in resumption.progress)
    if num_prompt_tokens + num_held > model.max_model_len:
        sentence = f"is {num_held}; behind {num_prompt_tokens} prompt tokens the context of {model.max_model_len} ends"
        raise InvalidRequestError("resume_from", sentence)


def check_prompt_logprobs(num_prompt_logprobs: int | None, num_prompt_tokens: int) -> None:
    """Refuse log-probabilities of a prompt that are more than one answer holds."""
    if num_prompt_logprobs is None:
        return
    num_values = num_prompt_tokens * (num_prompt_logprobs + 1)
    if num_values > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            "output.prompt_logprobs",
            f"gives {num_values} values for {num_prompt_tokens} prompt tokens, at most {MAX_PROMPT_LOGPROBS} are taken",
        )


def max_prompt_chars(model: ServedModel, limits: EdgeLimits) -> int:
    """Return how long a prompt may be in characters: much more than what ordinary text needs to fill the context."""
    return model.max_model_len * limits.max_chars_per_token


def derived_seed(key: RecordId) -> int:
    """Return the seed of a request that names none: the same whenever the request is sent again."""
    tenant = key.tenant.encode()
    digest = hashlib.blake2b(len(tenant).to_bytes(4, "big") + tenant, digest_size=8, person=b"paceline-seed")
    digest.update(key.request_id.encode())
    return int.from_bytes(digest.digest(), "big")


def _check_supported(unsupported_fields: tuple[str, ...]) -> None:
    for field in unsupported_fields:
        raise UnsupportedError(field)


def _check_chat(chat: ChatPrompt, model: ServedModel, limits: EdgeLimits) -> None:
    _check_supported(chat.unsupported_fields)
    if model.tokenizer.chat_template is None:
        raise InvalidRequestError("chat", f"the model {model.name!r} has no chat template; send text instead")
    check_count("chat.messages", len(chat.messages), 1, MAX_CHAT_MESSAGES)
    for index, message in enumerate(chat.messages):
        if not message.role:
            raise InvalidRequestError(f"chat.messages[{index}].role", 'is empty; it is usually "user"')
        for field in _UNSUPPORTED_TURN_FIELDS:
            if getattr(message, field):
                raise UnsupportedError(f"chat.messages[{index}].{field}")
    _check_num_chars("chat", sum(len(m.role) + len(m.content) for m in chat.messages), model, limits)


def _check_num_chars(field: str, num_chars: int, model: ServedModel, limits: EdgeLimits) -> None:
    max_chars = max_prompt_chars(model, limits)
    if num_chars > max_chars:
        raise InvalidRequestError(
            field,
            f"has {num_chars} characters; at most {max_chars} are taken for a context of {model.max_model_len} tokens",
        )


def _fill_in_sampling(raw: RawSampling, model: ServedModel, key: RecordId) -> SamplingParams:
    defaults = model.tokenizer.defaults
    if raw.top_k is not None and raw.top_k > model.vocab_size:
        raise InvalidRequestError("sampling.top_k", f"is {raw.top_k}, the vocabulary has {model.vocab_size} tokens")
    allowed = check_ids("sampling.allowed_token_ids", raw.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS, model.vocab_size)
    return SamplingParams(
        temperature=_first(raw.temperature, defaults.temperature, 1.0),
        top_k=_first(raw.top_k, _default_top_k(defaults, model.vocab_size), 0),
        top_p=_first(raw.top_p, defaults.top_p, 1.0),
        min_p=_first(raw.min_p, defaults.min_p, 0.0),
        seed=derived_seed(key) if raw.seed is None else raw.seed,
        presence_penalty=_first(raw.presence_penalty, None, 0.0),
        frequency_penalty=_first(raw.frequency_penalty, None, 0.0),
        repetition_penalty=_first(raw.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=_check_logit_bias(raw.logit_bias, model),
        allowed_token_ids=tuple(dict.fromkeys(allowed)),
    )


def _check_logit_bias(biases: Mapping[int, float], model: ServedModel) -> tuple[tuple[int, float], ...]:
    field = "sampling.logit_bias"
    check_count(field, len(biases), 0, MAX_LOGIT_BIASES)
    for token_id, bias in biases.items():
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequestError(field, f"names token {token_id}, the vocabulary has 0 to {model.vocab_size - 1}")
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            limit = f"must be at least {-MAX_LOGIT_BIAS} and at most {MAX_LOGIT_BIAS}"
            raise InvalidRequestError(f"{field}[{token_id}]", f"is {bias:.7g}, {limit}")
    return tuple(sorted(biases.items()))


def _check_min_tokens(stopping: RawStopping) -> int:
    min_tokens = stopping.min_tokens or 0
    if stopping.max_tokens is not None and min_tokens > stopping.max_tokens:
        sentence = f"is {min_tokens}, must be at most max_tokens, which is {stopping.max_tokens}"
        raise InvalidRequestError("stopping.min_tokens", sentence)
    return min_tokens


def _resumption(request: RawRequest, model: ServedModel) -> ValidResumption:
    max_tokens = min(request.stopping.max_tokens or model.max_model_len, model.max_model_len)
    bounds = OutputBounds(max_tokens, model.vocab_size)
    return check_resumption(request.resumption, num_completions(request.sampling.n), bounds)


def _deadline_s(request: RawRequest, came_s: float, max_seconds: float | None) -> float | None:
    """Return when the request must have ended. Its timeout began when it was first submitted, its call only now."""
    left = [] if max_seconds is None else [max_seconds]
    if request.timeout_s is not None:
        waited_s = request.resumption.waited_s or 0.0
        if waited_s >= request.timeout_s:
            sentence = (
                f"its timeout of {request.timeout_s:.7g} s had passed when it came: it has waited {waited_s:.7g} s"
            )
            raise DeadlineExceededError(sentence)
        left.append(request.timeout_s - waited_s)
    return came_s + min(*left, MAX_TIMEOUT_S) if left else None


def _default_top_k(defaults: GenerationDefaults, vocab_size: int) -> int | None:
    # Model files write 0 for unlimited, and some name more tokens than there are.
    return None if defaults.top_k is None else min(max(defaults.top_k, 0), vocab_size)


def _end_token_ids(request: RawRequest, model: ServedModel) -> tuple[int, ...]:
    token_ids = check_ids(
        "stopping.stop_token_ids", request.stopping.stop_token_ids, MAX_STOP_TOKEN_IDS, model.vocab_size
    )
    own = () if request.stopping.ignore_eos else model.end_token_ids
    return tuple(dict.fromkeys((*own, *token_ids)))


def _first(sent: _T | None, default: _T | None, otherwise: _T) -> _T:
    return sent if sent is not None else default if default is not None else otherwise

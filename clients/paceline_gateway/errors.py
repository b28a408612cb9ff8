"""Errors as OpenAI's API tells them, and the one place where an error of the client library becomes one."""

import math
import re
from dataclasses import dataclass

import msgspec

from paceline_client import (
    AccessDeniedError,
    ClientClosedError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PacelineError,
    RequestCancelledError,
    RequestTimeoutError,
    SlowConsumerError,
    UnavailableError,
    UnsupportedError,
)

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_DEFAULT_RETRY_S = 1.0
_TOO_LONG = "context_length_exceeded"
"""LiteLLM and LangChain tell it by words of the message alone."""


class ApiError(Exception):
    """An answer that is an error. `param` is the field at fault, `code` a constant for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = _INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        helps_retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.helps_retry = helps_retry
        """False: the same request fails again, whatever SDKs make of the status."""
        self.body = msgspec.json.encode(
            {"error": {"message": message, "type": kind, "param": param, "code": code}}, order="deterministic"
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % math.ceil(self.retry_after_s)))
            headers.append((b"retry-after-ms", b"%d" % math.ceil(self.retry_after_s * 1000)))
        if not self.helps_retry:
            headers.append((b"x-should-retry", b"false"))
        return headers


def refused(param: str, sentence: str, code: str | None = None) -> ApiError:
    """The request is wrong in this field."""
    return ApiError(400, f"{param}: {sentence}", param=param, code=code)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    kind: str
    code: str | None
    helps_retry: bool = True


_ANSWER_OF_REASON = {
    "PROMPT_TOO_LONG": _Answer(400, _INVALID, _TOO_LONG),
    "PERMISSION_DENIED": _Answer(403, "permission_error", "permission_denied"),
    "RESUME_MISMATCH": _Answer(409, _INVALID, "idempotency_conflict", helps_retry=False),
    "EXECUTORS_DIED": _Answer(500, _SERVER, "executors_died", helps_retry=False),
    "STEP_FAILED": _Answer(500, _SERVER, "step_failed", helps_retry=False),
}
# The first that fits.
_ANSWER_OF_KIND: tuple[tuple[type[PacelineError], _Answer], ...] = (
    (UnsupportedError, _Answer(400, _INVALID, "unsupported_parameter")),
    (InvalidRequestError, _Answer(400, _INVALID, None)),
    (NotFoundError, _Answer(404, _INVALID, "model_not_found")),
    (ConflictError, _Answer(409, _INVALID, "conflict", helps_retry=False)),
    (AccessDeniedError, _Answer(401, _INVALID, "invalid_api_key")),
    (OverloadedError, _Answer(429, "rate_limit_error", "rate_limit_exceeded")),
    (UnavailableError, _Answer(503, _SERVER, "unavailable")),
    (ClientClosedError, _Answer(503, _SERVER, "unavailable")),
    (RequestTimeoutError, _Answer(504, _SERVER, "timeout", helps_retry=False)),
    (RequestCancelledError, _Answer(409, _INVALID, "cancelled", helps_retry=False)),
    (SlowConsumerError, _Answer(500, _SERVER, "slow_reader", helps_retry=False)),
    (PacelineError, _Answer(500, _SERVER, None)),
)
_RETRIED = (429, 503)


def api_error(error: PacelineError, endpoint: str) -> ApiError:
    """In the names of the request's fields."""
    answer = _ANSWER_OF_REASON.get(error.reason or "") or next(a for k, a in _ANSWER_OF_KIND if isinstance(error, k))
    param = _param(error, endpoint) if answer.kind == _INVALID else None
    message = error.message
    if param is not None and error.violations and message.startswith(error.violations[0].field):
        message = param + message.removeprefix(error.violations[0].field)
    if answer.code == _TOO_LONG:
        message += f": this model's maximum context length is exceeded ({_TOO_LONG})"
    return ApiError(
        answer.status,
        message,
        kind=answer.kind,
        param=param,
        code=answer.code,
        retry_after_s=(error.retry_after or _DEFAULT_RETRY_S) if answer.status in _RETRIED else None,
        helps_retry=answer.helps_retry,
    )


_OWN_PARTS = re.compile(r"^(sampling|stopping|output|scheduling|speculation|chat)\.")
_PARAMS = {
    "request_id": "Idempotency-Key",
    "structured": "response_format",
    "chat": "messages",
    "token_ids": "prompt",
    "text": "prompt",
    "token_bytes": "logprobs",
}
_PARAMS_OF = {
    "chat/completions": {"prompt": "messages", "logprobs": "top_logprobs"},
    "responses": {
        **dict.fromkeys(("prompt", "chat", "text", "messages"), "input"),
        **dict.fromkeys(("structured", "response_format"), "text.format"),
        "max_tokens": "max_output_tokens",
        "template_arguments": "reasoning.effort",
    },
    "detokenize": {"token_ids": "tokens"},
}

_RENAMED = [
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^template_arguments\[reasoning_effort\]$", "reasoning_effort"),
        (r"^template_arguments\[(.*)\]$", r"chat_template_kwargs.\1"),
        (r"^template_arguments$", "chat_template_kwargs"),
        (r"^tool_choice\.mode$", "tool_choice"),
        (r"^tool_choice\.name$", "tool_choice.function.name"),
        (r"^(tools\[\d+\])\.parameters_json_schema", r"\1.parameters"),
        (
            r"^(tools\[\d+\]|messages\[\d+\]\.tool_calls\[\d+\])\.(name|parameters|strict|arguments)\b",
            r"\1.function.\2",
        ),
        (r"^(messages\[\d+\])\.reasoning$", r"\1.reasoning_content"),
    )
]
# What is in a function in chats stands beside its type there.
_RENAMED_OF = {"responses": [(pattern, name.replace(".function", "")) for pattern, name in _RENAMED]}


def _param(error: PacelineError, endpoint: str) -> str | None:
    """The field at fault by the name that it has in OpenAI's API; None where it is none of the request's."""
    path = error.violations[0].field if error.violations else error.metadata.get("feature", "")
    if not path:
        return "model" if isinstance(error, NotFoundError) else None
    path = _OWN_PARTS.sub("", path)
    first = re.split(r"[.\[]", path, maxsplit=1)[0]
    renamed = (_PARAMS | _PARAMS_OF.get(endpoint, {})).get(first)
    if renamed is not None:
        return renamed
    for pattern, name in _RENAMED_OF.get(endpoint, _RENAMED):
        path = pattern.sub(name, path)
    return path

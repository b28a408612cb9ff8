"""What an executor answers beside the plan protocol's values: its tokenizer, and why it refused a call.

Malformed answers are DivergenceErrors; nothing else checks form.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from google.rpc import error_details_pb2, status_pb2

from paceline.plan.codec import welcomes
from paceline.plan.codec.columns import MalformedError, parse
from paceline.plan.codec.tokenizers import TokenizerParts
from paceline.plan.hashes import tokenizer_digest
from paceline.plan.texts import MAX_NAME_BYTES, readable
from paceline.plan.values import Claim, ExecutorInfo
from paceline.v1 import executor_pb2
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.errors import (
    DivergenceError,
    LinkError,
    ProtocolMismatchError,
    StillLoadingError,
    StreamEndedError,
    TermSupersededError,
)

_SERVICE = "/paceline.v1.ExecutorService"
ATTACH_METHOD = f"{_SERVICE}/Attach"
GET_INFO_METHOD = f"{_SERVICE}/GetInfo"
GET_TOKENIZER_METHOD = f"{_SERVICE}/GetTokenizer"
GET_INFO_REQUEST = executor_pb2.GetInfoRequest().SerializeToString()
GET_TOKENIZER_REQUEST = executor_pb2.GetTokenizerRequest().SerializeToString()

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _divergence(read: Callable[_P, _R]) -> Callable[_P, _R]:
    """A malformed message ends its stream."""

    @wraps(read)
    def reading(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return read(*args, **kwargs)
        except MalformedError as error:
            raise divergence(error) from error

    return reading


def divergence(error: MalformedError) -> DivergenceError:
    return DivergenceError(f"the executor sent a malformed message: {error}")


@_divergence
def decode_info(data: bytes) -> ExecutorInfo:
    return welcomes.decode_info(data)


@_divergence
def add_tokenizer_part(parts: TokenizerParts, data: bytes) -> bool:
    """Return whether it is the last one."""
    return parts.add(data)


@_divergence
def decode_tokenizer(content: bytes, form: int) -> TokenizerSource:
    """`content` is of `TokenizerParts`; `form` that of the digest which its sender has announced."""
    whole = parse(executor_pb2.GetTokenizerResponse, content)
    older_prefix = (whole.bos_token_id,) if whole.add_bos and whole.HasField("bos_token_id") else ()
    return TokenizerSource(
        digest=tokenizer_digest(content, form),
        json=whole.tokenizer_json,
        chat_template=whole.chat_template if whole.HasField("chat_template") else None,
        bos_token_id=whole.bos_token_id if whole.HasField("bos_token_id") else None,
        eos_token_id=whole.eos_token_id if whole.HasField("eos_token_id") else None,
        end_token_ids=tuple(whole.end_token_ids),
        prefix_token_ids=tuple(whole.prefix_token_ids) or older_prefix,
        suffix_token_ids=tuple(whole.suffix_token_ids),
        special_tokens=tuple(sorted(whole.special_tokens.items())),
        defaults=welcomes.read_defaults(whole.default_sampling),
        default_system_text=whole.default_system_text if whole.HasField("default_system_text") else None,
        response_template=whole.response_template if whole.HasField("response_template") else None,
        tool_use_template=whole.tool_use_template if whole.HasField("tool_use_template") else None,
    )


@_divergence
def decode_refusal(sentence: str, details: bytes | None) -> LinkError:
    """`details` are the call's `grpc-status-details-bin`."""
    if details:
        for detail in parse(status_pb2.Status, details).details:
            if not detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                continue
            info = parse(error_details_pb2.ErrorInfo, detail.value)
            if info.reason == "TERM_SUPERSEDED":
                return _superseded(info)
            if info.reason == "PROTOCOL_MISMATCH":
                return ProtocolMismatchError(sentence)
            if info.reason == "LOADING":
                return StillLoadingError(sentence)
    return StreamEndedError(sentence)


_MAX_TERM_DIGITS = 20


def _superseded(info: error_details_pb2.ErrorInfo) -> TermSupersededError:
    said = info.metadata
    digits = said.get("holder_term", "")
    term = int(digits) if digits.isdecimal() and len(digits) <= _MAX_TERM_DIGITS else 0
    names = (readable(said.get(key, ""), MAX_NAME_BYTES) for key in ("holder_scheduler_id", "holder_address"))
    scheduler_id, address = names
    return TermSupersededError(Claim(term, scheduler_id, address))

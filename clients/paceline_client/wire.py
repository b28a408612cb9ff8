"""The border: the only module that knows `paceline.v1` and turns values into messages and messages into values.

Knows message types, the stub and channel options. Refuses to know state: every function here is pure, but for the
channel that `open_channel` makes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, EncodeError
from google.rpc import status_pb2

from paceline.v1 import inference_pb2 as pb
from paceline.v1 import sampling_pb2 as sampling_pb
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline_client.config import Tls
from paceline_client.errors import Detail, PacelineError, error_from_status
from paceline_client.requests import Chat, Output, Prompt, Request, Sampling, Scheduling, Stopping, Text, invalid
from paceline_client.results import Delta, FinishReason, Model, TokenLogprob, TokenLogprobs, Tokens, Usage

SessionRequest = pb.SessionRequest
SessionResponse = pb.SessionResponse
SessionCall = grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]

MAX_ACKNOWLEDGED_IDS = 4096
# A hundred years, as good as for ever: clocks and messages cannot hold every float.
_LONGEST_SECONDS = 100 * 365 * 86400.0
_MAX_RECEIVED_BYTES = 16 * 1024 * 1024
_STATUS_DETAILS = "grpc-status-details-bin"
_FINISH_REASONS = {
    sampling_pb.FINISH_REASON_STOP: FinishReason.STOP,
    sampling_pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    sampling_pb.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a completion. `reason` is None when the server says that it failed."""

    reason: FinishReason | None
    matched_stop: str | int | None
    usage: Usage


class ReceivedDelta(NamedTuple):
    """A delta as it arrived, with what is needed to check it. A tuple: there is one per token."""

    request_id: str
    completion: int
    delta: Delta
    rolling_hash: int
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class Received:
    """One message of a session. `drain_reason` is set when the server announces that it is going away."""

    deltas: tuple[ReceivedDelta, ...]
    failures: tuple[tuple[str, PacelineError], ...]
    drain_reason: str | None


# Channels


def open_channel(target: str, tls: Tls | None) -> grpc.aio.Channel:
    """A channel that dials for itself only: its failures to connect are its own, not those of an earlier channel.

    `InvalidRequestError` for a target that is no text.
    """
    options: list[tuple[str, str | int]] = [
        ("grpc.use_local_subchannel_pool", 1),
        # A proxy from the environment would swallow connections to loopback and to a cluster's own services.
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", _MAX_RECEIVED_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 5000),
    ]
    try:
        target.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise invalid("target", str(error)) from None
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    credentials = grpc.ssl_channel_credentials(tls.root_certificates, tls.private_key, tls.certificate_chain)
    return grpc.aio.secure_channel(target, credentials, options=options)


def open_session(channel: grpc.aio.Channel) -> SessionCall:
    """Start the Session call; nothing is known of the server until its first message."""
    return InferenceServiceStub(channel).Session()


def error_from_call(error: grpc.aio.AioRpcError) -> PacelineError:
    """The error for a call that ended with a status."""
    return error_from_status(error.code().value[0], error.details() or "", _details(error.trailing_metadata()))


def _details(metadata: Iterable[tuple[str, str | bytes]] | None) -> Sequence[Detail]:
    for key, value in metadata or ():
        if key == _STATUS_DETAILS and isinstance(value, bytes):
            try:
                return tuple(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return ()
    return ()


# Messages of a session


def generate_message(request: Request, *, max_bytes: int) -> pb.SessionRequest:
    """The request as it is sent; `InvalidRequestError` for what has no place in a message, or is too large."""
    message = pb.GenerateRequest()
    _set(message, "model", request.model)
    _set(message, "request_id", request.request_id)
    _set(message, "tenant", request.tenant)
    _set_prompt(message, request.prompt)
    _set_sampling(message.sampling, request.sampling)
    _set_stopping(message.stopping, request.stopping)
    _set_output(message.output, request.output)
    _set_scheduling(message, request.scheduling)
    if request.timeout.total_seconds is not None:
        message.timeout.CopyFrom(_duration(request.timeout.total_seconds))
    if (size := message.ByteSize()) > max_bytes:
        raise invalid("prompt", f"the request has {size} bytes, the limit is {max_bytes}")
    return pb.SessionRequest(generate=message)


def cancel_message(tenant: str, request_id: str) -> pb.SessionRequest:
    """End a request."""
    return pb.SessionRequest(cancel=pb.CancelRequest(tenant=tenant, request_id=request_id))


def acknowledge_message(request_ids: Sequence[str]) -> pb.SessionRequest:
    """Say that the ends of these requests arrived, at most `MAX_ACKNOWLEDGED_IDS` of them."""
    return pb.SessionRequest(acknowledge=pb.Acknowledge(request_ids=request_ids))


def heartbeat_message() -> pb.SessionRequest:
    """Say that the client is alive."""
    return pb.SessionRequest(heartbeat=pb.Heartbeat())


def read_response(response: pb.SessionResponse) -> Received:
    """One message of a session as values."""
    return Received(
        deltas=tuple([_read_delta(item.request_id, item.delta) for item in response.deltas]),
        failures=tuple((item.request_id, _read_error(item.error)) for item in response.failures),
        drain_reason=response.drain.reason or "the server is going away" if response.HasField("drain") else None,
    )


def _read_delta(request_id: str, delta: pb.Delta) -> ReceivedDelta:
    finish = _read_finish(delta.finish) if delta.HasField("finish") else None
    logprobs = delta.logprobs
    read = Delta(
        delta.text,
        tuple(delta.token_ids[:]),  # the slice is a list: iterating over the field itself costs three times as much
        delta.offset,
        delta.attempt,
        tuple([_read_logprobs(item) for item in logprobs]) if logprobs else (),
        finish.reason if finish else None,
    )
    return ReceivedDelta(request_id, delta.index, read, delta.rolling_hash, finish)


def _read_finish(finish: pb.Finish) -> Finish:
    which = finish.WhichOneof("matched")
    matched = None if which is None else finish.stop_text if which == "stop_text" else finish.stop_token_id
    usage = Usage(
        num_prompt_tokens=finish.usage.num_prompt_tokens,
        num_cached_tokens=finish.usage.num_cached_tokens,
        num_output_tokens=finish.usage.num_output_tokens,
    )
    return Finish(_FINISH_REASONS.get(finish.reason), matched, usage)


def _read_logprobs(item: sampling_pb.TokenLogprobs) -> TokenLogprobs:
    top = tuple(TokenLogprob(other.token_id, other.logprob) for other in item.top)
    return TokenLogprobs(item.token_id, item.logprob, top)


def _read_error(error: sampling_pb.RequestError) -> PacelineError:
    return error_from_status(error.code, error.message, error.details)


# Short calls


async def cancel(channel: grpc.aio.Channel, *, tenant: str, request_id: str, timeout_seconds: float) -> None:
    """End a request wherever it is."""
    request = pb.CancelRequest()
    _set(request, "tenant", tenant)
    _set(request, "request_id", request_id)
    await InferenceServiceStub(channel).Cancel(request, timeout=timeout_seconds)


async def list_models(channel: grpc.aio.Channel, *, timeout_seconds: float) -> list[Model]:
    """The models that attached executors serve."""
    response = await InferenceServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=timeout_seconds)
    return [_read_model(model) for model in response.models]


async def get_model(channel: grpc.aio.Channel, name: str, *, timeout_seconds: float) -> Model:
    """One model; the empty name is the only one there is."""
    request = pb.GetModelRequest()
    _set(request, "model", name)
    return _read_model((await InferenceServiceStub(channel).GetModel(request, timeout=timeout_seconds)).model)


async def tokenize(
    channel: grpc.aio.Channel, prompt: Prompt, *, model: str, with_texts: bool, timeout_seconds: float
) -> Tokens:
    """The tokens of a text or a chat."""
    request = pb.TokenizeRequest()
    _set(request, "model", model)
    _set(request, "return_token_texts", with_texts)
    _set_prompt(request, prompt)
    response = await InferenceServiceStub(channel).Tokenize(request, timeout=timeout_seconds)
    return Tokens(tuple(response.token_ids), tuple(response.token_texts), response.max_model_len)


async def detokenize(
    channel: grpc.aio.Channel,
    token_ids: Sequence[int],
    *,
    model: str,
    skip_special_tokens: bool | None,
    timeout_seconds: float,
) -> str:
    """The text of tokens."""
    request = pb.DetokenizeRequest()
    _set(request, "model", model)
    _set_all(request, "token_ids", token_ids)
    _set(request, "skip_special_tokens", skip_special_tokens)
    return (await InferenceServiceStub(channel).Detokenize(request, timeout=timeout_seconds)).text


def _read_model(model: pb.Model) -> Model:
    return Model(
        name=model.name,
        architecture=model.architecture,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        end_token_ids=tuple(model.end_token_ids),
        has_chat_template=model.has_chat_template,
        num_executors=model.num_executors,
        num_parameters=model.num_parameters or None,
        quantization=model.quantization,
        default_sampling=_read_sampling(model.default_sampling),
    )


# Parts of a request


def _set(message: object, name: str, value: object, path: str = "") -> None:
    """Set a field unless it is None. protobuf's complaints about type, range and encoding name the field."""
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError, EncodeError) as error:
        raise invalid(path + name, str(error)) from None


def _set_all(message: object, name: str, values: Sequence[object] | None, path: str = "") -> None:
    if not values:
        # Touching a list would mark the message around it as set.
        return
    try:
        getattr(message, name).extend(values)
    except (TypeError, ValueError, EncodeError) as error:
        raise invalid(path + name, str(error)) from None


def _set_prompt(message: pb.GenerateRequest | pb.TokenizeRequest, prompt: Prompt) -> None:
    match prompt:
        case Text(text):
            _set(message, "text", text)
        case Chat(messages):
            message.chat.SetInParent()
            for number, turn in enumerate(messages):
                added = message.chat.messages.add()
                _set(added, "role", turn.role, f"chat.messages[{number}].")
                _set(added, "content", turn.content, f"chat.messages[{number}].")
        case _:
            if isinstance(message, pb.TokenizeRequest):
                raise invalid("token_ids", "these are tokens already")
            message.token_ids.SetInParent()
            _set_all(message.token_ids, "ids", prompt.ids, "token_ids.")


def _set_sampling(message: sampling_pb.SamplingParams, sampling: Sampling) -> None:
    for name in _SAMPLING_SCALARS:
        _set(message, name, getattr(sampling, name), "sampling.")
    _set_all(message, "allowed_token_ids", sampling.allowed_token_ids, "sampling.")
    _set_all(message, "bad_words", sampling.bad_words, "sampling.")
    try:
        for token_id, bias in sampling.logit_bias.items():
            message.logit_bias[token_id] = bias
    except (AttributeError, TypeError, ValueError) as error:
        raise invalid("sampling.logit_bias", str(error)) from None


_SAMPLING_SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def _read_sampling(message: sampling_pb.SamplingParams) -> Sampling:
    return Sampling(
        temperature=message.temperature if message.HasField("temperature") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        min_p=message.min_p if message.HasField("min_p") else None,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else None,
    )


def _set_stopping(message: sampling_pb.StoppingParams, stopping: Stopping) -> None:
    for name in ("max_tokens", "min_tokens", "ignore_eos", "include_stop_str_in_output"):
        _set(message, name, getattr(stopping, name), "stopping.")
    _set_all(message, "stop", [stopping.stop] if isinstance(stopping.stop, str) else stopping.stop, "stopping.")
    _set_all(message, "stop_token_ids", stopping.stop_token_ids, "stopping.")


def _set_output(message: sampling_pb.OutputOptions, output: Output) -> None:
    for name in ("logprobs", "skip_special_tokens", "stream_interval"):
        _set(message, name, getattr(output, name), "output.")


def _set_scheduling(message: pb.GenerateRequest, scheduling: Scheduling) -> None:
    _set(message, "priority", scheduling.priority)
    _set(message, "cache_salt", scheduling.cache_salt)
    _set(message, "bypass_prefix_cache", scheduling.bypass_prefix_cache)


def sendable_seconds(seconds: float) -> float:
    """A limit as gRPC and protobuf can hold it: infinity and other huge ones are a hundred years."""
    return min(seconds, _LONGEST_SECONDS)


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(sendable_seconds(seconds) * 1e9))
    return duration

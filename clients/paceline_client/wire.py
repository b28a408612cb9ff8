"""The border: with `wire_requests`, the only module that knows `paceline.v1`.

Knows message types, the stub and channel options. Refuses to know state: every function is pure, but for the channel
that `open_channel` makes.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from paceline.v1 import inference_pb2 as pb
from paceline.v1 import sampling_pb2 as sampling_pb
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline_client.credentials import Credentials
from paceline_client.errors import ConnectionLostError, Detail, PacelineError, error_from_status
from paceline_client.requests import GenerationRequest, Prompt, Sampling
from paceline_client.results import (
    Delta,
    Estimate,
    Explanation,
    FinishReason,
    Model,
    RequestState,
    Times,
    TokenLogprob,
    TokenLogprobs,
    Tokens,
    Usage,
)
from paceline_client.wire_requests import Held, generate_request, set_all, set_attachment, set_field, set_prompt

SessionRequest = pb.SessionRequest
SessionResponse = pb.SessionResponse

MAX_ACKNOWLEDGED_IDS = 4096
_MAX_RECEIVED_BYTES = 16 * 1024 * 1024
_STATUS_DETAILS = "grpc-status-details-bin"
_STATUSES_OF_A_LOSS = frozenset(
    {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}
)
_FINISH_REASONS = {
    sampling_pb.FINISH_REASON_STOP: FinishReason.STOP,
    sampling_pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    sampling_pb.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}
_REQUEST_STATES = {
    pb.REQUEST_STATE_WAITING: RequestState.WAITING,
    pb.REQUEST_STATE_RUNNING: RequestState.RUNNING,
    pb.REQUEST_STATE_PREEMPTED: RequestState.PREEMPTED,
    pb.REQUEST_STATE_FINISHED: RequestState.FINISHED,
}


class SessionCall(Protocol):
    """A Session call under way. All but `cancel` raise grpc.aio.AioRpcError once it has ended with an error."""

    async def read(self) -> object:
        """The next SessionResponse, or something else at the end of a call that ended well."""

    async def write(self, request: pb.SessionRequest, /) -> None:
        """Send a message; waits while too much is unsent."""

    async def done_writing(self) -> None:
        """Send nothing more."""

    def cancel(self) -> bool:
        """End it at once. Does nothing to one that has ended."""


@dataclass(frozen=True, slots=True)
class ReceivedFinish:
    """`reason` is None when the server says that it failed."""

    reason: FinishReason | None
    matched_stop: str | int | None
    usage: Usage
    times: Times | None = None


class ReceivedDelta(NamedTuple):
    """A tuple: there is one per token."""

    request_id: str
    delta: Delta
    rolling_hash: int
    finish: ReceivedFinish | None


# A method of each other service that a port of ours may have, and what the port is then.
_OTHER_SERVICES = {
    "/paceline.v1.InferenceService/ListModels": "",
    "/paceline.v1.AdminService/ListExecutors": "the admin port of a scheduler; its API has another port, with "
    "`paceline up` the one before it",
    "/paceline.v1.ExecutorService/GetState": "the port of an executor; requests go to the API of a scheduler",
    "/grpc.health.v1.Health/Check": "a health port; the API of a scheduler has another port, with `paceline up` two "
    "before it",
}

# Channels


class CallChannel(NamedTuple):
    channel: grpc.aio.Channel
    credentials: Credentials = Credentials()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Asked for anew for each call, as a token may have changed."""
        return self.credentials.metadata()


def open_channel(
    target: str, credentials: Credentials, server_name: str | None, window_bytes: int | None = None
) -> CallChannel:
    """A channel that dials for itself only: its failures to connect are its own, not those of an earlier channel.

    `server_name` is whom it asks for, and whose certificate it expects unless the credentials say otherwise; None: the
    target. `window_bytes` may be under way on a stream at a time; None: as many as gRPC finds right.
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
    if window_bytes is not None:
        options += [("grpc.http2.lookahead_bytes", window_bytes), ("grpc.http2.bdp_probe", 0)]
    if server_name is not None:
        options.append(("grpc.default_authority", server_name))
    certificates = credentials.certificates()
    if certificates is None:
        return CallChannel(grpc.aio.insecure_channel(target, options=options), credentials)
    if expected := credentials.server_name or server_name:
        options.append(("grpc.ssl_target_name_override", expected))
    tls = grpc.ssl_channel_credentials(certificates.roots, certificates.key, certificates.chain)
    return CallChannel(grpc.aio.secure_channel(target, tls, options=options), credentials)


def open_session(on: CallChannel) -> SessionCall:
    return InferenceServiceStub(on.channel).Session(metadata=on.metadata())


def error_from_call(error: grpc.aio.AioRpcError) -> PacelineError:
    return error_from_status(error.code().value[0], error.details() or "", _details(error.trailing_metadata()))


@contextlib.contextmanager
def errors_of_calls() -> Iterator[None]:
    """Raises what ends the calls inside as a PacelineError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_call(error) from None
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise ConnectionLostError("the connection to the server was lost during the call") from None


def is_cancelled() -> bool:
    """Whether a CancelledError is the task's own; else that of its call, whose channel was closed."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


async def what_serves(on: CallChannel, *, timeout_seconds: float) -> str:
    """What answers there, as the end of a sentence, where it is not the API of a scheduler; empty if it may be."""
    for method, what in _OTHER_SERVICES.items():
        try:
            # Empty bytes are a message of any type.
            call: Callable[..., Awaitable[bytes]] = on.channel.unary_unary(method)
            await call(b"", timeout=timeout_seconds, metadata=on.metadata())
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                continue
            if error.code() in _STATUSES_OF_A_LOSS:
                return ""
        return what
    return "a gRPC server of something else, not the API of a scheduler"


def is_answered(error: grpc.aio.AioRpcError) -> bool:
    """The server's own code ended the call, and not gRPC for silence or a lost connection."""
    return error.code() not in _STATUSES_OF_A_LOSS or bool(_details(error.trailing_metadata()))


def _details(metadata: Iterable[tuple[str, str | bytes]] | None) -> Sequence[Detail]:
    for key, value in metadata or ():
        if key == _STATUS_DETAILS and isinstance(value, bytes):
            try:
                return tuple(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return ()
    return ()


# Messages of a session


def generate_message(
    request: GenerationRequest,
    held: tuple[Held, ...] = (),
    number: int = 1,
    waited_seconds: float = 0.0,
    *,
    max_bytes: int,
) -> pb.SessionRequest:
    """`InvalidRequestError` for what has no place in a message, or is too large."""
    message = generate_request(request, max_bytes=max_bytes)
    set_attachment(message, held, number, waited_seconds, max_bytes=max_bytes)
    return pb.SessionRequest(generate=message)


def cancel_message(tenant: str, request_id: str) -> pb.SessionRequest:
    return pb.SessionRequest(cancel=pb.CancelRequest(tenant=tenant, request_id=request_id))


def acknowledge_message(request_ids: Sequence[str]) -> pb.SessionRequest:
    """At most `MAX_ACKNOWLEDGED_IDS` of them."""
    return pb.SessionRequest(acknowledge=pb.Acknowledge(request_ids=request_ids))


def heartbeat_message() -> pb.SessionRequest:
    return pb.SessionRequest(heartbeat=pb.Heartbeat())


def read_deltas(response: pb.SessionResponse) -> list[ReceivedDelta]:
    deltas = []
    for item in response.deltas:
        delta = item.delta
        finish = _read_finish(delta.finish) if delta.HasField("finish") else None
        logprobs = delta.logprobs
        read = Delta(
            delta.text,
            tuple(delta.token_ids[:]),  # a slice is a list: iterating over the field itself costs three times as much
            delta.offset,
            delta.attempt,
            tuple([_read_logprobs(each) for each in logprobs]) if logprobs else (),
            finish.reason if finish else None,
            delta.index,
            tuple([_read_logprobs(each) for each in delta.prompt_logprobs]) if delta.prompt_logprobs else (),
        )
        deltas.append(ReceivedDelta(item.request_id, read, delta.rolling_hash, finish))
    return deltas


def read_failures(response: pb.SessionResponse) -> list[tuple[str, PacelineError]]:
    """Each with the id of its request."""
    return [(item.request_id, _read_error(item.error)) for item in response.failures]


def drain_reason(response: pb.SessionResponse) -> str | None:
    """None: the server stays."""
    return response.drain.reason or "the server is going away" if response.HasField("drain") else None


def _read_finish(finish: pb.Finish) -> ReceivedFinish:
    which = finish.WhichOneof("matched")
    matched = None if which is None else finish.stop_text if which == "stop_text" else finish.stop_token_id
    usage = Usage(
        num_prompt_tokens=finish.usage.num_prompt_tokens,
        num_cached_tokens=finish.usage.num_cached_tokens,
        num_output_tokens=finish.usage.num_output_tokens,
        num_draft_tokens=finish.usage.num_draft_tokens,
        num_accepted_draft_tokens=finish.usage.num_accepted_draft_tokens,
    )
    times = _read_times(finish.times) if finish.HasField("times") else None
    return ReceivedFinish(_FINISH_REASONS.get(finish.reason), matched, usage, times)


def _read_times(times: pb.PhaseTimes) -> Times:
    phases = (times.queued, times.prefill, times.decode, times.preempted)
    return Times(*(phase.ToNanoseconds() / 1e9 for phase in phases))


def _read_logprobs(item: sampling_pb.TokenLogprobs) -> TokenLogprobs:
    top = tuple(TokenLogprob(other.token_id, other.logprob, _read_bytes(other)) for other in item.top)
    return TokenLogprobs(item.token_id, item.logprob, top, _read_bytes(item))


def _read_bytes(item: sampling_pb.TokenLogprobs | sampling_pb.TokenLogprob) -> bytes | None:
    return item.token_bytes if item.HasField("token_bytes") else None


def _read_error(error: sampling_pb.RequestError) -> PacelineError:
    return error_from_status(error.code, error.message, error.details)


# Short calls


async def cancel(on: CallChannel, *, tenant: str, request_id: str, timeout_seconds: float) -> None:
    request = pb.CancelRequest()
    set_field(request, "tenant", tenant)
    set_field(request, "request_id", request_id)
    await InferenceServiceStub(on.channel).Cancel(request, timeout=timeout_seconds, metadata=on.metadata())


async def explain(on: CallChannel, *, tenant: str, request_id: str, timeout_seconds: float) -> Explanation:
    request = pb.ExplainRequest()
    set_field(request, "tenant", tenant)
    set_field(request, "request_id", request_id)
    response = await InferenceServiceStub(on.channel).Explain(request, timeout=timeout_seconds, metadata=on.metadata())
    return read_explanation(response)


def read_explanation(response: pb.ExplainResponse) -> Explanation:
    return Explanation(
        state=_REQUEST_STATES.get(response.state, RequestState.UNKNOWN),
        waiting_for=response.waiting_for,
        queue_position=response.queue_position,
        num_preemptions=response.num_preemptions,
        preemption_reason=response.preemption_reason,
        executor=response.executor,
        num_computed_tokens=response.num_computed_tokens,
        num_output_tokens=response.num_output_tokens,
        num_draft_tokens=response.num_draft_tokens,
        num_accepted_draft_tokens=response.num_accepted_draft_tokens,
        times=_read_times(response.times) if response.HasField("times") else None,
    )


async def estimate(on: CallChannel, request: GenerationRequest, *, max_bytes: int, timeout_seconds: float) -> Estimate:
    message = pb.EstimateRequest(request=generate_request(request, max_bytes=max_bytes))
    response = await InferenceServiceStub(on.channel).Estimate(message, timeout=timeout_seconds, metadata=on.metadata())
    is_refused = response.HasField("would_be_refused")
    return Estimate(
        time_to_first_token_seconds=None if is_refused else response.time_to_first_token.ToNanoseconds() / 1e9,
        inter_token_seconds=None if is_refused else response.inter_token_time.ToNanoseconds() / 1e9,
        num_prompt_tokens=response.num_prompt_tokens,
        num_cached_tokens=response.num_cached_tokens,
        refusal=_read_error(response.would_be_refused) if is_refused else None,
    )


async def list_models(on: CallChannel, *, timeout_seconds: float) -> list[Model]:
    response = await InferenceServiceStub(on.channel).ListModels(
        pb.ListModelsRequest(), timeout=timeout_seconds, metadata=on.metadata()
    )
    return [_read_model(model) for model in response.models]


async def get_model(on: CallChannel, name: str, *, timeout_seconds: float) -> Model:
    request = pb.GetModelRequest()
    set_field(request, "model", name)
    return _read_model(
        (
            await InferenceServiceStub(on.channel).GetModel(request, timeout=timeout_seconds, metadata=on.metadata())
        ).model
    )


async def tokenize(on: CallChannel, prompt: Prompt, *, model: str, with_texts: bool, timeout_seconds: float) -> Tokens:
    request = pb.TokenizeRequest()
    set_field(request, "model", model)
    set_field(request, "return_token_texts", with_texts)
    set_prompt(request, prompt)
    response = await InferenceServiceStub(on.channel).Tokenize(request, timeout=timeout_seconds, metadata=on.metadata())
    return Tokens(tuple(response.token_ids), tuple(response.token_texts), response.max_model_len)


async def detokenize(
    on: CallChannel,
    token_ids: Sequence[int],
    *,
    model: str,
    skip_special_tokens: bool | None,
    preceding_token_ids: Sequence[int],
    timeout_seconds: float,
) -> str:
    request = pb.DetokenizeRequest()
    set_field(request, "model", model)
    set_all(request, "token_ids", token_ids)
    set_all(request, "preceding_token_ids", preceding_token_ids)
    set_field(request, "skip_special_tokens", skip_special_tokens)
    return (
        await InferenceServiceStub(on.channel).Detokenize(request, timeout=timeout_seconds, metadata=on.metadata())
    ).text


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
        default_system_text=model.default_system_text,
        weight_bytes=model.weight_bytes or None,
        weights_digest=model.weights_digest,
        structured_output=model.structured_output,
    )


def _read_sampling(message: sampling_pb.SamplingParams) -> Sampling:
    return Sampling(
        temperature=message.temperature if message.HasField("temperature") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        min_p=message.min_p if message.HasField("min_p") else None,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else None,
    )

"""The client for asyncio: requests over one shared session, and the short calls beside it.

Knows the calls a user makes. Refuses to know how they travel: `connection`, `session` and `request_run` do.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import grpc.aio

from paceline_client import wire
from paceline_client.addresses import DEFAULT_PORT, Addresses, Target
from paceline_client.channel import GrpcChannel
from paceline_client.config import Keepalive, Limits, Retry, Timeout, Tls
from paceline_client.connection import Connection
from paceline_client.credentials import Credentials
from paceline_client.dialler import SharedChannel
from paceline_client.errors import (
    ConnectionLostError,
    PacelineError,
    RequestCancelledError,
    RequestTimeoutError,
    UnavailableError,
)
from paceline_client.forms import FormLike
from paceline_client.request_run import RequestRun
from paceline_client.requests import (
    GenerationRequest,
    MessageLike,
    OutputLike,
    Prompt,
    SamplingLike,
    SchedulingLike,
    StoppingLike,
    TemplateValue,
    TimeoutLike,
    ToolChoiceLike,
    ToolLike,
    make_prompt,
    make_request,
    make_timeout,
)
from paceline_client.results import Delta, Estimate, Explanation, Model, Result, Tokens
from paceline_client.session import NOT_HERE
from paceline_client.tracebacks import at_the_call
from paceline_client.wire_requests import sendable_seconds

DEFAULT_TARGET = f"localhost:{DEFAULT_PORT}"
_READY_PAUSE_SECONDS = 0.1

Answer = TypeVar("Answer")


class AsyncStream:
    """The output of one request as it comes: iterate over it once, then read `result`.

    The request is sent when the first delta is asked for. Leaving the loop early, `aclose`, and the cancellation of the
    task that iterates each cancel the request on the server. Several tasks that iterate share the deltas: each goes
    to one of them.
    """

    def __init__(self, run: RequestRun, request: GenerationRequest) -> None:
        self._run = run
        self._request = request
        self._deltas = run.deltas()
        # The generator serves one caller at a time.
        self._turn = asyncio.Lock()
        self._is_closed = False

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._request.request_id

    @property
    def result(self) -> Result:
        """The whole output. ValueError before the last delta was read.

        Raises the error that ended the request; `RequestCancelledError` when it was left before its end.
        """
        match self._run.end:
            case Result() as result:
                return result
            case PacelineError() as error:
                raise at_the_call(error) from None
        raise ValueError(f"request {self.request_id} has no result yet: read its deltas to the end")

    async def collect(self) -> Result:
        """Read the rest and return the result."""
        try:
            async for _ in self:
                pass
        except PacelineError as error:
            raise at_the_call(error) from None
        return self.result

    async def aclose(self) -> None:
        """Stop. A request that still runs is cancelled; the iteration of a task that waits for a delta ends."""
        self._is_closed = True
        self._run.leave()
        async with self._turn:
            await self._deltas.aclose()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        async with self._turn:
            if self._is_closed:
                raise StopAsyncIteration
            try:
                return await anext(self._deltas)
            except RequestCancelledError as error:
                if not self._is_closed:
                    raise at_the_call(error) from None
                raise StopAsyncIteration from None
            except PacelineError as error:
                raise at_the_call(error, is_logged=False) from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncClient:
    """Talks to a scheduler. Made without I/O; connects when it is first used, and again whenever that is needed.

    `target` is `host:port`, or `host` where the port is 50051; several of them, in one text with commas or as a list,
    where schedulers stand by for each other; or `dns:///name:port` for all addresses of a name. `InvalidRequestError`
    when it is none of these.

    `token` is a bearer token, or the file that has it, which is read again for every call.

    Use it on one event loop, and close it: `async with AsyncClient("localhost:50051") as client`.
    """

    def __init__(
        self,
        target: Target = DEFAULT_TARGET,
        *,
        tls: Tls | None = None,
        token: str | Path | None = None,
        timeout: TimeoutLike | None = None,
        retry: Retry | None = None,
        keepalive: Keepalive | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._timeout = make_timeout(timeout, Timeout())
        self._retry = retry or Retry()
        self._limits = limits or Limits()
        addresses = Addresses(target, default_port=DEFAULT_PORT)
        credentials = Credentials(tls, token)
        self._connection = Connection(
            addresses,
            dial=lambda address: GrpcChannel(address, credentials, server_name=addresses.name_of(address)),
            retry=self._retry,
            keepalive=keepalive or Keepalive(),
            limits=self._limits,
        )

    @classmethod
    async def connect(
        cls,
        target: Target = DEFAULT_TARGET,
        *,
        tls: Tls | None = None,
        token: str | Path | None = None,
        timeout: TimeoutLike | None = None,  # noqa: ASYNC109  limits of several kinds, which asyncio.timeout cannot hold
        retry: Retry | None = None,
        keepalive: Keepalive | None = None,
        limits: Limits | None = None,
    ) -> Self:
        """A client that is connected already. `ConnectFailedError` when the server cannot be reached."""
        client = cls(target, tls=tls, token=token, timeout=timeout, retry=retry, keepalive=keepalive, limits=limits)
        try:
            await client.ensure_connected()
        except BaseException:
            await client.close()
            raise
        return client

    async def ensure_connected(self) -> None:
        """Connect now rather than at the first request. `ConnectFailedError` when the server cannot be reached."""
        try:
            await self._endpoint()
        except PacelineError as error:
            raise at_the_call(error, is_logged=False) from None

    @property
    def trouble(self) -> str:
        """What keeps the client from a server at this moment, in words; empty while nothing does."""
        return self._connection.trouble

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        token_ids: Sequence[int] | None = None,
        sampling: SamplingLike | None = None,
        stopping: StoppingLike | None = None,
        output: OutputLike | None = None,
        scheduling: SchedulingLike | None = None,
        structured: FormLike | None = None,
        tools: Sequence[ToolLike] | None = None,
        tool_choice: ToolChoiceLike | None = None,
        template_arguments: Mapping[str, TemplateValue] | None = None,
        continue_final_message: bool | None = None,
        model: str | None = None,
        tenant: str = "",
        request_id: str | None = None,
        timeout: TimeoutLike | None = None,  # noqa: ASYNC109  it travels with the request, and the server keeps it too
        idempotent: bool = False,
        trace: Mapping[str, str] | None = None,
    ) -> Result:
        """The whole output for a text, a chat or token ids, exactly one of them. Raises a `PacelineError`.

        `idempotent`: one of this id and tenant that runs, or has ended within 30 s, is read from its beginning, and
        whoever read it so far gets `ConflictError`; else that is what an id in use costs the newcomer. `trace`: the W3C
        headers `traceparent` and `tracestate` of the span that asks; None: those of OpenTelemetry's current span.
        """
        stream = self.stream(
            prompt,
            messages=messages,
            token_ids=token_ids,
            sampling=sampling,
            stopping=stopping,
            output=output,
            scheduling=scheduling,
            structured=structured,
            tools=tools,
            tool_choice=tool_choice,
            template_arguments=template_arguments,
            continue_final_message=continue_final_message,
            model=model,
            tenant=tenant,
            request_id=request_id,
            timeout=timeout,
            idempotent=idempotent,
            trace=trace,
        )
        async with stream:
            try:
                return await stream.collect()
            except PacelineError as error:
                raise at_the_call(error) from None

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        token_ids: Sequence[int] | None = None,
        sampling: SamplingLike | None = None,
        stopping: StoppingLike | None = None,
        output: OutputLike | None = None,
        scheduling: SchedulingLike | None = None,
        structured: FormLike | None = None,
        tools: Sequence[ToolLike] | None = None,
        tool_choice: ToolChoiceLike | None = None,
        template_arguments: Mapping[str, TemplateValue] | None = None,
        continue_final_message: bool | None = None,
        model: str | None = None,
        tenant: str = "",
        request_id: str | None = None,
        timeout: TimeoutLike | None = None,
        idempotent: bool = False,
        trace: Mapping[str, str] | None = None,
    ) -> AsyncStream:
        """The same as it comes: iterate over the deltas, then read `.result`."""
        request = make_request(
            make_prompt(
                prompt,
                messages,
                token_ids,
                tools=tools,
                tool_choice=tool_choice,
                template_arguments=template_arguments,
                continue_final_message=continue_final_message,
            ),
            sampling=sampling,
            stopping=stopping,
            output=output,
            scheduling=scheduling,
            structured=structured,
            model=model,
            tenant=tenant,
            timeout=make_timeout(timeout, self._timeout),
            request_id=request_id,
            is_idempotent=idempotent,
            trace=trace,
        )
        return AsyncStream(RequestRun(self._connection, request, self._retry), request)

    async def estimate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        token_ids: Sequence[int] | None = None,
        sampling: SamplingLike | None = None,
        stopping: StoppingLike | None = None,
        output: OutputLike | None = None,
        scheduling: SchedulingLike | None = None,
        structured: FormLike | None = None,
        tools: Sequence[ToolLike] | None = None,
        tool_choice: ToolChoiceLike | None = None,
        template_arguments: Mapping[str, TemplateValue] | None = None,
        continue_final_message: bool | None = None,
        model: str | None = None,
        tenant: str = "",
        timeout: TimeoutLike | None = None,  # noqa: ASYNC109  the one that the request would have
    ) -> Estimate:
        """What would become of a request if it were sent now; nothing is run."""
        request = make_request(
            make_prompt(
                prompt,
                messages,
                token_ids,
                tools=tools,
                tool_choice=tool_choice,
                template_arguments=template_arguments,
                continue_final_message=continue_final_message,
            ),
            sampling=sampling,
            stopping=stopping,
            output=output,
            scheduling=scheduling,
            structured=structured,
            model=model,
            tenant=tenant,
            timeout=make_timeout(timeout, self._timeout),
        )
        return await self._call(
            lambda channel, seconds: wire.estimate(
                channel, request, max_bytes=self._limits.max_request_bytes, timeout_seconds=seconds
            )
        )

    async def explain(self, request_id: str, *, tenant: str = "") -> Explanation:
        """Where a request is and what it waits for. `NotFoundError` when it is unknown or forgotten."""
        return await self._call(
            lambda channel, seconds: wire.explain(
                channel, tenant=tenant, request_id=request_id, timeout_seconds=seconds
            )
        )

    async def cancel(self, request_id: str, *, tenant: str = "") -> None:
        """End a request wherever it is, also one of another client. `NotFoundError` when it is unknown or finished."""
        await self._call(
            lambda channel, seconds: wire.cancel(channel, tenant=tenant, request_id=request_id, timeout_seconds=seconds)
        )

    async def list_models(self) -> list[Model]:
        """The models that can be used now."""
        return await self._call(lambda channel, seconds: wire.list_models(channel, timeout_seconds=seconds))

    async def get_model(self, model: str | None = None) -> Model:
        """One model; None is the only one there is. `NotFoundError` when it is not served."""
        return await self._call(lambda channel, seconds: wire.get_model(channel, model or "", timeout_seconds=seconds))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        tools: Sequence[ToolLike] | None = None,
        tool_choice: ToolChoiceLike | None = None,
        template_arguments: Mapping[str, TemplateValue] | None = None,
        continue_final_message: bool | None = None,
        model: str | None = None,
        with_texts: bool = False,
    ) -> Tokens:
        """The tokens that `generate` would make of a text or a chat."""
        prompt: Prompt = make_prompt(
            text,
            messages,
            tools=tools,
            tool_choice=tool_choice,
            template_arguments=template_arguments,
            continue_final_message=continue_final_message,
        )
        return await self._call(
            lambda channel, seconds: wire.tokenize(
                channel, prompt, model=model or "", with_texts=with_texts, timeout_seconds=seconds
            )
        )

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        skip_special_tokens: bool | None = None,
        preceding_token_ids: Sequence[int] = (),
    ) -> str:
        """The text of token ids, behind those that precede, such as a prompt's: a model may leave out the first space
        of a text. `InvalidRequestError` when one is outside the vocabulary.
        """
        return await self._call(
            lambda channel, seconds: wire.detokenize(
                channel,
                token_ids,
                model=model or "",
                skip_special_tokens=skip_special_tokens,
                preceding_token_ids=preceding_token_ids,
                timeout_seconds=seconds,
            )
        )

    async def wait_until_ready(self, timeout_seconds: float, *, num_executors: int = 1) -> list[Model]:
        """The models, once this many executors serve any. `UnavailableError` when that does not come in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while True:
            error: PacelineError
            try:
                models = await self.list_models()
                if sum(model.num_executors for model in models) >= num_executors:
                    return models
                error = UnavailableError("the scheduler answers, and no executor is attached to it yet")
            except (UnavailableError, RequestTimeoutError, RequestCancelledError) as no_answer:  # it is going away
                error = no_answer
            if loop.time() + _READY_PAUSE_SECONDS >= deadline:
                raise UnavailableError(f"not ready after {timeout_seconds:g} s: {error}", reason="NOT_READY") from error
            await asyncio.sleep(_READY_PAUSE_SECONDS)

    async def close(self) -> None:
        """Cancel what runs and disconnect. Closing twice does nothing."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, call: Callable[[wire.CallChannel, float], Awaitable[Answer]]) -> Answer:
        try:
            return await self._call_until_answered(call)
        except PacelineError as error:
            raise at_the_call(error, is_logged=False) from None

    async def _call_until_answered(self, call: Callable[[wire.CallChannel, float], Awaitable[Answer]]) -> Answer:
        """A short call. It is made again where another server is to be asked, or the connection was lost."""
        loop = asyncio.get_running_loop()
        endpoint = await self._endpoint()
        deadline = loop.time() + self._timeout.call_seconds
        num_losses = 0
        while True:
            is_token_replaced = endpoint.channel.token_watch()
            try:
                with self._connection.use(endpoint) as channel:
                    answer = await call(channel.calls, sendable_seconds(deadline - loop.time()))
            except grpc.aio.AioRpcError as refusal:
                if refusal.code() is grpc.StatusCode.UNAUTHENTICATED and is_token_replaced():
                    continue
                error = wire.error_from_call(refusal)
                if wire.is_answered(refusal) and error.reason not in NOT_HERE:
                    raise await self._connection.explained(error, endpoint) from None
            except asyncio.CancelledError:
                if wire.is_cancelled():
                    raise
                error = ConnectionLostError("the connection to the server was lost during the call")
            else:
                self._connection.served(endpoint)
                return answer
            self._connection.turned_away(endpoint, error)
            if error.reason not in NOT_HERE:
                num_losses += 1
            is_given_up = isinstance(error, RequestTimeoutError) or num_losses >= self._retry.max_attempts
            if is_given_up or loop.time() + (error.retry_after or 0.0) >= deadline:
                raise error
            endpoint = await self._endpoint(deadline - loop.time())

    async def _endpoint(self, at_most_seconds: float = math.inf) -> SharedChannel[GrpcChannel]:
        return await self._connection.endpoint(
            connect_seconds=min(self._timeout.connect_seconds, at_most_seconds),
            refused_seconds=self._timeout.refused_seconds,
        )

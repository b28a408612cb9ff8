"""The client for threads: the twin of `async_client`, which it runs on an event loop of its own thread.

Knows how to wait. Everything else is the async client's: the same names, arguments, results and errors. One `Client`
may be used from several threads at once.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from paceline_client.addresses import Target
from paceline_client.async_client import DEFAULT_TARGET, AsyncClient, AsyncStream
from paceline_client.config import Keepalive, Limits, Retry, Tls
from paceline_client.errors import ClientClosedError, PacelineError
from paceline_client.forms import FormLike
from paceline_client.loop_thread import LoopThread
from paceline_client.requests import (
    MessageLike,
    OutputLike,
    SamplingLike,
    SchedulingLike,
    StoppingLike,
    TemplateValue,
    TimeoutLike,
    ToolChoiceLike,
    ToolLike,
)
from paceline_client.results import Delta, Result
from paceline_client.tracebacks import at_the_call

Answer = TypeVar("Answer")
_P = ParamSpec("_P")


class Stream:
    """The output of one request as it comes: iterate over it once, then read `result`.

    The request is sent when the first delta is asked for. `close`, the end of a `with` block, and dropping the stream
    each cancel a request that still runs. Several threads that iterate share the deltas: each goes to one of them.
    """

    def __init__(self, stream: AsyncStream, loop_thread: LoopThread) -> None:
        self._stream = stream
        self._loop_thread = loop_thread

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._stream.request_id

    @property
    def result(self) -> Result:
        """The whole output. ValueError before the last delta was read.

        Raises the error that ended the request; `RequestCancelledError` when it was left before its end.
        """
        return self._stream.result

    def collect(self) -> Result:
        """Read the rest and return the result."""
        return _wait_for(self._loop_thread, self._stream.collect())

    def close(self) -> None:
        """Stop. A request that still runs is cancelled; the iteration of a thread that waits for a delta ends."""
        with contextlib.suppress(ClientClosedError):
            self._loop_thread.run(self._stream.aclose())

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        delta = _wait_for(self._loop_thread, _next(self._stream))
        if delta is None:
            raise StopIteration
        return delta

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _waited_for(
    method: Callable[Concatenate[AsyncClient, _P], Coroutine[Any, Any, Answer]],
) -> Callable[Concatenate["Client", _P], Answer]:
    """The same call for threads."""

    @functools.wraps(method)
    def wait(self: "Client", /, *args: _P.args, **kwargs: _P.kwargs) -> Answer:
        return _wait_for(self._loop_thread, method(self._client, *args, **kwargs))

    return wait


class Client:
    """Talks to a scheduler. Made without I/O; connects when it is first used, and again whenever that is needed.

    `target` is what `AsyncClient` takes. Close it: `with Client("localhost:50051") as client`. A client that was used
    must not be used after a fork.
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
        self._client = AsyncClient(
            target, tls=tls, token=token, timeout=timeout, retry=retry, keepalive=keepalive, limits=limits
        )
        self._loop_thread = LoopThread("paceline-client")
        # Also when the client is dropped without being closed, and when the interpreter ends.
        self._finalizer = weakref.finalize(self, _close, self._client, self._loop_thread)

    @classmethod
    def connect(
        cls,
        target: Target = DEFAULT_TARGET,
        *,
        tls: Tls | None = None,
        token: str | Path | None = None,
        timeout: TimeoutLike | None = None,
        retry: Retry | None = None,
        keepalive: Keepalive | None = None,
        limits: Limits | None = None,
    ) -> Self:
        """A client that is connected already. `ConnectFailedError` when the server cannot be reached."""
        client = cls(target, tls=tls, token=token, timeout=timeout, retry=retry, keepalive=keepalive, limits=limits)
        try:
            client.ensure_connected()
        except BaseException:
            client.close()
            raise
        return client

    # As AsyncClient has them, one parameter like the other.
    ensure_connected = _waited_for(AsyncClient.ensure_connected)
    generate = _waited_for(AsyncClient.generate)
    estimate = _waited_for(AsyncClient.estimate)
    explain = _waited_for(AsyncClient.explain)
    cancel = _waited_for(AsyncClient.cancel)
    list_models = _waited_for(AsyncClient.list_models)
    get_model = _waited_for(AsyncClient.get_model)
    tokenize = _waited_for(AsyncClient.tokenize)
    detokenize = _waited_for(AsyncClient.detokenize)
    wait_until_ready = _waited_for(AsyncClient.wait_until_ready)

    @property
    def trouble(self) -> str:
        """What keeps the client from a server at this moment, in words; empty while nothing does."""
        return self._client.trouble

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
    ) -> Stream:
        """The same as it comes: iterate over the deltas, then read `.result`."""
        stream = self._client.stream(
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
        return Stream(stream, self._loop_thread)

    def close(self) -> None:
        """Cancel what runs, disconnect, and join the thread. Closing twice does nothing."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _wait_for(loop_thread: LoopThread, work: Coroutine[Any, Any, Answer]) -> Answer:
    try:
        return loop_thread.run(work)
    except PacelineError as error:
        raise at_the_call(error) from None


async def _next(stream: AsyncStream) -> Delta | None:
    # A coroutine cannot raise StopIteration, and StopAsyncIteration means nothing to a thread.
    return await anext(stream, None)


def _close(client: AsyncClient, loop_thread: LoopThread) -> None:
    if loop_thread.is_running:
        with contextlib.suppress(PacelineError):
            loop_thread.run(client.close())
    loop_thread.close()

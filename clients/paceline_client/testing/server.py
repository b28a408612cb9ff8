"""A fake scheduler on loopback, on a thread of its own: for tests of asynchronous and of threaded code alike."""

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import grpc.aio

from paceline.v1 import inference_pb2 as pb
from paceline.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from paceline_client.loop_thread import LoopThread
from paceline_client.testing.script import Break, Fail, Script
from paceline_client.testing.servicer import FakeServicer, Seen

DEFAULT_MODEL = pb.Model(
    name="fake",
    architecture="llama",
    max_model_len=2048,
    vocab_size=1000,
    end_token_ids=[2],
    has_chat_template=True,
    num_executors=1,
    num_parameters=1_000_000,
    quantization="Q4_1",
)


class FakeServer:
    """Plays one script for every request. Use it in a `with` or an `async with` block."""

    def __init__(
        self,
        script: Script = (),
        *,
        models: Sequence[pb.Model] = (DEFAULT_MODEL,),
        heartbeat_seconds: float | None = 0.1,
        break_after: Sequence[int] = (),
        port: int = 0,
    ) -> None:
        """`break_after`: the first session breaks when it has said so many deltas, the second after the second number.

        Sessions after the last number do not break by themselves. Requests play on, for whoever comes back to them.
        """
        self._script = script
        self._models = models
        self._heartbeat_seconds = heartbeat_seconds
        self._break_after = break_after
        self._port = port
        self._loop_thread = LoopThread("paceline-fake-server")
        self._server: grpc.aio.Server | None = None
        self._servicer: FakeServicer | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    @property
    def seen(self) -> Seen:
        return self._running().seen

    def wait_for(self, condition: Callable[[Seen], bool], timeout_seconds: float = 10.0) -> None:
        """TimeoutError when the condition is not met in time."""
        self._loop_thread.run(_poll(lambda: condition(self.seen), timeout_seconds))

    async def seen_that(self, condition: Callable[[Seen], bool], timeout_seconds: float = 10.0) -> None:
        """The same for asynchronous tests."""
        await _poll(lambda: condition(self.seen), timeout_seconds)

    def release(self) -> None:
        """Let every `Hold` pass, also later ones."""
        self._loop_thread.run(_call(self._running().released.set))

    def refuse_resumes(self, *failures: Fail) -> None:
        """Refuse whoever comes back to a request, once for each of these failures."""
        self._running().resume_refusals += failures

    def refuse_sessions(self, refusal: Break | None) -> None:
        """End every new session at once with this status; None: take them again."""
        self._running().session_refusal = refusal

    def turn_away(self, refusal: Fail | None) -> None:
        """Refuse every request and short call, as a standby does; None: take them again."""
        self._running().refusal = refusal

    def keep_waiting(self, waiting_for: str) -> None:
        """What every request waits for from now on, for those who ask."""
        self._running().waiting_for = waiting_for

    def die(self) -> None:
        """End every session and forget every request, as if scheduler and executors had died and come up again."""
        self._loop_thread.run(_call(self._running().die))

    def set_models(self, models: Sequence[pb.Model]) -> None:
        self._running().models = list(models)

    def start(self) -> None:
        self._loop_thread.run(self._start())

    def stop(self) -> None:
        """Stopping twice does nothing."""
        server, self._server = self._server, None
        if server is not None:
            self._loop_thread.run(server.stop(None))
        self._loop_thread.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    async def _start(self) -> None:
        self._servicer = FakeServicer(
            self._script,
            models=self._models,
            heartbeat_seconds=self._heartbeat_seconds,
            break_after=self._break_after,
        )
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_InferenceServiceServicer_to_server(self._servicer, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        await self._server.start()

    def _running(self) -> FakeServicer:
        if self._servicer is None:
            raise RuntimeError("the fake server was not started: use it in a with block")
        return self._servicer


async def _poll(condition: Callable[[], bool], timeout_seconds: float) -> None:
    async with asyncio.timeout(timeout_seconds):
        # What is waited for happens on another thread's loop, where no event of this one can be set.
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def _call(function: Callable[[], None]) -> None:
    function()

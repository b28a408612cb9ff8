"""Chats rendered through a model's template, by a process of its own for each template.

`chat_worker` knows what a template may do there.
"""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from paceline.v1.inference_pb2 import ChatMessage
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.errors import InvalidRequestError, QueueFullError

_MAX_RENDERERS = 8
_LENGTH_BYTES = 4
_RETRY_AFTER_S = 0.5
_MAX_ANSWER_BYTES = 256 * 1024 * 1024
_NOT_IN_TIME = "it takes too long, or needs too much memory"
_EXIT_S = 0.5  # until an idle process ends
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class RenderLimits:
    max_render_s: float = 2.0
    max_start_s: float = 10.0
    max_bytes: int = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """Equal sources share a process."""

    template: str
    special_tokens: tuple[tuple[str, str], ...]  # names and texts


class _WorkerEndedError(Exception):
    """The process ended, or did not answer in time."""


class _Worker:
    """Answers one message at a time."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls) -> "_Worker":
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                reader, writer = await asyncio.open_connection(sock=ours)
            except BaseException:
                ours.close()
                raise
            try:
                # uvloop loses descriptors when too few are left to start a process.
                process = subprocess.Popen(  # noqa: ASYNC220 (it returns when the process has begun)
                    (sys.executable, "-P", "-m", "paceline_scheduler.api.text.chat_worker"),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # an interrupt typed at the terminal is for the scheduler
                )
            except BaseException:
                writer.close()
                raise
        return cls(process, reader, writer)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    async def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, str]:
        """Raises _WorkerEndedError."""
        data = json.dumps(message).encode()
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
                await self._writer.drain()
                length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
                if length > _MAX_ANSWER_BYTES:
                    raise _WorkerEndedError
                answer: dict[str, str] = json.loads(await self._reader.readexactly(length))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, RuntimeError) as error:
            # RuntimeError is how uvloop says that a socket is closed.
            raise _WorkerEndedError from error
        return answer

    async def stop(self) -> None:
        self._writer.close()
        try:
            await self._end_within(_EXIT_S)
            self._process.kill()
            await self._end_within(_EXIT_S)
        finally:
            self._process.kill()
            self._process.wait()  # nothing outlives that signal

    async def _end_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.has_ended:  # noqa: ASYNC110 (the operating system has no event for it)
                    await asyncio.sleep(_POLL_S)


class _Renderer:
    """It starts when it is needed and is replaced when it ended."""

    def __init__(self, source: TemplateSource, limits: RenderLimits) -> None:
        self._source = source
        self._limits = limits
        self._turn = asyncio.Lock()
        self._worker: _Worker | None = None
        self._compile_error: str | None = None
        self._is_closed = False

    async def render(self, messages: list[dict[str, str]], now: datetime, max_chars: int) -> str:
        """Raises InvalidRequestError when the template refuses, fails or takes too long."""
        async with self._turn:
            worker = await self._ready_worker()
            # A process in an unknown state is not used again.
            self._worker = None
            try:
                question = {"messages": messages, "now": now.isoformat(), "max_chars": max_chars}
                # The worker ends itself at max_render_s.
                answer = await worker.ask(question, 2 * self._limits.max_render_s)
            except BaseException as error:
                await worker.stop()
                if isinstance(error, _WorkerEndedError):
                    raise _failed(_NOT_IN_TIME) from None
                raise
            if self._is_closed:
                await worker.stop()
            else:
                self._worker = worker
        return _text_of(answer)

    async def close(self) -> None:
        """Who still waits gets a process of their own."""
        self._is_closed = True
        async with self._turn:
            if self._worker is not None:
                await self._worker.stop()
                self._worker = None

    async def _ready_worker(self) -> _Worker:
        if self._worker is not None and self._worker.has_ended:
            await self._worker.stop()
            self._worker = None
        return self._worker or await self._start()

    async def _start(self) -> _Worker:
        if self._compile_error is not None:
            raise _failed(self._compile_error)
        try:
            worker = await _Worker.start()
        except OSError as error:
            sentence = f"no process to render chats could be started: {error.strerror}"
            raise QueueFullError(sentence, _RETRY_AFTER_S) from error
        source = self._source
        setup = {
            "template": source.template,
            "constants": dict(source.special_tokens),
            "max_render_s": self._limits.max_render_s,
            "max_bytes": self._limits.max_bytes,
        }
        try:
            answer = await worker.ask(setup, self._limits.max_start_s)
        except BaseException as error:
            await worker.stop()
            if isinstance(error, _WorkerEndedError):
                raise _failed(_NOT_IN_TIME) from None
            raise
        if answer:
            # It will not compile the next time either.
            self._compile_error = answer["failed"]
            await worker.stop()
            raise _failed(self._compile_error)
        return worker


class ChatRenderers:
    """The least recently used ones are ended."""

    def __init__(
        self, limits: EdgeLimits, local_time: Callable[[], datetime], render_limits: RenderLimits | None = None
    ) -> None:
        self._max_num_waiting = limits.max_num_waiting_texts
        self._render_limits = render_limits or RenderLimits()
        self._local_time = local_time
        self._num_waiting = 0
        self._renderers: OrderedDict[TemplateSource, _Renderer] = OrderedDict()

    async def render(self, source: TemplateSource, messages: Sequence[ChatMessage], max_chars: int) -> str:
        """Raises InvalidRequestError naming `chat`, or QueueFullError."""
        if self._num_waiting >= self._max_num_waiting:
            raise QueueFullError(
                f"{self._num_waiting} chats wait to be rendered, which is the limit; try again", _RETRY_AFTER_S
            )
        self._num_waiting += 1
        try:
            renderer = await self._renderer(source)
            turns = [{"role": message.role, "content": message.content} for message in messages]
            return await renderer.render(turns, self._local_time(), max_chars)
        finally:
            self._num_waiting -= 1

    async def close(self) -> None:
        renderers = list(self._renderers.values())
        self._renderers.clear()
        for renderer in renderers:
            await renderer.close()

    async def _renderer(self, source: TemplateSource) -> _Renderer:
        renderer = self._renderers.setdefault(source, _Renderer(source, self._render_limits))
        self._renderers.move_to_end(source)
        if len(self._renderers) > _MAX_RENDERERS:
            _, unused = self._renderers.popitem(last=False)
            await unused.close()
        return renderer


def _text_of(answer: dict[str, str]) -> str:
    if "refused" in answer:
        raise InvalidRequestError("chat.messages", f"the model's chat template says: {answer['refused']}")
    if "failed" in answer:
        raise _failed(answer["failed"])
    return answer["text"]


def _failed(why: str) -> InvalidRequestError:
    return InvalidRequestError("chat", f"the model's chat template fails: {why}; send text instead")

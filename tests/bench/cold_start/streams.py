"""Requests that never stop streaming, and when each of them got its tokens."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from paceline_client import AsyncClient, AsyncStream, Stopping

_MAX_TOKENS = 1000
_STOPPING = Stopping(max_tokens=_MAX_TOKENS, ignore_eos=True)
_GIVE_UP_S = 30.0

Prompt = Callable[[AsyncClient, int, int], AsyncStream]


def _tokens(client: AsyncClient, number: int, num_tokens: int) -> AsyncStream:
    return client.stream(token_ids=[number % 256] * num_tokens, stopping=_STOPPING)


def _text(client: AsyncClient, number: int, num_tokens: int) -> AsyncStream:
    return client.stream(_filled(number, num_tokens), stopping=_STOPPING)


def _chat(client: AsyncClient, number: int, num_tokens: int) -> AsyncStream:
    message = {"role": "user", "content": _filled(number, num_tokens)}
    return client.stream(messages=[message], stopping=_STOPPING)


def _filled(number: int, num_tokens: int) -> str:
    # Digits are tokens of their own in the simulated vocabulary, however large it is.
    return f"{number:08}" * (num_tokens // 8)


PROMPTS: Mapping[str, Prompt] = {"tokens": _tokens, "text": _text, "chat": _chat}


@dataclass(slots=True)
class Streams:
    """Runs requests one after another in a number of streams."""

    client: AsyncClient
    prompt: Prompt
    num_prompt_tokens: int
    arrivals_s: list[list[float]] = field(default_factory=list)  # of each stream, by the wall clock
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def running(self, num_streams: int) -> AsyncIterator[None]:
        """Stream until the block ends, which begins when every stream has had tokens; a failure ends it."""
        self.arrivals_s = [[] for _ in range(num_streams)]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._stream(arrivals_s)) for arrivals_s in self.arrivals_s]
            await self.gone_on_since(0.0)
            yield
            for task in running:
                task.cancel()

    async def gone_on_since(self, since_s: float) -> float:
        """Return how long after a moment every stream had got tokens that come later than those on their way then."""
        async with asyncio.timeout(_GIVE_UP_S):
            while any(not arrivals_s or arrivals_s[-1] < since_s + 0.05 for arrivals_s in self.arrivals_s):
                self._arrived.clear()
                await self._arrived.wait()
        return time.time() - since_s

    def gaps_since(self, since_s: float) -> list[float]:
        """Return the longest pause of each stream, of those that ended after a moment."""
        return [
            max((after - before for before, after in itertools.pairwise(arrivals_s) if after > since_s), default=0.0)
            for arrivals_s in self.arrivals_s
        ]

    async def _stream(self, arrivals_s: list[float]) -> None:
        while True:
            async for _ in self.prompt(self.client, next(self._numbers), self.num_prompt_tokens):
                arrivals_s.append(time.time())
                self._arrived.set()

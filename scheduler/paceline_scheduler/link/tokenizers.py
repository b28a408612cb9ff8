"""The tokenizers of attached executors, fetched once per digest."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.errors import DivergenceError, LinkError, UnsupportedError
from paceline_scheduler.link.transport import Connection

FETCH_TIMEOUT_S = 30.0
MAX_KEPT = 16

Prepare = Callable[[TokenizerSource, int], Awaitable[None]]


async def _nothing_to_prepare(source: TokenizerSource, vocab_size: int) -> None:
    del source, vocab_size


class TokenizerShelf:
    """Keeps the last few tokenizers by digest.

    `prepare` is awaited with each new one and its vocabulary's size, before its executor counts as attached.
    """

    def __init__(self, prepare: Prepare = _nothing_to_prepare) -> None:
        self._prepare = prepare
        self._sources: OrderedDict[str, TokenizerSource] = OrderedDict()
        self._fetching = asyncio.Lock()

    async def get(self, digest: str, vocab_size: int, connection: Connection) -> TokenizerSource:
        """Return the tokenizer of this digest, fetching it over `connection` if it is not here; raises LinkError."""
        if digest not in self._sources:
            async with self._fetching:
                if digest not in self._sources:
                    await self._fetch(digest, vocab_size, connection)
        self._sources.move_to_end(digest)
        return self._sources[digest]

    async def _fetch(self, digest: str, vocab_size: int, connection: Connection) -> None:
        source = await connection.get_tokenizer(FETCH_TIMEOUT_S)
        if source.digest != digest:
            raise DivergenceError(f"the executor announced tokenizer {digest!r} and sent {source.digest!r}")
        try:
            await self._prepare(source, vocab_size)
        except UnsupportedError as error:
            raise LinkError(f"the model's tokenizer cannot be used: {error}") from error
        self._sources[digest] = source
        if len(self._sources) > MAX_KEPT:
            self._sources.popitem(last=False)

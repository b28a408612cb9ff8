"""The tokenizers of attached executors, fetched once per digest."""

import asyncio
from collections import OrderedDict

from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.errors import DivergenceError
from paceline_scheduler.link.transport import Connection

FETCH_TIMEOUT_S = 30.0
MAX_KEPT = 16


class TokenizerShelf:
    """Keeps the last few tokenizers by digest."""

    def __init__(self) -> None:
        self._sources: OrderedDict[str, TokenizerSource] = OrderedDict()
        self._fetching = asyncio.Lock()

    async def get(self, digest: str, connection: Connection) -> TokenizerSource:
        """Return the tokenizer of this digest, fetching it over `connection` if it is not here; raises LinkError."""
        if digest not in self._sources:
            async with self._fetching:
                if digest not in self._sources:
                    await self._fetch(digest, connection)
        self._sources.move_to_end(digest)
        return self._sources[digest]

    async def _fetch(self, digest: str, connection: Connection) -> None:
        source = await connection.get_tokenizer(FETCH_TIMEOUT_S)
        if source.digest != digest:
            raise DivergenceError(f"the executor announced tokenizer {digest!r} and sent {source.digest!r}")
        self._sources[digest] = source
        if len(self._sources) > MAX_KEPT:
            self._sources.popitem(last=False)

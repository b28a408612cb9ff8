"""The tokenizers of attached executors, fetched once per digest, and kept on disk."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

from paceline.plan.hashes import TOKENIZER_FORM, tokenizer_digest, tokenizer_form
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.disk_cache import AsyncDiskCache
from paceline_scheduler.errors import DivergenceError, LinkError, UnsupportedError
from paceline_scheduler.link.transport import ExecutorConnection
from paceline_scheduler.link.wire import decode_tokenizer

FETCH_TIMEOUT_S = 30.0
MAX_RETAINED = 16
MAX_RETAINED_BYTES = 256 * 1024 * 1024
_FILE_FORMAT = 2

Prepare = Callable[[TokenizerSource, int], Awaitable[None]]


async def _nothing_to_prepare(source: TokenizerSource, vocab_size: int) -> None:
    del source, vocab_size


class TokenizerStore:
    """Keeps the last few by digest, which is computed of what came and of what lies on disk.

    `prepare` is awaited with each new one and its vocabulary's size, before its executor counts as attached. `cache`
    has those of earlier schedulers.
    """

    def __init__(self, prepare: Prepare = _nothing_to_prepare, cache: AsyncDiskCache | None = None) -> None:
        self._prepare = prepare
        self._cache = cache or AsyncDiskCache()
        self._sources: OrderedDict[str, TokenizerSource] = OrderedDict()
        self._fetching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by digest

    async def get(self, announced: str, vocab_size: int, connection: ExecutorConnection) -> TokenizerSource:
        """Fetches what is announced over `connection` if needed. Raises LinkError, and DivergenceError for another."""
        async with self._fetching.setdefault(announced, asyncio.Lock()):
            if announced not in self._sources:
                announced = await self._fetch(announced, vocab_size, connection)
        self._sources.move_to_end(announced)
        return self._sources[announced]

    async def _fetch(self, announced: str, vocab_size: int, connection: ExecutorConnection) -> str:
        """Return the digest of what came, which is what was announced wherever that can be computed."""
        form = tokenizer_form(announced)
        name = f"tokenizer {_FILE_FORMAT} {announced}"
        kept = await self._cache.load(name) if form == TOKENIZER_FORM else None
        if kept is not None and tokenizer_digest(kept) != announced:
            kept = None
        content = kept or await connection.get_tokenizer(FETCH_TIMEOUT_S)
        source = decode_tokenizer(content, form)
        if form == TOKENIZER_FORM and source.digest != announced:
            raise DivergenceError(f"the executor announced tokenizer {announced!r} and sent {source.digest!r}")
        if source.digest not in self._sources:
            try:
                await self._prepare(source, vocab_size)
            except UnsupportedError as error:
                raise LinkError(f"the model's tokenizer cannot be used: {error}") from error
            self._sources[source.digest] = source
        while len(self._sources) > 1 and self._is_full():
            self._sources.popitem(last=False)
        if kept is None and form == TOKENIZER_FORM:
            self._cache.store(name, lambda: content)
        return source.digest

    def _is_full(self) -> bool:
        num_bytes = sum(len(source.json) for source in self._sources.values())
        return len(self._sources) > MAX_RETAINED or num_bytes > MAX_RETAINED_BYTES

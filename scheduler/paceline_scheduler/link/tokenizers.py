"""The tokenizers of attached executors, fetched once per digest, and kept on disk."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from weakref import WeakValueDictionary

from paceline.plan.values import GenerationDefaults
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.disk_cache import AsyncDiskCache
from paceline_scheduler.errors import DivergenceError, LinkError, UnsupportedError
from paceline_scheduler.link.transport import Connection

FETCH_TIMEOUT_S = 30.0
MAX_RETAINED = 16
MAX_RETAINED_BYTES = 256 * 1024 * 1024
_FILE_FORMAT = 1

Prepare = Callable[[TokenizerSource, int], Awaitable[None]]


async def _nothing_to_prepare(source: TokenizerSource, vocab_size: int) -> None:
    del source, vocab_size


class TokenizerStore:
    """Keeps the last few by digest.

    `prepare` is awaited with each new one and its vocabulary's size, before its executor counts as attached. `cache`
    has those of earlier schedulers.
    """

    def __init__(self, prepare: Prepare = _nothing_to_prepare, cache: AsyncDiskCache | None = None) -> None:
        self._prepare = prepare
        self._cache = cache or AsyncDiskCache()
        self._sources: OrderedDict[str, TokenizerSource] = OrderedDict()
        self._fetching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by digest

    async def get(self, digest: str, vocab_size: int, connection: Connection) -> TokenizerSource:
        """Fetches it over `connection` if needed. Raises LinkError."""
        if digest not in self._sources:
            async with self._fetching.setdefault(digest, asyncio.Lock()):
                if digest not in self._sources:
                    await self._fetch(digest, vocab_size, connection)
        self._sources.move_to_end(digest)
        return self._sources[digest]

    async def _fetch(self, digest: str, vocab_size: int, connection: Connection) -> None:
        name = f"tokenizer {_FILE_FORMAT} {digest}"
        found = await self._cache.load(name)
        kept = None if found is None else _unpack(found)
        source = kept or await connection.get_tokenizer(FETCH_TIMEOUT_S)
        if source.digest != digest:
            raise DivergenceError(f"the executor announced tokenizer {digest!r} and sent {source.digest!r}")
        try:
            await self._prepare(source, vocab_size)
        except UnsupportedError as error:
            raise LinkError(f"the model's tokenizer cannot be used: {error}") from error
        self._sources[digest] = source
        while len(self._sources) > 1 and self._is_full():
            self._sources.popitem(last=False)
        if kept is None:
            self._cache.store(name, lambda: _pack(source))

    def _is_full(self) -> bool:
        num_bytes = sum(len(source.json) for source in self._sources.values())
        return len(self._sources) > MAX_RETAINED or num_bytes > MAX_RETAINED_BYTES


def _pack(source: TokenizerSource) -> bytes:
    fields = asdict(source)
    data: bytes = fields.pop("json")
    return json.dumps(fields).encode() + b"\n" + data


def _unpack(content: bytes) -> TokenizerSource | None:
    """Returns None if another version packed it."""
    line, _, data = content.partition(b"\n")
    try:
        fields = json.loads(line)
        defaults = GenerationDefaults(**fields.pop("defaults"))
        end_token_ids = tuple(fields.pop("end_token_ids"))
        return TokenizerSource(json=data, defaults=defaults, end_token_ids=end_token_ids, **fields)
    except (AttributeError, ValueError, KeyError, TypeError, RecursionError):
        return None

"""Tokenizers by digest: from text to token ids and back, long texts off the event loop.

Each is tried in a confined process first, and only those whose work is bounded encode in this one. Reading a vocabulary
keeps all Python threads waiting, 0.1 to 0.2 s for 49,152 tokens. A scheduler that comes back reads what tokens spell
from a cache on disk, and the vocabulary later.
"""

import asyncio
import ctypes
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from paceline.plan.texts import readable
from paceline.plan.values import Int32Array
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.api.text.confined import Confined, ConfinedError, Confinement
from paceline_scheduler.api.text.detokenizer import Spelling, read_spelling
from paceline_scheduler.api.text.special_texts import SpecialTexts
from paceline_scheduler.api.text.spelling_file import TokenTexts, unpack
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.disk_cache import AsyncDiskCache
from paceline_scheduler.errors import InvalidRequestError, QueueFullError, SchedulerError, UnsupportedError

_T = TypeVar("_T")
_MAX_TOKENIZERS = 8
# Hardly a token joins a line's end and letters.
_BEFORE = "\n"
_RETRY_AFTER_S = 0.5
_LOOK_FOR_REST_S = 0.05
_COMEBACKS_S = 0.3  # streams that come back get their first tokens first
_FILE_FORMAT = 4
_MAX_TRIALS = 4  # at a time
_WORKER = "paceline_scheduler.api.text.tokenizer_worker"
_CONFINEMENT = Confinement(max_work_s=20.0, max_start_s=30.0, max_bytes=2 << 30)
_ENCODED_WITH = ("bos_token_id", "eos_token_id", "prefix_token_ids", "suffix_token_ids", "special_tokens")
# Of 37 MiB 15 are free after reading a vocabulary; glibc would keep them.
_give_back = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)


class TextThreads:
    def __init__(self, limits: EdgeLimits) -> None:
        self._max_num_waiting = limits.max_num_waiting_texts
        self._num_waiting = 0
        self._pool = ThreadPoolExecutor(limits.num_tokenizer_threads, thread_name_prefix="tokenizer")

    async def run(self, work: Callable[[], _T]) -> _T:
        """Raises QueueFullError when too much is waiting."""
        with self.turn():
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """For what waits elsewhere. Raises QueueFullError when too much is waiting."""
        if self._num_waiting >= self._max_num_waiting:
            raise QueueFullError(
                f"{self._num_waiting} long texts wait to be tokenised, which is the limit; try again", _RETRY_AFTER_S
            )
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class TextModel:
    def __init__(
        self,
        source: TokenizerSource,
        texts: TokenTexts,
        tokenizer: Tokenizer | None = None,
        confined: Confined | None = None,
    ) -> None:
        """`tokenizer` is built on first use unless it is given. What encodes does so in `confined`, if there is one."""
        self._source = source
        self.confined = confined
        self._loaded = None if tokenizer is None else (tokenizer, SpecialTexts(tokenizer))
        self._making = threading.Lock()
        self._prefix, self._suffix = list(source.prefix_token_ids), list(source.suffix_token_ids)
        self.loaded_s = 0.0  # on the event loop's clock
        self.texts = texts
        self.special_tokens = texts.special_tokens
        self.spelling: Spelling = texts.spelling

    @property
    def is_complete(self) -> bool:
        return self._loaded is not None or self.confined is not None

    def complete(self) -> tuple[Tokenizer, SpecialTexts]:
        with self._making:
            if self._loaded is None:
                with _refused_tokenizer():
                    tokenizer = _load(self._source)
                self._loaded = tokenizer, SpecialTexts(tokenizer)
                _give_back(0)
            return self._loaded

    def encode_text(self, text: str) -> Int32Array:
        (token_ids,) = self._encode([text])
        if token_ids[: len(self._prefix)] != self._prefix:
            token_ids = self._prefix + token_ids
        return np.array(token_ids + self._suffix, dtype=np.int32)

    def marked(self, chat: _T) -> tuple[_T, str]:
        """Raises InvalidRequestError. See `SpecialTexts`."""
        return self.complete()[1].marked(chat)

    def encode_rendered_chat(self, text: str, mark: str) -> Int32Array:
        """The template has added the special tokens."""
        if not mark:
            return np.array(self._encode([text])[0], dtype=np.int32)
        tokenizer, specials = self.complete()
        with _refused_prompt():
            return np.array(specials.encode(tokenizer, text, mark), dtype=np.int32)

    def ways_to_spell(self, words: list[str]) -> list[tuple[int, ...]]:
        """Each once, none empty: at the beginning of a text, behind a space and behind a line's end. Some tokenizers
        put a word's mark before every text, so only the last lacks it.
        """
        texts = [*words, *(f" {word}" for word in words), _BEFORE, *(_BEFORE + word for word in words)]
        token_ids = [tuple(ids) for ids in self._encode(texts)]
        *alone, before = token_ids[: 2 * len(words) + 1]
        behind = [ids[len(before) :] for ids in token_ids[len(alone) + 1 :] if ids[: len(before)] == before]
        return [way for way in dict.fromkeys((*alone, *behind)) if way]

    async def ask_confined(self, method: str, arguments: tuple[object, ...]) -> object:
        """What a method of this class returns, as JSON has it. Raises InvalidRequestError, QueueFullError."""
        assert self.confined is not None, "asked before"
        try:
            answer, _ = await self.confined.ask({"method": method, "arguments": arguments})
        except ConfinedError as error:
            raise InvalidRequestError("prompt", f"the model's tokenizer fails at it: {error}") from None
        if "refused" in answer:
            raise InvalidRequestError(*answer["refused"])
        result: object = answer["result"]
        return result

    def text_of(self, token_id: int) -> str:
        """Bytes that are no character become U+FFFD."""
        return self.spelling.token_bytes[token_id].decode("utf-8", "replace")

    def _encode(self, texts: list[str]) -> list[list[int]]:
        tokenizer, _ = self.complete()
        with _refused_prompt():
            # Only the batched calls let other threads run meanwhile.
            return [text.ids for text in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _load(source: TokenizerSource) -> Tokenizer:
    """What a training run cut and padded its texts to is no matter of serving."""
    tokenizer = Tokenizer.from_buffer(source.json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _named(source: TokenizerSource, tokenizer: Tokenizer) -> tuple[tuple[str, str], ...]:
    """Of an executor that does not name its special tokens: one before form 2."""
    ids = {"bos_token": source.bos_token_id, "eos_token": source.eos_token_id}
    texts = {name: tokenizer.id_to_token(token_id) for name, token_id in ids.items() if token_id is not None}
    return tuple((name, text) for name, text in texts.items() if text is not None)


@contextmanager
def _refused_with(refusal: Callable[[str], SchedulerError]) -> Iterator[None]:
    try:
        yield
    except (SchedulerError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # it has no type of its own, and a panic in it is not even an Exception
        raise refusal(readable(str(error))) from error


def _refused_prompt() -> AbstractContextManager[None]:
    return _refused_with(lambda why: InvalidRequestError("prompt", f"the model's tokenizer fails at it: {why}"))


def _refused_tokenizer() -> AbstractContextManager[None]:
    return _refused_with(
        lambda why: UnsupportedError("tokenizer_json", f"the tokenizers library cannot read it: {why}")
    )


def read_text_model(source: TokenizerSource, vocab_size: int) -> TextModel:
    """Of a source that may break the process. Raises UnsupportedError for one that cannot be read or whose text cannot
    be streamed.
    """
    with _refused_tokenizer():
        tokenizer = _load(source)
        texts = TokenTexts(read_spelling(tokenizer, vocab_size), source.special_tokens or _named(source, tokenizer))
        model = TextModel(source, texts, tokenizer)
    _give_back(0)
    return model


def _confined(source: TokenizerSource, vocab_size: int) -> Confined:
    setup = {"source": {name: getattr(source, name) for name in _ENCODED_WITH}, "vocab_size": vocab_size}
    return Confined(_WORKER, "read tokenizers", setup, source.json, _CONFINEMENT)


async def try_confined(source: TokenizerSource, vocab_size: int) -> bytes:
    """Return what its tokens spell, as a file. Raises UnsupportedError if it can't be used, and QueueFullError."""
    process = _confined(source, vocab_size)
    try:
        _, spelt = await process.ask({})
    except ConfinedError as error:
        raise UnsupportedError("tokenizer_json", str(error)) from None
    finally:
        await process.close()
    return spelt


Trial = Callable[[TokenizerSource, int], Awaitable[bytes]]


class TextModels:
    """The least recently used are forgotten.

    `is_at_rest`: everything may stand still, because nobody is served and nobody can come back. `trial` reads each one
    first, see `try_confined`.
    """

    def __init__(
        self,
        threads: TextThreads,
        cache: AsyncDiskCache,
        is_at_rest: Callable[[], bool] = lambda: True,
        trial: Trial = try_confined,
    ) -> None:
        self._trial = trial
        self._trials = asyncio.Semaphore(_MAX_TRIALS)
        self._closing: set[asyncio.Task[None]] = set()
        self._threads = threads
        self._cache = cache
        self._is_at_rest = is_at_rest
        self._loading: OrderedDict[tuple[str, int], asyncio.Future[TextModel]] = OrderedDict()
        self._completing: dict[asyncio.Task[None], None] = {}

    async def get(self, source: TokenizerSource, vocab_size: int) -> TextModel:
        """Raises UnsupportedError if its text cannot be streamed."""
        key = (source.digest, vocab_size)
        loading = self._loading.get(key)
        if loading is None:
            loading = asyncio.ensure_future(self._load(source, vocab_size))
            loading.add_done_callback(lambda done: self._drop_unfinished(key, done))
            self._loading[key] = loading
            while len(self._loading) > _MAX_TOKENIZERS:
                _, unused = self._loading.popitem(last=False)
                closing = asyncio.ensure_future(_close(unused))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        self._loading.move_to_end(key)
        # A caller that goes away must not end it for the others.
        return await asyncio.shield(loading)

    async def close(self) -> None:
        for task in self._completing:
            task.cancel()
        for loading in self._loading.values():
            await _close(loading)

    async def get_for_prompt(self, source: TokenizerSource, vocab_size: int) -> TextModel:
        """Waits until its vocabulary may be read. Raises UnsupportedError."""
        model = await self.get(source, vocab_size)
        if not model.is_complete and not self._is_at_rest():
            await asyncio.sleep(max(0.0, model.loaded_s + _COMEBACKS_S - asyncio.get_running_loop().time()))
        return model

    async def _load(self, source: TokenizerSource, vocab_size: int) -> TextModel:
        name = f"spelling {_FILE_FORMAT} {source.digest} {vocab_size}"
        texts, kept = None, await self._cache.load(name)
        if kept is not None:
            with suppress(ValueError):  # an older version wrote it
                texts = await self._threads.run(lambda: unpack(kept))
        is_kept = texts is not None
        if texts is None:
            async with self._trials:
                spelt = await self._trial(source, vocab_size)
            texts = await self._threads.run(lambda: unpack(spelt))
            self._cache.store(name, lambda: spelt)
        model = TextModel(source, texts, confined=None if texts.is_plain else _confined(source, vocab_size))
        if not is_kept and model.confined is None:
            await self._threads.run(model.complete)
        model.loaded_s = asyncio.get_running_loop().time()
        if not model.is_complete:
            task = asyncio.create_task(self._complete_later(model, (source.digest, vocab_size)))
            self._completing[task] = None
            task.add_done_callback(self._completing.pop)
        return model

    async def _complete_later(self, model: TextModel, key: tuple[str, int]) -> None:
        """Streams must not stand still for it."""
        while not model.is_complete and key in self._loading:
            await asyncio.sleep(_LOOK_FOR_REST_S)
            if self._is_at_rest():
                with suppress(QueueFullError):  # a prompt will
                    await self._threads.run(model.complete)

    def _drop_unfinished(self, key: tuple[str, int], done: "asyncio.Future[TextModel]") -> None:
        # A tokenizer that cannot be used stays that way.
        is_tried = not done.cancelled() and isinstance(done.exception(), UnsupportedError | None)
        if not is_tried and self._loading.get(key) is done:
            del self._loading[key]


async def _close(loading: "asyncio.Future[TextModel]") -> None:
    """Wait for what is being read, and end its process."""
    with suppress(Exception):  # for whoever asked
        model = await loading
        if model.confined is not None:
            await model.confined.close()

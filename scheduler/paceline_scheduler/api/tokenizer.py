"""Tokenizers by digest: from text to token ids and back, long texts off the event loop.

Knows the tokenizers library and how much text is too much. Does not know chats, requests or messages.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from paceline_scheduler.api.detokenizer import Spelling, read_spelling
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.backend import TokenizerSource
from paceline_scheduler.core.request import Int32Array
from paceline_scheduler.errors import QueueFullError

_T = TypeVar("_T")
_MAX_TOKENIZERS = 8
# What a word is set behind to see how it is spelt inside a text: hardly a token joins a line's end and letters.
_BEFORE = "\n"
_RETRY_AFTER_S = 0.5


class TextThreads:
    """A few threads for work on long texts, with a bounded queue in front."""

    def __init__(self, limits: EdgeLimits) -> None:
        self._max_num_waiting = limits.max_num_waiting_texts
        self._num_waiting = 0
        self._pool = ThreadPoolExecutor(limits.num_tokenizer_threads, thread_name_prefix="tokenizer")

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run `work` on a thread; raises QueueFullError when too much is waiting."""
        if self._num_waiting >= self._max_num_waiting:
            raise QueueFullError(
                f"{self._num_waiting} long texts are waiting to be tokenised, the limit", _RETRY_AFTER_S
            )
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Stop the threads; what waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class TextModel:
    """The tokenizer of a model. Everything here may take long for a long text."""

    def __init__(self, source: TokenizerSource, vocab_size: int) -> None:
        """Build it; raises UnsupportedError for a decoder whose text cannot be streamed."""
        self._tokenizer = Tokenizer.from_buffer(source.json)
        self._prefix = [] if source.bos_token_id is None or not source.add_bos else [source.bos_token_id]
        self.bos_token = self._token(source.bos_token_id)
        self.eos_token = self._token(source.eos_token_id)
        self.spelling: Spelling = read_spelling(self._tokenizer, vocab_size)

    def encode_text(self, text: str) -> Int32Array:
        """Return the tokens of a plain prompt: the model's first token goes before it, if it is not there already."""
        token_ids = self._encode(text)
        return np.array(token_ids if token_ids[:1] == self._prefix else self._prefix + token_ids, dtype=np.int32)

    def encode_rendered_chat(self, text: str) -> Int32Array:
        """Return the tokens of a rendered chat, to which the template has added whatever the model wants."""
        return np.array(self._encode(text), dtype=np.int32)

    def ways_to_spell(self, words: list[str]) -> list[tuple[int, ...]]:
        """Return the tokens of each word at the beginning of a text, then behind a space, then behind a line's end.

        Tokenizers that put the mark of a word's start before every text spell a word without it only in the last of
        these, where words that share a token with the line's end are left out. Each way is returned once, none empty.
        """
        texts = [*words, *(f" {word}" for word in words), _BEFORE, *(_BEFORE + word for word in words)]
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        token_ids = [tuple(text.ids) for text in encoded]
        *alone, before = token_ids[: 2 * len(words) + 1]
        behind = [ids[len(before) :] for ids in token_ids[len(alone) + 1 :] if ids[: len(before)] == before]
        return [way for way in dict.fromkeys((*alone, *behind)) if way]

    def text_of(self, token_id: int) -> str:
        """Return what one token spells; bytes that are no character appear as U+FFFD."""
        return self.spelling.token_bytes[token_id].decode("utf-8", "replace")

    def _token(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._tokenizer.id_to_token(token_id)

    def _encode(self, text: str) -> list[int]:
        # Of the library's ways to encode only the batched ones let other threads run meanwhile.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


class TextModels:
    """The tokenizers in use, built on first use, the least recently used ones forgotten."""

    def __init__(self, threads: TextThreads) -> None:
        self._threads = threads
        self._loading: OrderedDict[tuple[str, int], asyncio.Future[TextModel]] = OrderedDict()

    async def get(self, source: TokenizerSource, vocab_size: int) -> TextModel:
        """Return a tokenizer; raises UnsupportedError if its text cannot be streamed."""
        key = (source.digest, vocab_size)
        loading = self._loading.get(key)
        if loading is None:
            loading = asyncio.ensure_future(self._threads.run(lambda: TextModel(source, vocab_size)))
            loading.add_done_callback(lambda done: self._drop_unfinished(key, done))
            self._loading[key] = loading
            while len(self._loading) > _MAX_TOKENIZERS:
                self._loading.popitem(last=False)
        self._loading.move_to_end(key)
        # One caller that goes away must not end the loading for the others.
        return await asyncio.shield(loading)

    def _drop_unfinished(self, key: tuple[str, int], done: "asyncio.Future[TextModel]") -> None:
        # A tokenizer that cannot be used stays that way; one that was not even tried is tried again.
        if (done.cancelled() or isinstance(done.exception(), QueueFullError)) and self._loading.get(key) is done:
            del self._loading[key]

"""Forms for tests: as requests ask for them, over a vocabulary of letters, compiled when a test wants it."""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from paceline.bytes_tokenizer import END_TOKEN_IDS, VOCAB_SIZE
from paceline.v1.sampling_pb2 import WHITESPACE_COMPACT, Choice, StructuredOutput, Tag, Tags
from paceline_executor.rows.forms import FormMasker
from paceline_executor.start.opening import simulated_tokenizer

T = TypeVar("T")

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def regex(pattern: str) -> bytes:
    return StructuredOutput(regex=pattern).SerializeToString(deterministic=True)


def choice(*options: str) -> bytes:
    return StructuredOutput(choice=Choice(options=options)).SerializeToString(deterministic=True)


def json_schema(schema: dict[str, Any]) -> bytes:
    message = StructuredOutput(json_schema=json.dumps(schema), whitespace=WHITESPACE_COMPACT)
    return message.SerializeToString(deterministic=True)


class AtOnce(Executor):
    """Whoever submits waits."""

    def submit(self, work: Callable[..., T], /, *arguments: Any) -> "Future[T]":  # type: ignore[override]  # noqa: ANN401
        future: Future[T] = Future()
        try:
            future.set_result(work(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


class WhenTold(AtOnce):
    """Nothing is done before `finish`."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[..., T], /, *arguments: Any) -> "Future[T]":  # type: ignore[override]  # noqa: ANN401
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work(*arguments))
            except Exception as error:
                future.set_exception(error)

        self._waiting.append(run)
        return future

    def finish(self) -> None:
        while self._waiting:
            self._waiting.popleft()()


def call(begin: str, end: str, pattern: str) -> bytes:
    """One tag, and nothing behind it."""
    message = StructuredOutput(
        tags=Tags(tags=[Tag(begin=begin, regex=pattern, end=end)], required=True, at_most_one=True)
    )
    return message.SerializeToString(deterministic=True)


def bytes_forms(pool: Executor | None = None) -> FormMasker:
    """Of the tokenizer of bytes."""
    tokenizer_json = simulated_tokenizer(VOCAB_SIZE).tokenizer_json
    return FormMasker(tokenizer_json, END_TOKEN_IDS, VOCAB_SIZE, pool or AtOnce())


def letter_forms(
    vocab_size: int, end_token_ids: Sequence[int], pool: Executor | None = None, marks: Mapping[int, str] | None = None
) -> FormMasker:
    """Token i is the i-th letter, but for end tokens and marks; those behind the letters have no text."""
    texts = {i: f"<|end{i}|>" for i in end_token_ids} | dict(marks or {})
    added = [
        {"id": i, "content": text, "special": i in end_token_ids, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, text in texts.items()
    ]
    vocab = {texts.get(i, LETTERS[i]): i for i in range(min(vocab_size, len(LETTERS)))}
    whole = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    return FormMasker(json.dumps(whole).encode(), end_token_ids, vocab_size, pool or AtOnce())

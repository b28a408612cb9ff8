"""What a fuzz target is: a parser, what it may say of bytes that it does not take, and sound inputs.

Apart from the targets, which all need it.
"""

import asyncio
import atexit
import io
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from edge_rig.tokenizers import byte_level_tokenizer, tokenizer_source
from paceline_scheduler.backend import TokenizerSource


@dataclass(frozen=True, slots=True)
class Target:
    """`run` returns, whatever it is given: what it raises is a defect of the parser. `seeds` are sound inputs."""

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]


@cache
def scratch() -> Path:
    """Return a folder in memory, where there is one: files are written to it thousands of times a second."""
    memory = Path("/dev/shm")  # noqa: S108 - a folder of its own is made in it
    folder = Path(tempfile.mkdtemp(prefix="paceline-fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def tokenizer() -> TokenizerSource:
    """Return a sound one of 400 tokens at most."""
    return tokenizer_source(byte_level_tokenizer())


def framed(messages: Iterable[bytes]) -> bytes:
    """Return messages as one input; `unframed` takes them apart."""
    return b"".join(len(message).to_bytes(2, "big") + message for message in messages)


def unframed(data: bytes, at_most: int) -> list[bytes]:
    """Return the messages of an input; the last one may be cut short."""
    stream, messages = io.BytesIO(data), list[bytes]()
    while len(messages) < at_most and (length := stream.read(2)):
        messages.append(stream.read(int.from_bytes(length, "big")))
    return messages

"""What a confined process does: little memory, no files, and an end when one piece of work takes too long.

A message is a JSON object and bytes, each after its length of four bytes. The first one sets the process up, and is
answered by {} or {"failed": why}. The end of its input ends the process.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

Message = tuple[dict[str, Any], bytes]
Work = Callable[[dict[str, Any], bytes], Message]

LENGTH_BYTES = 4


class SetupFailedError(Exception):
    """The sentence says why."""


def serve(set_up: Callable[[dict[str, Any], bytes], Work]) -> None:
    """Answer on standard output what comes on standard input, until its end. `set_up` may raise SetupFailedError."""
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = _read(questions)
    if setup is None:
        return
    max_work_s = setup[0]["max_work_s"]
    _confine(setup[0]["max_bytes"])
    signal.setitimer(signal.ITIMER_REAL, max_work_s)
    try:
        work = set_up(*setup)
    except (SetupFailedError, MemoryError) as error:
        _write(answers, {"failed": printable(error) or "it needs too much memory"}, b"")
        return
    signal.setitimer(signal.ITIMER_REAL, 0)
    _write(answers, {}, b"")
    while (question := _read(questions)) is not None:
        signal.setitimer(signal.ITIMER_REAL, max_work_s)
        answer = work(*question)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answers, *answer)


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def printable(why: object) -> str:
    """An error may quote what it is about: be long, or hold half a surrogate pair."""
    return str(why)[:500].encode("utf-8", "replace").decode()


def _confine(max_bytes: int) -> None:
    """The timer's signal stays: it ends the process even inside C."""
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _read(stream: BinaryIO) -> Message | None:
    parts = []
    for _ in range(2):
        length = stream.read(LENGTH_BYTES)
        if len(length) < LENGTH_BYTES:
            return None
        parts.append(stream.read(int.from_bytes(length, "big")))
    question: dict[str, Any] = json.loads(parts[0])
    return question, parts[1]


def _write(stream: BinaryIO, answer: dict[str, Any], data: bytes) -> None:
    stream.write(framed(json.dumps(answer).encode()) + framed(data))
    stream.flush()

"""What a driver and the benchmark say to each other: one JSON object per line, on stdin and stdout.

The driver's first line says what it is; every later line answers one request, by its number. Knows timings of single
tokens and nothing of what is made of them. Refuses to know any engine.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import IO, Protocol, TypedDict


class UnsupportedError(Exception):
    """This engine, driven in this way, cannot do what was asked."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how many tokens to generate for it, greedily, whatever they are.

    `after_tokens`: sent once every request with 0 here has produced so many tokens.
    """

    prompt: tuple[int, ...]
    num_tokens: int
    after_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to run together. `at_most` bounds how many are under way at once, the next one following at once.

    `is_watched`: whether the engine tells of its steps meanwhile, if it can, which takes time of its own.
    """

    requests: tuple[Request, ...]
    at_most: int | None = None
    is_watched: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """What a driver says of its engine when it is ready.

    `memory_pids` are the processes whose memory is the engine's.
    """

    version: str
    harness: str
    configuration: str
    memory_pids: tuple[int, ...]


class Step(TypedDict):
    """One step of an executor, in seconds; other engines do not tell."""

    num_rows: int
    num_tokens: int
    busy_s: float
    idle_s: float


@dataclass(slots=True)
class Answer:
    """Times in seconds since the workload began: when each request was sent, and when each of its tokens came."""

    sent_s: list[float]
    token_s: list[list[float]]
    steps: list[Step] = field(default_factory=list)


class StepEngine(Protocol):
    """An engine that computes when it is told to."""

    def add(self, number: int, request: Request) -> None:
        """Take a request in; `step` names it by this number."""

    def step(self) -> Iterable[tuple[int, int]]:
        """Compute one step: yield request numbers and how many tokens each has got."""


def run_steps(engine: StepEngine, workload: Workload) -> Answer:
    """Run a workload on an engine that computes when it is told to."""
    if workload.at_most is not None:
        raise UnsupportedError("bounds no requests under way")
    requests = workload.requests
    answer = Answer([0.0] * len(requests), [[] for _ in requests])
    waiting = {number: request for number, request in enumerate(requests) if request.after_tokens}
    first = [number for number in range(len(requests)) if number not in waiting]
    start = time.perf_counter()
    for number in first:
        _send(engine, number, requests[number], answer, start)
    while any(len(times) < request.num_tokens for times, request in zip(answer.token_s, requests, strict=True)):
        for number, num_tokens in engine.step():
            answer.token_s[number] += [time.perf_counter() - start] * num_tokens
        progress = min(len(answer.token_s[number]) for number in first)
        for number in [number for number, request in waiting.items() if request.after_tokens <= progress]:
            _send(engine, number, waiting.pop(number), answer, start)
    return answer


def _send(engine: StepEngine, number: int, request: Request, answer: Answer, start: float) -> None:
    answer.sent_s[number] = time.perf_counter() - start
    engine.add(number, request)


def reserve_stdout() -> IO[str]:
    """Keep stdout for the protocol: whatever else the process or its libraries print goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return channel


def serve(channel: IO[str], facts: Facts, run: Callable[[Workload], Answer]) -> None:
    """Say that the engine is ready, then answer requests until stdin ends."""
    _write(channel, {"ready": asdict(facts)})
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = run(_workload(question["workload"]))
        except UnsupportedError as error:
            _write(channel, {"id": question["id"], "error": str(error)})
        else:
            _write(channel, {"id": question["id"], "answer": _rounded(asdict(answer))})


def _write(channel: IO[str], message: object) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


def _workload(fields: dict[str, object]) -> Workload:
    requests, at_most, is_watched = fields["requests"], fields["at_most"], fields["is_watched"]
    assert isinstance(requests, list)
    assert at_most is None or isinstance(at_most, int)
    assert isinstance(is_watched, bool)
    return Workload(
        tuple(Request(tuple(part["prompt"]), part["num_tokens"], part["after_tokens"]) for part in requests),
        at_most,
        is_watched,
    )


def _rounded(value: object) -> object:
    """Microseconds are enough, and keep the results file small."""
    match value:
        case float():
            return round(value, 6)
        case list():
            return [_rounded(part) for part in value]
        case dict():
            return {name: _rounded(part) for name, part in value.items()}
    return value

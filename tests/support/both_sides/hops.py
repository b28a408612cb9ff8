"""How many functions a request and its token pass between a client's call and a runner, and in how many forms.

One request is served for real, in this process: client library, edge, core, link, an executor's link and rows, a runner
without a model, and back. `python -m both_sides.hops` prints what was counted.

The rule. A function of the product counts once if, while it ran, the request was handed on: given to a function of the
product that it or one further down called, or returned by itself. The request is known by the types of its forms, their
parts, the text and tokens of its prompt, and in bytes by its id; an object's methods are not given the object. So
loops, heartbeats and observers of other things do not count, nor what only looks at the request: checks, sums, columns
of numbers. The request's way ends where the runner is told to compute, its token's where the caller gets it.

A form is a type that holds the request, or its token, or adds to it on its way. Messages count on both sides of their
bytes, a bag that only hands others over counts too. What means something of its own (events, decisions, plans, effects)
is none, nor what is kept beside a form, as the edge's stream.
"""

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType
from typing import Any

import numpy as np

from paceline.bytes_tokenizer import PRINTABLE, VOCAB_SIZE, make_bytes_tokenizer
from paceline.plan import values
from paceline.v1 import inference_pb2, plan_pb2, sampling_pb2
from paceline_client import AsyncClient, Stopping, requests, results, wire
from paceline_executor.link.step_loop import Submitted
from paceline_executor.models.interface import ForwardInputs
from paceline_executor.rows.batch import Prepared
from paceline_executor.rows.columns import RowColumns as ExecutorColumns
from paceline_executor.rows.outcome import Drawn
from paceline_executor.rows.table import Launched
from paceline_executor.runner.interface import StepBatch, StepHandle, StepOutput
from paceline_executor.runner.simulated import SimulatedRunner
from paceline_executor.testing.hash_executor import HASH_LIMITS, loaded, serving
from paceline_kernels.sampling import Samples
from paceline_scheduler.api.outbox import MessageContent, PendingDelta
from paceline_scheduler.api.stream import RequestStream
from paceline_scheduler.core.events import Effects, Resume, StepFinished
from paceline_scheduler.core.executors import Placement
from paceline_scheduler.core.live import LiveRequest
from paceline_scheduler.core.outputs import TokenOutputs
from paceline_scheduler.core.planning.planner import Admission, Decision
from paceline_scheduler.core.request import Request
from paceline_scheduler.core.tables.rows import RowColumns
from paceline_scheduler.testing.whole_scheduler import serve_scheduler

_WITH_A_MODEL = {ForwardInputs, Samples}
"""Forms that a runner without a model does not need."""

REQUEST_FORMS: tuple[type, ...] = (
    requests.Request,
    inference_pb2.GenerateRequest,
    bytes,
    inference_pb2.GenerateRequest,
    Request,
    LiveRequest,
    Admission,
    RowColumns,
    Placement,
    plan_pb2.NewRequest,
    bytes,
    plan_pb2.NewRequest,
    values.NewRequest,
    ExecutorColumns,
    StepBatch,
    ForwardInputs,
)
"""On its way down, in order."""

TOKEN_FORMS: tuple[type, ...] = (
    Samples,
    StepOutput,
    Drawn,
    values.StepResult,
    plan_pb2.StepResult,
    bytes,
    plan_pb2.StepResult,
    TokenOutputs,
    PendingDelta,
    MessageContent,
    inference_pb2.SessionResponse,
    bytes,
    inference_pb2.SessionResponse,
    results.Delta,
)
"""On its way back, in order."""

_REQUEST_CARRIERS = (
    inference_pb2.SessionRequest,
    RequestStream,
    Resume,
    Decision,
    values.BatchPlan,
    plan_pb2.BatchPlan,
    Prepared,
    Launched,
    Submitted,
)
_TOKEN_CARRIERS = (StepFinished, Effects, wire.ReceivedDelta)
_PARTS = (
    requests.Text,
    requests.Sampling,
    requests.Stopping,
    requests.Output,
    requests.Scheduling,
    sampling_pb2.SamplingParams,
    sampling_pb2.StoppingParams,
    sampling_pb2.OutputOptions,
    values.SamplingParams,
)

_PACKAGES = ("paceline.plan.", "paceline_client.", "paceline_scheduler.", "paceline_executor.")
_REQUEST_ID = "one-request-that-is-followed"
_PROMPT = "Nothing else asks this."
_TOKEN_IDS = list(_PROMPT.encode())
_AT_MOST_S = 1.0  # steps that take longer are given up
_NOT_BY_TYPE = {bytes, RowColumns, ExecutorColumns}  # others are of these types too


@dataclass(slots=True)
class Way:
    """`functions` in the order in which they first handed on. `seen` came by; so did `unlisted`, values that hold a
    form and stand in no list here.
    """

    forms: tuple[type, ...]
    carriers: tuple[type, ...]
    is_open: bool = False
    functions: dict[str, None] = field(default_factory=dict)
    seen: set[type] = field(default_factory=set)
    unlisted: set[type] = field(default_factory=set)

    @property
    def unseen(self) -> set[type]:
        """Forms that something should have handed on."""
        return set(self.forms) - self.seen - _NOT_BY_TYPE - _WITH_A_MODEL

    def is_on(self, value: object, depth: int = 2) -> bool:
        """Whether a value is the request or token in some form, or a list that holds it."""
        if isinstance(value, self._kinds):
            self.seen.add(type(value))
            match value:
                case values.BatchPlan(new_requests=new) | plan_pb2.BatchPlan(new_requests=new):
                    return len(new) > 0
                case Decision(admissions=admissions):
                    return len(admissions) > 0
            return True
        match value:
            case bytes():
                return _REQUEST_ID.encode() in value
            case str():
                return value == _PROMPT
            case np.ndarray():
                return bool(value.tolist() == _TOKEN_IDS)
            case list() | tuple() if depth:
                return value == _TOKEN_IDS or any(self.is_on(each, depth - 1) for each in value)
        if any(isinstance(part, self._kinds) for part in _parts(value)):
            self.unlisted.add(type(value))
        return False

    @property
    def _kinds(self) -> tuple[type, ...]:
        return (*(set(self.forms) - _NOT_BY_TYPE), *self.carriers)


class Follower:
    """A profile function: sees every call and return of the product's functions, in all threads."""

    def __init__(self) -> None:
        self.request = Way(REQUEST_FORMS, _REQUEST_CARRIERS + _PARTS)
        self.token = Way(TOKEN_FORMS, _TOKEN_CARRIERS)

    def __call__(self, frame: FrameType, event: str, value: object) -> None:
        if not (self.request.is_open or self.token.is_open):
            return
        if event == "call" and (_is_ours(frame) or frame.f_code is _Runner.launch.__code__):
            code = frame.f_code
            given = [frame.f_locals[name] for name in _parameters(code) if name in frame.f_locals]
            self._follow(frame.f_back, self.request, given)
            self._follow(frame.f_back, self.token, given)
        elif event == "return" and _is_ours(frame):
            self._follow(frame, self.request, [value])
            self._follow(frame, self.token, [value])

    def _follow(self, frame: FrameType | None, way: Way, given: list[Any]) -> None:
        if way.is_open and any(way.is_on(each) for each in given):
            names = [_name(below) for below in _stack(frame) if _is_ours(below)]
            way.functions.update(dict.fromkeys(reversed(names)))


def _parts(value: object) -> list[object]:
    """The fields of a value that cannot change; what can is a table or a loop."""
    if not getattr(getattr(value, "__dataclass_params__", None), "frozen", False):
        return []
    return [getattr(value, name, None) for name in value.__dataclass_fields__]  # type: ignore[attr-defined]


def _is_ours(frame: FrameType) -> bool:
    """Not what dataclasses generate, nor lambdas and comprehensions: they are parts of functions."""
    module, code = frame.f_globals.get("__name__", ""), frame.f_code
    is_written = code.co_filename != "<string>" and ".<locals>.<" not in code.co_qualname
    return is_written and module.startswith(_PACKAGES) and ".testing" not in module


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals['__name__']}:{frame.f_code.co_qualname}"


def _parameters(code: CodeType) -> tuple[str, ...]:
    return tuple(name for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if name != "self")


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@contextmanager
def followed_by(by: Follower) -> Iterator[None]:
    """Also threads that begin meanwhile."""
    threading.setprofile(by)
    sys.setprofile(by)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class _Runner(SimulatedRunner):
    """Where the request arrives, and its token sets out. No step begins before the first token was delivered."""

    def __init__(self, follower: Follower) -> None:
        super().__init__(HASH_LIMITS.num_blocks, HASH_LIMITS.block_size, VOCAB_SIZE, drawn=PRINTABLE)
        self.is_delivered = threading.Event()
        self.is_delivered.set()
        self._follower = follower

    def launch(self, batch: StepBatch) -> StepOutput:
        self.is_delivered.wait(_AT_MOST_S)
        if self._follower.request.is_open:
            self._follower.request.is_open = False
            self.is_delivered.clear()
        return super().launch(batch)

    def wait(self, handle: StepHandle) -> StepOutput:
        output = super().wait(handle)
        self._follower.token.is_open = not self.is_delivered.is_set()
        return output


async def _serve(follower: Follower) -> None:
    runner = _Runner(follower)
    limits = replace(HASH_LIMITS, vocab_size=VOCAB_SIZE)
    async with (
        serving(lambda: loaded(runner, limits, make_bytes_tokenizer())) as (_, executor),
        serve_scheduler(executor) as scheduler,
        AsyncClient(scheduler.address) as client,
    ):
        await client.generate("first", stopping=Stopping(max_tokens=1))  # sessions and tokenizers are there
        await scheduler.runtime.until_settled()
        follower.request.is_open = True
        async for _ in client.stream(_PROMPT, stopping=Stopping(max_tokens=3), request_id=_REQUEST_ID):
            follower.token.is_open = False
            runner.is_delivered.set()


def follow() -> tuple[Way, Way]:
    """Serve one request; returns its way down, and its first token's way back."""
    follower = Follower()
    with followed_by(follower):
        asyncio.run(_serve(follower))
    return follower.request, follower.token


def main() -> None:
    for what, way in zip(("request", "token"), follow(), strict=True):
        print(f"a {what}: {len(way.functions)} functions, {len(way.forms)} forms")
        print(*way.functions, sep="\n")
        print(*(form.__name__ for form in way.forms), sep=", ", end="\n\n")


if __name__ == "__main__":
    main()

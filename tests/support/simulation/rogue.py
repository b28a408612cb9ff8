"""A client without the library, which comes back to requests with what is not so, or with hardly anything (F1, F17);
and a scheduler that asks for executors in ways that none may grant.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from paceline.plan.codec import encode_request
from paceline.plan.values import MAX_TERM, Claim, Heartbeat, Hello, ToExecutor
from paceline.plan.versions import ProtocolRange
from paceline.v1 import inference_pb2 as pb
from paceline_client.hashing import rolling_hash
from simulation.executors import ATTACH
from simulation.invariants import Report
from simulation.network import CallEndedError, Host, Site
from simulation.schedulers import SESSION, SchedulerHost

_T = TypeVar("_T")
_PATIENCE_S = 2.0
_RETRY_S = 0.2
_MAX_TRIES = 40
_TENANT = "red"
_MAX_TOKENS = 12
_BEYOND = 20
_FAILED_PRECONDITION = 9


class _Lie(Enum):
    BEYOND = "an offset beyond its output"
    WRONG_HASH = "a hash of other tokens"
    OTHER_BODY = "another body"
    OTHER_TENANT = "another tenant"


@dataclass(slots=True)
class _Answer:
    token_ids: list[int] = field(default_factory=list)
    num_deltas: int = 0
    has_ended: bool = False
    code: int = 0  # that it failed with


_CLAIM = Claim(1, "rogue", "rogue:1")
_HELLOS: tuple[ToExecutor, ...] = (
    Heartbeat(),
    Hello(replace(_CLAIM, term=0)),
    Hello(replace(_CLAIM, term=MAX_TERM)),
    Hello(replace(_CLAIM, scheduler_id="")),
    Hello(replace(_CLAIM, address="a" * 1000)),
    Hello(_CLAIM, tag_key_digest=bytes(1000)),
    Hello(_CLAIM, ProtocolRange(1000, 1001)),
)
"""First messages of plan streams that an executor refuses, whoever drives it."""


class Rogue(Host):
    """Begins requests of its own, leaves them, and comes back."""

    def __init__(self, site: Site, schedulers: Sequence[SchedulerHost], report: Report) -> None:
        super().__init__(site)
        self._next_node()
        self._schedulers = schedulers
        self._report = report
        self._num_requests = 0

    def do(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Do one of the following on its own node."""
        return self._loop.spawn(self.node, work)

    async def lie(self) -> None:
        """Come back to a request in every wrong way: nothing must come of it."""
        honest, received = await self.begin()
        lies = list(_Lie) if received else []
        self._random.shuffle(lies)
        for attachment, lie in enumerate(lies, start=2):
            answer = await self._exchange(_untrue(_again(honest, received, attachment), lie), 1)
            if answer.num_deltas:
                self._report(f"F17: {honest.request_id} was served, asked for with {lie.value}")

    async def knock(self, executors: Sequence[str]) -> None:
        """Ask for executors in every wrong way: none may be accepted, and who drives goes on."""
        for name in executors:
            for hello in self._random.sample(_HELLOS, len(_HELLOS)):
                call = self._network.call(self.node, name, ATTACH)
                call.tampered()
                try:
                    call.ask(encode_request(hello))
                    async with asyncio.timeout(_PATIENCE_S):
                        self._report(f"{name} answers {hello} with {await call.answer()!r}")
                except (CallEndedError, TimeoutError):
                    pass
                finally:
                    call.cancel()

    async def begin(self) -> tuple[pb.GenerateRequest, list[int]]:
        """Begin a request and leave it; returns it with what was received, which is nothing if that failed."""
        self._num_requests += 1
        request = pb.GenerateRequest(
            request_id=f"rogue-{self._num_requests}", tenant=_TENANT, resumable=True, attachment=1
        )
        request.token_ids.ids.extend(self._random.randrange(256) for _ in range(5))
        request.sampling.seed = self._random.getrandbits(32)
        request.stopping.max_tokens = _MAX_TOKENS
        answer = await self._exchange(request, self._random.randint(1, 3))
        return request, answer.token_ids

    async def come_back(self, request: pb.GenerateRequest, received: list[int]) -> None:
        """Read a request to its end without saying which tokens were received: they must still be known somewhere."""
        received = list(received)
        for attachment in range(2, _MAX_TRIES):
            answer = await self._exchange(_again(request, received, attachment), _MAX_TOKENS)
            received += answer.token_ids
            if answer.code == _FAILED_PRECONDITION:
                self._report(f"F1: {request.request_id} was begun, and is not known any more from {len(received)} on")
            if answer.has_ended:
                return
            await asyncio.sleep(_RETRY_S * self._random.random())

    async def _exchange(self, request: pb.GenerateRequest, num_tokens: int) -> _Answer:
        """Send a request, read so many tokens of it or to its end, and break off."""
        answer = _Answer()
        ready = [host.name for host in self._schedulers if host.is_ready]
        name = self._random.choice(ready or [host.name for host in self._schedulers])
        call = self._network.call(self.node, name, SESSION)
        try:
            call.ask(pb.SessionRequest(generate=request))
            async with asyncio.timeout(_PATIENCE_S):
                while len(answer.token_ids) < num_tokens and not answer.has_ended and not answer.code:
                    _take(answer, await call.answer())
        except (CallEndedError, TimeoutError):
            pass
        finally:
            call.cancel()
        return answer


def _take(answer: _Answer, message: object) -> None:
    assert isinstance(message, pb.SessionResponse), "what schedulers say"
    answer.num_deltas += len(message.deltas)
    for each in message.deltas:
        answer.token_ids += each.delta.token_ids
        answer.has_ended = answer.has_ended or each.delta.HasField("finish")
    for failure in message.failures:
        answer.code = failure.error.code


def _again(request: pb.GenerateRequest, received: list[int], attachment: int) -> pb.GenerateRequest:
    """Return the request as it is sent again, without the tokens that were received."""
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    again.attachment, again.resume_from, again.resume_hash = attachment, len(received), rolling_hash(received)
    return again


def _untrue(request: pb.GenerateRequest, lie: _Lie) -> pb.GenerateRequest:
    match lie:
        case _Lie.BEYOND:
            request.resume_from = _BEYOND
        case _Lie.WRONG_HASH:
            request.resume_hash ^= 1
        case _Lie.OTHER_BODY:
            request.sampling.seed += 1
        case _Lie.OTHER_TENANT:
            request.tenant = "blue"
    return request

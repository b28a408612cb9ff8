"""One request of the fake server: plays its steps, keeps what they said, and tells whoever is attached to it.

Plays on without anybody, as a resumable request does, and serves who comes back: checks the offsets and hashes that a
client says to hold, and that it is the same request.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Protocol

import grpc

from paceline.v1 import inference_pb2 as pb
from paceline_client.hashing import rolling_hash
from paceline_client.results import FinishReason
from paceline_client.testing.messages import end_delta, tokens_delta
from paceline_client.testing.script import Break, Die, Drain, End, Fail, Hold, Step, Tokens

Held = pb.GenerateRequest | pb.ResumePoint


class RefusedError(Exception):
    def __init__(self, failure: Fail) -> None:
        super().__init__(failure.message)
        self.failure = failure


class SessionSink(Protocol):
    """What a request needs of a session."""

    def tell(self, request_id: str, delta: pb.Delta) -> None:
        """Send a delta."""

    def fail(self, request_id: str, failure: Fail) -> None:
        """Send the end of a request by an error."""

    def drain(self, reason: str) -> None:
        """Announce that the server goes away."""

    def break_off(self, step: Break) -> None:
        """End at once."""


class World(Protocol):
    """What a request needs of its server."""

    released: asyncio.Event

    def die(self) -> None:
        """End every session and forget every request."""

    def forget(self, request: "PlayedRequest") -> None:
        """Forget one request, which has failed."""


class PlayedRequest:
    """One request. `spent` are the indices of steps that happen once and have; it outlives the request."""

    def __init__(self, world: World, request: pb.GenerateRequest, steps: Sequence[Step], spent: set[int]) -> None:
        self.request_id = request.request_id
        self.attachment = max(request.attachment, 1)
        self.is_resumable = request.resumable
        self._wants_parts = request.output.parts or (bool(request.chat.tools) and not request.output.HasField("parts"))
        self.listener: SessionSink | None = None
        self._world = world
        self._body = _body(request)
        self._steps = steps
        self._spent = spent
        held = _held(request)
        for part in held:
            if not part.resume_finished:
                _check_prior(part)
        num_completions = request.sampling.n or 1
        priors = {index: tuple(part.prior_output_token_ids) for index, part in enumerate(held)}
        self._outputs = [list(priors.get(index, ())) for index in range(num_completions)]
        self._played = self._steps_after([len(output) for output in self._outputs])
        self._attempt = 1 + max((part.last_attempt for part in held), default=0)
        self._ended = {index for index, part in enumerate(held) if part.resume_finished}
        self._said: list[pb.Delta] = []
        self._task = asyncio.create_task(self._play())

    @property
    def is_over(self) -> bool:
        return len(self._ended) == len(self._outputs)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(output) for output in self._outputs)

    def attach(self, listener: SessionSink, request: pb.GenerateRequest) -> None:
        """Tells the listener first what its client does not hold yet. `RefusedError`."""
        offsets = [0] * len(self._outputs)
        held = _held(request)
        for index, part in enumerate(held):
            self._check_held(index, part)
            offsets[index] = part.resume_from
        if _body(request) != self._body:
            raise RefusedError(Fail(grpc.StatusCode.FAILED_PRECONDITION, "it is another request", "RESUME_MISMATCH"))
        if self.listener is not None:
            self.listener.fail(self.request_id, stale(self.request_id))
        self.attachment = max(request.attachment, 1)
        self.listener = listener
        for delta in self._said:
            if held[delta.index].resume_finished:
                continue
            if not delta.token_ids or delta.offset + len(delta.token_ids) > offsets[delta.index]:
                listener.tell(self.request_id, delta)

    def cancel(self) -> bool:
        """False when it has ended."""
        if self.is_over:
            return False
        self._task.cancel()
        for index, output in enumerate(self._outputs):
            if index not in self._ended:
                self._end(End(FinishReason.CANCELLED, completion=index), output)
        return True

    def stop(self) -> None:
        """Plays no more, and says nothing."""
        self.listener = None
        self._task.cancel()

    def _check_held(self, index: int, part: Held) -> None:
        output = self._outputs[index]
        if part.resume_from > len(output):
            what = f"{part.resume_from} tokens are held of {len(output)}"
        elif part.resume_from and part.resume_hash != rolling_hash(output[: part.resume_from]):
            what = f"the hash of {part.resume_from} tokens is another one"
        else:
            return
        message = f"completion {index}: {what}"
        raise RefusedError(Fail(grpc.StatusCode.FAILED_PRECONDITION, message, "RESUME_MISMATCH"))

    def _steps_after(self, num_held: list[int]) -> Iterator[tuple[int, Step]]:
        """Those left to play, with their indices."""
        covered = _covered(self._steps, num_held)
        last = max(covered, default=-1)
        for index, step in enumerate(self._steps):
            is_told = isinstance(step, Tokens | End) if index < last else True
            if is_told and index not in covered and index not in self._spent:
                yield index, step

    async def _play(self) -> None:
        for index, step in self._played:
            match step:
                case Tokens() | End() if step.completion in self._ended:
                    pass  # its client has all of it
                case Tokens():
                    output = self._outputs[step.completion]
                    self._say(tokens_delta(step, output, self._attempt, wants_parts=self._wants_parts))
                    output += step.token_ids
                case End():
                    self._end(step, self._outputs[step.completion])
                case Hold():
                    await self._world.released.wait()
                case Fail():
                    if self.listener is not None:
                        self.listener.fail(self.request_id, step)
                    self._world.forget(self)
                    return
                case Drain(reason):
                    if self.listener is not None:
                        self.listener.drain(reason)
                case Break():
                    self._spent.add(index)
                    if self.listener is not None:
                        self.listener.break_off(step)
                        self.listener = None
                case Die():
                    self._spent.add(index)
                    self._world.die()
                    return

    def _end(self, step: End, output: Sequence[int]) -> None:
        self._ended.add(step.completion)
        self._say(end_delta(step, output, self._attempt))

    def _say(self, delta: pb.Delta) -> None:
        self._said.append(delta)
        if self.listener is not None:
            self.listener.tell(self.request_id, delta)


def stale(request_id: str, newest: int = 0) -> Fail:
    """For an attachment that is not the newest, which one that comes too late is told."""
    message = f"a newer attachment has request {request_id!r}"
    told = (("newest_attachment", str(newest)),) if newest else ()
    return Fail(grpc.StatusCode.ABORTED, message, "STALE_ATTACHMENT", metadata=told)


def _held(request: pb.GenerateRequest) -> list[Held]:
    """By completion."""
    points: dict[int, Held] = {point.index: point for point in request.resume_points}
    points[0] = request
    return [points.get(index, pb.ResumePoint(index=index)) for index in range(request.sampling.n or 1)]


def _check_prior(part: Held) -> None:
    """What was held of a request that nobody knows must be there in full."""
    prior = part.prior_output_token_ids
    if part.resume_from and not prior:
        message = f"the first {part.resume_from} tokens are unknown here"
        raise RefusedError(Fail(grpc.StatusCode.FAILED_PRECONDITION, message, "RESUME_MISMATCH"))
    if len(prior) != part.resume_from or (prior and rolling_hash(prior) != part.resume_hash):
        message = "prior_output_token_ids are not the first resume_from tokens, or not of that hash"
        raise RefusedError(Fail(grpc.StatusCode.INVALID_ARGUMENT, message, "INVALID_FIELD", "prior_output_token_ids"))


def _covered(steps: Sequence[Step], num_held: Sequence[int]) -> set[int]:
    """The indices of the steps whose tokens are held already."""
    num_tokens = [0] * len(num_held)
    covered = set()
    for index, step in enumerate(steps):
        if isinstance(step, Tokens):
            num_tokens[step.completion] += len(step.token_ids)
            if num_tokens[step.completion] <= num_held[step.completion]:
                covered.add(index)
    return covered


def _body(request: pb.GenerateRequest) -> pb.GenerateRequest:
    """Without what may change from one attachment to the next."""
    body = pb.GenerateRequest()
    body.CopyFrom(request)
    body.ClearField("attachment")
    body.ClearField("waited")
    body.ClearField("resume_from")
    body.ClearField("resume_hash")
    body.ClearField("last_attempt")
    body.ClearField("prior_output_token_ids")
    body.ClearField("resume_points")
    body.ClearField("resume_finished")
    return body

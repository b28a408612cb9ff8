"""A client at the edge, without gRPC, that comes back to its request; what it gets over all its streams is checked."""

from dataclasses import dataclass, replace

import numpy as np

from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import TokenLogprobs
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.outbox import Finish, PendingDelta
from paceline_scheduler.api.raw import RawRequest, RawResumption, TextPrompt
from paceline_scheduler.testing.edge_client import EdgeClient


@dataclass(frozen=True, slots=True)
class HeldPoint:
    """What is held of one completion, as paceline.v1.ResumePoint has it: 0 where it is unset."""

    index: int
    resume_from: int = 0
    resume_hash: int = 0
    last_attempt: int = 0
    prior_output_token_ids: tuple[int, ...] = ()


class OutputCopy:
    """What a client has of one completion: text, tokens and end. A gap, a double or a wrong hash is an AssertionError.

    What came to it by other ways may be put in by the test.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.finish: Finish | None = None

    @property
    def rolling_hash(self) -> int:
        """That of the tokens."""
        return rolling_hash(HASH_START, np.array(self.token_ids, dtype=np.int32))

    def take(self, delta: PendingDelta) -> None:
        """Append a delta."""
        assert self.finish is None, "nothing follows the end"
        assert delta.offset == len(self.token_ids), "a gap or a doubled token"
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        assert delta.rolling_hash == self.rolling_hash, "the rolling hash is another one"
        self.text += delta.text
        self.finish = delta.finish

    def point(self, index: int, prior: bool) -> HeldPoint:
        """What the client says of it; with its tokens if `prior`."""
        return HeldPoint(index, len(self.token_ids), self.rolling_hash, 1, tuple(self.token_ids) if prior else ())


class ReturningClient:
    """Sends the resumable request "r1" again and again. `number` is that of its last attachment, `call` its stream."""

    call: EdgeClient

    def __init__(self, edge: Edge, raw: RawRequest | None = None) -> None:
        self.edge = edge
        self.raw = raw or RawRequest(request_id="r1", prompt=TextPrompt("hi"))
        self.copies = [OutputCopy() for _ in range(self.raw.sampling.n or 1)]
        self.number = 0
        self.handles: tuple[int, ...] = ()
        self.errors: list[Exception] = []

    @property
    def handle(self) -> int:
        """That of the only completion in this stream."""
        (handle,) = self.handles
        return handle

    @property
    def copy(self) -> OutputCopy:
        """What it has of the only completion."""
        (copy,) = self.copies
        return copy

    def claim(self, prior: bool = True) -> RawResumption:
        """What it says when it comes the next time; with the tokens that it holds if `prior`."""
        first, *others = (copy.point(index, prior) for index, copy in enumerate(self.copies))
        return RawResumption(
            resumable=True,
            attachment=self.number + 1,
            resume_from=first.resume_from,
            resume_hash=first.resume_hash,
            last_attempt=first.last_attempt,
            prior_output_token_ids=first.prior_output_token_ids,
            resume_points=tuple(others),
        )

    async def come(self, claim: RawResumption | None = None) -> None:
        """Begin the next stream. Raises what is wrong with it."""
        claim = claim or self.claim()
        self.call, self.number = EdgeClient(self.edge), claim.number
        self.handles = await self.call.send(replace(self.raw, resumption=claim))

    def read(self) -> None:
        """Take what waits."""
        parcel = self.call.collect()
        for delta in parcel.deltas:
            self.copies[delta.index].take(delta)
        self.errors += [failure.error for failure in parcel.failures]

"""A client at the edge, without gRPC, that comes back to its request; what it gets over all its streams is checked."""

import numpy as np

from edge_rig.edge_client import EdgeClient
from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import TokenLogprobs
from paceline.v1.inference_pb2 import GenerateRequest, ResumePoint
from paceline_scheduler.api.edge import Edge
from paceline_scheduler.api.outbox import Finish, PendingDelta
from paceline_scheduler.api.resumption import number_of
from paceline_scheduler.api.validation import num_completions


class OutputCopy:
    """What a client has of one completion. A gap, a double or a wrong hash is an AssertionError."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.finish: Finish | None = None

    @property
    def rolling_hash(self) -> int:
        return rolling_hash(HASH_START, np.array(self.token_ids, dtype=np.int32))

    def take(self, delta: PendingDelta) -> None:
        assert self.finish is None, "nothing follows the end"
        assert delta.offset == len(self.token_ids), "a gap or a doubled token"
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        assert delta.rolling_hash == self.rolling_hash, "the rolling hash is another one"
        self.text += delta.text
        self.finish = delta.finish

    def point(self, index: int, prior: bool) -> ResumePoint:
        return ResumePoint(
            index=index,
            resume_from=len(self.token_ids),
            resume_hash=self.rolling_hash,
            last_attempt=1,
            prior_output_token_ids=self.token_ids if prior else (),
            resume_finished=self.finish is not None,
        )


class ReturningClient:
    """Sends the resumable request "r1" again and again. `number` is that of its last attachment, `call` its stream."""

    call: EdgeClient

    def __init__(self, edge: Edge, request: GenerateRequest | None = None) -> None:
        self.edge = edge
        self.request = request or GenerateRequest(request_id="r1", text="hi")
        self.copies = [OutputCopy() for _ in range(num_completions(self.request))]
        self.number = 0
        self.handles: tuple[int, ...] = ()
        self.errors: list[Exception] = []

    @property
    def handle(self) -> int:
        (handle,) = self.handles
        return handle

    @property
    def copy(self) -> OutputCopy:
        (copy,) = self.copies
        return copy

    def claim(self, prior: bool = True, number: int | None = None) -> GenerateRequest:
        """The claim has its tokens if `prior`."""
        first, *others = (copy.point(index, prior) for index, copy in enumerate(self.copies))
        return GenerateRequest(
            resumable=True,
            attachment=self.number + 1 if number is None else number,
            resume_from=first.resume_from,
            resume_hash=first.resume_hash,
            last_attempt=first.last_attempt,
            prior_output_token_ids=first.prior_output_token_ids,
            resume_points=others,
            resume_finished=first.resume_finished,
        )

    async def come(self, claim: GenerateRequest | None = None) -> None:
        sent = GenerateRequest()
        sent.CopyFrom(self.request)
        sent.MergeFrom(claim or self.claim())
        self.call, self.number = EdgeClient(self.edge), number_of(sent)
        self.handles = await self.call.send(sent)

    def read(self) -> None:
        content = self.call.collect()
        for delta in content.deltas:
            self.copies[delta.index].take(delta)
        self.errors += [failure.error for failure in content.failures]

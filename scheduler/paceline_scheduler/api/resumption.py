"""What a client says when it comes back to a request, per completion.

Refuses to know what the request has.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import Message

from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.ranges import Range
from paceline.plan.values import Int32Array
from paceline.v1 import inference_pb2
from paceline_scheduler.api.rules import check_count, check_range, check_token_ids
from paceline_scheduler.core.request import NOTHING_HELD, ResumePoint
from paceline_scheduler.errors import InvalidRequestError

# Attempts are counted on from there, in 32 bits.
MAX_LAST_ATTEMPT = 2**30

_OF_AN_ATTACHMENT = (
    "attachment",
    "resume_from",
    "resume_hash",
    "last_attempt",
    "waited",
    "max_outage",
    "prior_output_token_ids",
    "resume_points",
    "resume_finished",
)
_OF_A_TRACE = ("trace_parent", "trace_state")
_OF_A_PROMPT = ("text", "chat", "token_ids")


@dataclass(frozen=True, slots=True)
class ValidResumption:
    """The client holds `points` of its completions, and the finish of those that are `is_finished`. `is_begun`: it says
    that the request was taken before.
    """

    is_begun: bool
    points: tuple[ResumePoint, ...]
    is_finished: tuple[bool, ...]


def number_of(request: inference_pb2.GenerateRequest) -> int:
    """The attachments of a client are 1, 2, …."""
    return max(1, request.attachment)


def is_begun(request: inference_pb2.GenerateRequest) -> bool:
    return request.attachment > 1 or bool(
        request.resume_from or request.prior_output_token_ids or request.resume_points or request.resume_finished
    )


def body_of(request: inference_pb2.GenerateRequest) -> tuple[bytes, bytes]:
    """Returns the digest of what all attachments have in common, and what a successor gets: the message with its trace,
    without its prompt and unknown fields.
    """
    body = inference_pb2.GenerateRequest()
    body.CopyFrom(request)
    _clear(body, _OF_AN_ATTACHMENT + _OF_A_TRACE)
    digest = hashlib.blake2b(body.SerializeToString(deterministic=True), digest_size=16)
    _clear(body, _OF_A_PROMPT)
    body.DiscardUnknownFields()  # their size has no bound
    if request.trace_parent:  # a successor continues the trace
        body.trace_parent = request.trace_parent
        if request.trace_state:
            body.trace_state = request.trace_state
    return digest.digest(), body.SerializeToString(deterministic=True)


def _clear(message: Message, names: Iterable[str]) -> None:
    for name in names:
        message.ClearField(name)


def check_resumption(
    request: inference_pb2.GenerateRequest, num_completions: int, max_model_len: int, vocab_size: int
) -> ValidResumption:
    """Raises InvalidRequestError."""
    max_tokens = min(request.stopping.max_tokens or max_model_len, max_model_len)
    points = {0: _first_claim(request).check(max_tokens, vocab_size)}
    check_count("resume_points", len(request.resume_points), 0, num_completions - 1)
    for position, sent in enumerate(request.resume_points):
        claim = _point_claim(f"resume_points[{position}].", sent)
        check_range(f"{claim.path}index", sent.index, Range(1, num_completions - 1))
        if sent.index in points:
            raise InvalidRequestError(
                f"{claim.path}index", f"is {sent.index}, as in another resume point; send one for each completion"
            )
        points[sent.index] = claim.check(max_tokens, vocab_size)
    is_finished = tuple(has_finish(request, index) for index in range(num_completions))
    if all(is_finished):
        raise InvalidRequestError("resume_finished", "is set for every completion, so nothing is left to come back for")
    return ValidResumption(
        is_begun=is_begun(request),
        points=tuple(points.get(index, NOTHING_HELD) for index in range(num_completions)),
        is_finished=is_finished,
    )


def has_finish(request: inference_pb2.GenerateRequest, index: int) -> bool:
    if index == 0:
        return request.resume_finished
    return any(point.resume_finished for point in request.resume_points if point.index == index)


def claimed_end(request: inference_pb2.GenerateRequest, index: int) -> tuple[int, int]:
    """Returns how many tokens the client claims to hold and their rolling hash, both unchecked."""
    claims = {0: _first_claim(request)} | {sent.index: _point_claim("", sent) for sent in request.resume_points}
    claim = claims.get(index)
    if claim is None:
        return 0, HASH_START
    if claim.resume_hash is not None:
        return claim.num_held, claim.resume_hash
    return claim.num_held, rolling_hash(HASH_START, np.array(claim.prior, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class _Claim:
    """`path` is where the client says so."""

    path: str
    resume_from: int | None
    resume_hash: int | None
    last_attempt: int
    prior: Sequence[int]

    @property
    def num_held(self) -> int:
        return len(self.prior) if self.resume_from is None else self.resume_from

    def check(self, max_tokens: int, vocab_size: int) -> ResumePoint:
        if not self.num_held and self.resume_hash is None and not self.last_attempt and not self.prior:
            return NOTHING_HELD
        check_range(f"{self.path}resume_from", self.resume_from, Range(0, max_tokens))
        check_range(f"{self.path}last_attempt", self.last_attempt, Range(0, MAX_LAST_ATTEMPT))
        field = f"{self.path}prior_output_token_ids"
        check_count(field, len(self.prior), 0, max_tokens)
        if len(self.prior) not in (0, self.num_held):
            sentence = f"has {len(self.prior)} items, must have none or as many as resume_from, {self.num_held}"
            raise InvalidRequestError(field, sentence)
        token_ids = np.array(self.prior, dtype=np.int32)
        check_token_ids(field, token_ids, vocab_size)
        return ResumePoint(
            resume_from=self.num_held,
            resume_hash=self._check_hash(token_ids),
            last_attempt=self.last_attempt,
            prior_output_token_ids=token_ids if len(token_ids) else None,
        )

    def _check_hash(self, token_ids: Int32Array) -> int:
        field, claimed = f"{self.path}resume_hash", self.resume_hash
        if self.num_held and not len(token_ids):
            if claimed is None:
                sentence = "is missing; set it, or send prior_output_token_ids"
                raise InvalidRequestError(field, sentence)
            return claimed
        computed = rolling_hash(HASH_START, token_ids)
        if claimed is not None and claimed != computed:
            sentence = f"is {claimed:#018x}, but the hash of prior_output_token_ids is {computed:#018x}"
            raise InvalidRequestError(field, sentence)
        return computed


def _first_claim(request: inference_pb2.GenerateRequest) -> _Claim:
    return _Claim(
        "",
        request.resume_from if request.HasField("resume_from") else None,
        request.resume_hash if request.HasField("resume_hash") else None,
        request.last_attempt,
        request.prior_output_token_ids,
    )


def _point_claim(path: str, point: inference_pb2.ResumePoint) -> _Claim:
    # A hash of 0 is as good as none.
    prior = point.prior_output_token_ids
    return _Claim(path, point.resume_from, point.resume_hash or None, point.last_attempt, prior)

"""What a client says when it comes back to a request: the rules for it, and what it amounts to per completion.

Knows only what the client sent. Whether that is what the request has is for the backend to find.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.plan.hashes import HASH_START, rolling_hash
from paceline.plan.values import Int32Array
from paceline_scheduler.api.raw import RawResumption, ResumePoint
from paceline_scheduler.api.rules import check_count, check_range, check_token_ids
from paceline_scheduler.core.request import Progress
from paceline_scheduler.errors import InvalidRequestError

# Attempts are counted on from there, in 32 bits.
MAX_LAST_ATTEMPT = 2**30

_NOTHING = Progress(0, HASH_START)


@dataclass(frozen=True, slots=True)
class ValidResumption:
    """How a client is attached to its request. `progress` is what it holds of each completion, by index.

    `is_begun`: the client says that the request was taken once already.
    """

    is_resumable: bool
    attachment: int
    waited_s: float
    is_begun: bool
    progress: tuple[Progress, ...]

    @property
    def is_attachment(self) -> bool:
        """Whether the request may be known already, or may be come back to; else it is simply submitted."""
        return self.is_resumable or self.is_begun


@dataclass(frozen=True, slots=True)
class OutputBounds:
    """What an output can be: `max_tokens` of them at most, ids below `vocab_size`."""

    max_tokens: int
    vocab_size: int


def check_resumption(raw: RawResumption, num_completions: int, bounds: OutputBounds) -> ValidResumption:
    """Check what a client says that it holds; raises InvalidRequestError, naming the field."""
    check_range("attachment", raw.attachment, 0)
    progress = {0: _first_claim(raw).check(bounds)}
    check_count("resume_points", len(raw.resume_points), 0, num_completions - 1)
    for position, point in enumerate(raw.resume_points):
        claim = _point_claim(f"resume_points[{position}].", point)
        check_range(f"{claim.path}index", point.index, 1, num_completions - 1)
        if point.index in progress:
            raise InvalidRequestError(f"{claim.path}index", f"is {point.index}, which another one is for")
        progress[point.index] = claim.check(bounds)
    return ValidResumption(
        is_resumable=raw.resumable,
        attachment=raw.number,
        waited_s=raw.waited_s or 0.0,
        is_begun=raw.is_begun,
        progress=tuple(progress.get(index, _NOTHING) for index in range(num_completions)),
    )


def claimed_end(raw: RawResumption, index: int) -> tuple[int, int]:
    """Return how many tokens of a completion the client says it holds and their rolling hash, all of it unchecked."""
    claims = {0: _first_claim(raw)} | {point.index: _point_claim("", point) for point in raw.resume_points}
    claim = claims.get(index)
    if claim is None:
        return 0, HASH_START
    if claim.resume_hash is not None:
        return claim.num_held, claim.resume_hash
    return claim.num_held, rolling_hash(HASH_START, np.array(claim.prior, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class _Claim:
    """What a client says of one completion; `path` is where it says so."""

    path: str
    resume_from: int | None
    resume_hash: int | None
    last_attempt: int | None
    prior: Sequence[int]

    @property
    def num_held(self) -> int:
        return len(self.prior) if self.resume_from is None else self.resume_from

    def check(self, bounds: OutputBounds) -> Progress:
        """Return it, all filled in."""
        check_range(f"{self.path}resume_from", self.resume_from, 0, bounds.max_tokens)
        check_range(f"{self.path}last_attempt", self.last_attempt, 0, MAX_LAST_ATTEMPT)
        field = f"{self.path}prior_output_token_ids"
        check_count(field, len(self.prior), 0, bounds.max_tokens)
        if len(self.prior) not in (0, self.num_held):
            sentence = f"has {len(self.prior)} items, must have none or resume_from of them, which is {self.num_held}"
            raise InvalidRequestError(field, sentence)
        token_ids = np.array(self.prior, dtype=np.int32)
        check_token_ids(field, token_ids, bounds.vocab_size)
        return Progress(
            resume_from=self.num_held,
            resume_hash=self._check_hash(token_ids),
            last_attempt=self.last_attempt or 0,
            prior_output_token_ids=token_ids if len(token_ids) else None,
        )

    def _check_hash(self, token_ids: Int32Array) -> int:
        field, claimed = f"{self.path}resume_hash", self.resume_hash
        if self.num_held and not len(token_ids):
            if claimed is None:
                sentence = "is missing; without prior_output_token_ids it has to show what is held"
                raise InvalidRequestError(field, sentence)
            return claimed
        computed = rolling_hash(HASH_START, token_ids)
        if claimed is not None and claimed != computed:
            sentence = f"is {claimed:#018x}, that of the {self.num_held} tokens held is {computed:#018x}"
            raise InvalidRequestError(field, sentence)
        return computed


def _first_claim(raw: RawResumption) -> _Claim:
    return _Claim("", raw.resume_from, raw.resume_hash, raw.last_attempt, raw.prior_output_token_ids)


def _point_claim(path: str, point: ResumePoint) -> _Claim:
    # A hash of 0 is as good as none: one in 2^64 outputs has it.
    prior = point.prior_output_token_ids
    return _Claim(path, point.resume_from, point.resume_hash or None, point.last_attempt, prior)

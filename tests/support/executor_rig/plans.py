"""Plans as the executor works on them, from small literal numbers."""

from collections.abc import Sequence

import numpy as np

from paceline.plan.sampling import SamplingParams
from paceline.plan.values import (
    NO_COPIES,
    NO_TAGS,
    BatchPlan,
    BlockCopies,
    BlockGrants,
    BlockTags,
    FinalRelease,
    FinishReason,
    NewRequest,
    RecordId,
    Release,
)
from paceline_executor.runner.interface import Int32Array

Cell = tuple[int, int, int]  # row, index, block

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


def int32(values: Sequence[int]) -> Int32Array:
    return np.array(values, dtype=np.int32)


def record(name: str) -> RecordId:
    return RecordId("", name)


def placement(
    row: int,
    prompt: Sequence[int],
    *,
    name: str = "",
    output: Sequence[int] = (),
    num_cached_tokens: int = 0,
    max_tokens: int = 16,
    end_token_ids: Sequence[int] = (),
    sampling: SamplingParams = GREEDY,
    num_logprobs: int | None = None,
    unsupported_fields: Sequence[str] = (),
    context: bytes = b"",
    min_tokens: int = 0,
    ignored_end_token_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    num_prompt_logprobs: int | None = None,
    structured: bytes = b"",
) -> NewRequest:
    return NewRequest(
        row=row,
        record_id=record(name or f"request-{row}"),
        attempt=1,
        prompt_token_ids=int32(prompt),
        output_token_ids=int32(output),
        num_cached_tokens=num_cached_tokens,
        sampling=sampling,
        unsupported_fields=tuple(unsupported_fields),
        end_token_ids=tuple(end_token_ids),
        max_tokens=max_tokens,
        num_logprobs=num_logprobs,
        context=context,
        min_tokens=min_tokens,
        ignored_end_token_ids=tuple(ignored_end_token_ids),
        bad_word_token_ids=tuple(tuple(word) for word in bad_words),
        num_prompt_logprobs=num_prompt_logprobs,
        structured=structured,
    )


def plan(
    scheduled: Sequence[tuple[int, int]] = (),
    *,
    step_id: int = 1,
    epoch: int = 1,
    place: Sequence[NewRequest] = (),
    grants: Sequence[Cell] = (),
    shared: Sequence[Cell] = (),
    copies: Sequence[tuple[int, int]] = (),
    tags: Sequence[tuple[int, bytes]] = (),
    preempt: Sequence[int] = (),
    finish: Sequence[tuple[int, int]] = (),
    forget: Sequence[str] = (),
    drafts: Sequence[int] = (),
) -> BatchPlan:
    """`drafts` are those of each scheduled row; drafters have a second to catch up."""
    releases = [Release(row, None) for row in preempt]
    releases += [Release(row, FinalRelease(num_output, FinishReason.STOP)) for row, num_output in finish]
    return BatchPlan(
        draft_spare_ns=10**9 if drafts else 0,
        incarnation=1,
        epoch=epoch,
        step_id=step_id,
        tags=BlockTags(int32([block for block, _ in tags]), b"".join(key for _, key in tags)) if tags else NO_TAGS,
        releases=tuple(releases),
        forget=tuple(record(name) for name in forget),
        copies=BlockCopies(int32([a for a, _ in copies]), int32([b for _, b in copies])) if copies else NO_COPIES,
        new_requests=tuple(place),
        grants=cells(grants),
        shared=cells(shared),
        rows=int32([row for row, _ in scheduled]),
        num_scheduled_tokens=int32([num_tokens for _, num_tokens in scheduled]),
        num_draft_tokens=int32(drafts),
    )


def cells(values: Sequence[Cell]) -> BlockGrants:
    columns = list(zip(*values, strict=True)) or [(), (), ()]
    return BlockGrants(*(int32(column) for column in columns))

"""A request as the core sees it, for each completion of what one client asked.

Apart from the edge, which knows streams.
"""

import hashlib
from dataclasses import replace

from paceline_scheduler.core.request import Request, ResumePoint


def core_requests(first: Request, handles: tuple[int, ...], points: tuple[ResumePoint, ...]) -> tuple[Request, ...]:
    others = (
        replace(
            first,
            handle=handle,
            key=replace(first.key, index=index),
            sampling=replace(first.sampling, seed=completion_seed(first.sampling.seed, index)),
            num_prompt_logprobs=None,  # the prompt is the same for all
            point=point,
        )
        for index, (handle, point) in enumerate(zip(handles[1:], points[1:], strict=True), 1)
    )
    return replace(first, handle=handles[0], point=points[0]), *others


def completion_seed(seed: int, index: int) -> int:
    if index == 0:
        return seed
    data = seed.to_bytes(8, "big") + index.to_bytes(4, "big")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"paceline-choice").digest(), "big")

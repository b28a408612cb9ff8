"""Requests with short defaults, so that a test names only what it is about."""

from collections.abc import Sequence
from itertools import count

import numpy as np

from paceline.plan.sampling import SamplingParams
from paceline.plan.values import Int32Array, RecordId
from paceline.v1 import inference_pb2
from paceline_scheduler.core.executors import History, Placement
from paceline_scheduler.core.request import Request

_handles = count(1)


def column(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def make_request(
    prompt: int | Sequence[int] = 3,
    max_tokens: int | None = 4,
    *,
    handle: int | None = None,
    request_id: str | None = None,
    tenant: str = "",
    model: str = "simulated",
    seed: int | None = None,
    end_token_ids: tuple[int, ...] = (),
    num_logprobs: int | None = None,
    deadline_s: float | None = None,
    cache_salt: str = "",
    bypass_prefix_cache: bool = False,
    min_tokens: int = 0,
    num_prompt_logprobs: int | None = None,
    priority: int = 0,
    is_resumable: bool = False,
    attachment: int = 1,
    max_num_draft_tokens: int | None = None,
) -> Request:
    """`prompt` is its token ids or how many made-up ones, different for every handle."""
    number = next(_handles) if handle is None else handle
    sent = inference_pb2.GenerateRequest(resumable=is_resumable, cache_salt=cache_salt, priority=priority)
    sent.bypass_prefix_cache = bypass_prefix_cache
    if max_tokens is not None:
        sent.stopping.max_tokens = max_tokens
    if num_prompt_logprobs is not None:
        sent.output.prompt_logprobs = num_prompt_logprobs
    if max_num_draft_tokens is not None:
        sent.speculation.max_num_draft_tokens = max_num_draft_tokens
    if isinstance(prompt, int):
        prompt = [(number * 1009 + position * 7) % 1000 for position in range(prompt)]
    return Request(
        handle=number,
        key=RecordId(tenant, f"request-{number}" if request_id is None else request_id),
        model=model,
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        sampling=SamplingParams(1.0, 0, 1.0, 0.0, number if seed is None else seed),
        end_token_ids=end_token_ids,
        max_tokens=max_tokens,
        num_logprobs=num_logprobs,
        deadline_s=deadline_s,
        cache_salt=cache_salt,
        bypass_prefix_cache=bypass_prefix_cache,
        min_tokens=min_tokens,
        num_prompt_logprobs=num_prompt_logprobs,
        priority=priority,
        is_resumable=is_resumable,
        attachment=attachment,
        origin=sent.SerializeToString(),
        max_num_draft_tokens=max_num_draft_tokens,
    )


def make_placement(
    row: int,
    request: Request,
    attempt: int = 1,
    output: Sequence[int] = (),
    *,
    max_tokens: int | None = None,
    num_cached_tokens: int = 0,
    waited_s: float = 0.0,
    deadline_left_s: float | None = None,
    num_preemptions: int = 0,
    num_executor_deaths: int = 0,
    num_prompt_cached_tokens: int = 0,
) -> Placement:
    """`max_tokens` is what the request asks for, else 8."""
    history = History(
        waited_s=waited_s,
        deadline_left_s=deadline_left_s,
        num_preemptions=num_preemptions,
        num_executor_deaths=num_executor_deaths,
        num_prompt_cached_tokens=num_prompt_cached_tokens,
    )
    return Placement.of(
        request, history, row, attempt, column(*output), max_tokens or request.max_tokens or 8, num_cached_tokens
    )

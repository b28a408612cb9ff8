"""From one valid request to the requests of the core, one for each of its completions."""

import hashlib
from dataclasses import replace

from paceline.plan.values import Int32Array
from paceline_scheduler.api.validation import ValidRequest
from paceline_scheduler.core.request import Request


def core_requests(valid: ValidRequest, token_ids: Int32Array, handles: tuple[int, ...]) -> tuple[Request, ...]:
    return tuple(_core_request(valid, token_ids, handles, index) for index in range(len(handles)))


def completion_seed(seed: int, index: int) -> int:
    if index == 0:
        return seed
    data = seed.to_bytes(8, "big") + index.to_bytes(4, "big")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"paceline-choice").digest(), "big")


def _core_request(valid: ValidRequest, token_ids: Int32Array, handles: tuple[int, ...], index: int) -> Request:
    return Request(
        handle=handles[index],
        key=replace(valid.key, index=index),
        model=valid.model.name,
        prompt_token_ids=token_ids,
        sampling=replace(valid.sampling, seed=completion_seed(valid.sampling.seed, index)),
        end_token_ids=valid.end_token_ids,
        max_tokens=valid.max_tokens,
        num_logprobs=valid.num_logprobs,
        min_tokens=valid.min_tokens,
        ignored_end_token_ids=valid.ignored_end_token_ids,
        bad_words=valid.bad_word_token_ids,
        num_prompt_logprobs=valid.num_prompt_logprobs if index == 0 else None,  # the prompt is the same for all
        deadline_s=valid.deadline_s,
        cache_salt=valid.cache_salt,
        bypass_prefix_cache=valid.bypass_prefix_cache,
        priority=valid.priority,
        num_completions=len(handles),
        max_num_draft_tokens=valid.max_num_draft_tokens,
        is_resumable=valid.resumption.is_resumable,
        attachment=valid.resumption.attachment,
        waited_s=valid.resumption.waited_s,
        origin=valid.origin,
        body_digest=valid.body_digest,
        trace_parent=valid.trace_parent,
    )

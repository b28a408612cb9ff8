"""What every field of the plan protocol may hold: one table, and the check of a message against it.

Each field of each message that schedulers and executors read of each other has its line here, and a message is checked
when it comes in, before anything is made of it. The bounds are of the protocol, far above use: what is beyond is a
mistake or a lie, and would cost its reader memory, time, or numbers that no type of his holds. They are not those of
one executor (`Welcome` names these) nor those of one request, which fails alone.

Messages of single tokens' log-probabilities become columns when they are read and are
checked there, by `check_values`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import Message

from paceline.plan.codec.bound_kinds import (
    Bound,
    Column,
    Data,
    Floats,
    Inside,
    Many,
    Pairs,
    Period,
    Real,
    TextLength,
    Unread,
    Whole,
)
from paceline.plan.codec.columns import MalformedError
from paceline.plan.sampling import SAMPLING_RANGES
from paceline.plan.texts import MAX_NAME_BYTES, MAX_SENTENCE_BYTES
from paceline.plan.values import KEY_BYTES, MAX_BLOCKS, MAX_TERM, FinishReason, Float32Array, Int32Array, RowFinish
from paceline.v1 import executor_pb2, inference_pb2, plan_pb2, sampling_pb2

MAX_RESPONSE_BYTES = 16 * 1024 * 1024
"""The longest message of an executor on the plan stream."""

MAX_PART_BYTES = 2 * 1024 * 1024
"""The longest part of a snapshot or a tokenizer, which executors send in parts of half of that."""

MAX_INFO_BYTES = 1024 * 1024
"""The longest answer to GetInfo."""

MAX_BLOCK_SIZE = 1 << 12
MAX_ROWS = 1 << 13
MAX_STEP_TOKENS = 1 << 20
MAX_TOKENS = 1 << 24  # of a row
MAX_PLANS = 1 << 8  # in flight
MAX_RANKS = 1 << 10
MAX_VOCABULARY = 1 << 20
MAX_TOP = 1 << 10  # alternatives of a token: fifty times what a request may ask for
MAX_NS = 10 * 366 * 86_400 * 1_000_000_000  # ten years
_INT32 = (1 << 31) - 1
_UINT64 = (1 << 64) - 1
_MAX_COUNT = 1 << 48  # of what is numbered through: epochs, steps


class BoundError(MalformedError):
    """A field that holds what is beyond its bound; the sentence says both."""


_MESSAGE = Inside()
_NEEDED = Inside(is_needed=True)
_BIT = Whole(0, 1)
_ANY = Whole(0, _UINT64)  # what is random: incarnations, seeds, hashes
_NUMBER = Whole(0, _MAX_COUNT)
_TERM = Whole(0, MAX_TERM)
_ROW = Whole(0, MAX_ROWS - 1)
_LENGTH = Whole(0, MAX_TOKENS)
_INT = Whole(0, _INT32)  # attempts, and what a request asks for: it fails alone where that is too much
_TIME = Whole(0, MAX_NS)
_VERSION = Whole(0, 1 << 16)
_TOKEN = Whole(0, _INT32)
_FEW_TOKENS = Many(1 << 10, _TOKEN)
_FINISH_REASON = Whole(0, max(FinishReason))
_ROW_FINISH = Whole(0, max(RowFinish))
_TOKENS = Column(_INT32, MAX_TOKENS)
_ROWS = Column(MAX_ROWS - 1, MAX_ROWS)
_COUNTS = Column(MAX_STEP_TOKENS, MAX_ROWS)
_BLOCKS = Column(MAX_BLOCKS - 1, MAX_BLOCKS)
_LOGPROB = (-math.inf, 1.0)  # at most 0, but for rounding
_WISH = Real(-1e9, 1e9)  # a parameter that nothing can be sampled with fails its request
_ID = TextLength(0, 64)
_NAME = TextLength(0, MAX_NAME_BYTES)
_KEY_PART = TextLength(0, 128, is_name=False)  # clients choose it, and it is told to nobody else
_SENTENCE = TextLength(0, MAX_SENTENCE_BYTES, is_name=False)
_FORM = TextLength(0, 1 << 20, is_name=False)
_DIGEST = Data(0, 64)
_TRANSFERS = Many(1 << 14)
_SPAN = Period(MAX_NS // 1_000_000_000)

TABLE: dict[type[Message], dict[str, Bound]] = {
    plan_pb2.AttachRequest: {"hello": _MESSAGE, "plan": _MESSAGE, "heartbeat": _MESSAGE, "plans": _MESSAGE},
    plan_pb2.BatchPlans: {"plans": Many(MAX_PLANS)},
    plan_pb2.AttachResponse: {
        "waiting": _MESSAGE,
        "welcome": _MESSAGE,
        "snapshot": _MESSAGE,
        "result": _MESSAGE,
        "heartbeat": _MESSAGE,
        "drain": _MESSAGE,
        "results": _MESSAGE,
    },
    plan_pb2.StepResults: {"results": Many(MAX_PLANS)},
    plan_pb2.Hello: {
        "scheduler_id": TextLength(1, 64),
        "term": Whole(1, MAX_TERM),
        "min_protocol": _VERSION,
        "max_protocol": _VERSION,
        "takeover": _BIT,
        "tag_key_digest": _DIGEST,
        "address": _NAME,
    },
    inference_pb2.Heartbeat: {"running_step_id": _NUMBER, "running_ns": _TIME},
    plan_pb2.WaitingInLine: {"holder_scheduler_id": _ID, "holder_term": _TERM, "holder_address": _NAME},
    inference_pb2.Drain: {"reason": _SENTENCE, "grace": _SPAN},
    # Who an executor is
    plan_pb2.Welcome: {
        "incarnation": _ANY,
        "epoch": _NUMBER,
        "protocol": _VERSION,
        "model": _NEEDED,
        "geometry": _NEEDED,
        "limits": _NEEDED,
        "tag_key": Data(1, 64),  # of BLAKE2b
        "step_points": Many(1 << 10),
        "tokenizer_digest": TextLength(0, 128),
        "failed_step": _MESSAGE,
        "graphs": _MESSAGE,
    },
    inference_pb2.Model: {
        "name": TextLength(1, MAX_NAME_BYTES),
        "architecture": _NAME,
        "max_model_len": Whole(1, MAX_TOKENS),
        "vocab_size": Whole(1, MAX_VOCABULARY),
        "end_token_ids": _FEW_TOKENS,
        "has_chat_template": _BIT,
        "num_executors": _INT,
        "num_parameters": _NUMBER,
        "quantization": _NAME,
        "default_sampling": _MESSAGE,
        "adapters": Many(1 << 10),
        "has_dummy_weights": _BIT,
        "default_system_text": TextLength(0, 1 << 16, is_name=False),
        "weight_bytes": _NUMBER,
        "weights_digest": TextLength(0, 128),
        "num_ranks": Whole(0, MAX_RANKS),
        "supports_tools": _BIT,
        "supports_reasoning": _BIT,
        "structured_output": _NAME,
    },
    plan_pb2.KvGeometry: {
        "num_blocks": Whole(1, MAX_BLOCKS),
        "block_size": Whole(1, MAX_BLOCK_SIZE),
        "bytes_per_block": _NUMBER,
        "dtype": _NAME,
        "layout_digest": _DIGEST,
        "num_host_blocks": Whole(0, _INT32),
    },
    plan_pb2.ExecutorLimits: {
        "max_num_rows": Whole(1, MAX_ROWS),
        "max_num_batched_tokens": Whole(1, MAX_STEP_TOKENS),
        "max_model_len": Whole(1, MAX_TOKENS),
        "max_plans_in_flight": Whole(1, MAX_PLANS),
        "max_num_draft_tokens": Whole(0, 63),
        "num_adapter_slots": Whole(0, 1 << 10),
        "role": Whole(0, max(plan_pb2.ExecutorRole.values())),
    },
    plan_pb2.StepPoint: {"num_tokens": Whole(1, MAX_STEP_TOKENS), "duration_ns": Whole(1, MAX_NS)},
    plan_pb2.FailedStep: {"epoch": _NUMBER, "step_id": _NUMBER, "message": _SENTENCE},
    executor_pb2.GetInfoResponse: {
        "incarnation": _ANY,
        "epoch": _NUMBER,
        "term": _TERM,
        "holder_scheduler_id": _ID,
        "model": _MESSAGE,
        "geometry": _MESSAGE,
        "limits": _MESSAGE,
        "min_protocol": _VERSION,
        "max_protocol": _VERSION,
        "device": _NAME,
        "num_threads": Whole(0, 1 << 16),
        "last_step_id": _NUMBER,
        "draining": _BIT,
        "uptime": _SPAN,
        "version": _NAME,
        "holder_address": _NAME,
        "tokenizer_digest": TextLength(0, 128),
        "num_waiting_schedulers": Whole(0, 1 << 16),
    },
    executor_pb2.GetTokenizerResponse: {
        "digest": TextLength(0, 128),
        "tokenizer_json": Data(0, MAX_PART_BYTES),
        "chat_template": TextLength(0, MAX_PART_BYTES, is_name=False),
        "bos_token_id": _TOKEN,
        "eos_token_id": _TOKEN,
        "end_token_ids": _FEW_TOKENS,
        "add_bos": _BIT,
        "default_sampling": _MESSAGE,
        "last": _BIT,
        "response_template": TextLength(0, 1 << 20, is_name=False),
        "prefix_token_ids": _FEW_TOKENS,
        "suffix_token_ids": _FEW_TOKENS,
        "special_tokens": Pairs(64, TextLength(1, 64), TextLength(0, 1 << 10, is_name=False)),
        "default_system_text": TextLength(0, 1 << 16, is_name=False),
        "tool_use_template": TextLength(0, MAX_PART_BYTES, is_name=False),
    },
    # Plans
    plan_pb2.BatchPlan: {
        "incarnation": _ANY,
        "epoch": _NUMBER,
        "step_id": _NUMBER,
        "tags": _MESSAGE,
        "releases": Many(MAX_ROWS),
        "copies": _MESSAGE,
        "new_requests": Many(MAX_ROWS),
        "grants": _MESSAGE,
        "shared": _MESSAGE,
        "rows": _ROWS,
        "num_scheduled_tokens": _COUNTS,
        "num_draft_tokens": _COUNTS,
        "min_draft_chance": Real(0.0, 1.0),
        "predicted_ns": _TIME,
        "draft_spare_ns": _TIME,
        "forget": Many(1 << 14),
        "adapter_loads": _TRANSFERS,
        "imports": _TRANSFERS,
        "exports": _TRANSFERS,
    },
    plan_pb2.NewRequest: {
        "row": _ROW,
        "id": _MESSAGE,
        "attempt": _INT,
        "prompt_token_ids": _TOKENS,
        "output_token_ids": _TOKENS,
        "num_cached_tokens": _LENGTH,
        "sampling": _MESSAGE,
        "end_token_ids": _FEW_TOKENS,
        "max_tokens": _INT,
        "num_logprobs": _INT,
        "context": Data(0, 1 << 20),
        "min_tokens": _INT,
        "num_prompt_logprobs": _INT,
        "structured": _MESSAGE,
        "bad_word_token_ids": Many(1 << 12),
        "ignored_end_token_ids": _FEW_TOKENS,
        "adapter_slot": Whole(0, 1 << 10),
        "trace_parent": TextLength(0, 128, is_name=False),
    },
    plan_pb2.RecordId: {"tenant": _KEY_PART, "request_id": _KEY_PART, "index": _INT},
    inference_pb2.TokenIds: {"ids": Many(1 << 14, _TOKEN)},
    sampling_pb2.SamplingParams: {
        **dict.fromkeys(SAMPLING_RANGES, _WISH),
        "top_k": Whole(-1 - _INT32, _INT32),
        "seed": _ANY,
        "logit_bias": Pairs(1 << 12, _TOKEN, _WISH),
        "allowed_token_ids": Many(1 << 14, _TOKEN),
        "bad_words": Many(1 << 10, _NAME),
        "n": Whole(-1 - _INT32, _INT32),
    },
    sampling_pb2.StructuredOutput: {
        **dict.fromkeys(("json_schema", "regex", "grammar"), _FORM),
        "choice": _MESSAGE,
        "json_object": _BIT,
        "tags": _MESSAGE,
        "whitespace": _INT,
        "in_reasoning": _BIT,
        "composed": TextLength(0, 1 << 18, is_name=False),
    },
    sampling_pb2.Choice: {"options": Many(1 << 12, TextLength(0, 1 << 16, is_name=False))},
    sampling_pb2.Tags: {"tags": Many(1 << 10), "required": _BIT, "at_most_one": _BIT},
    sampling_pb2.Tag: dict.fromkeys(("begin", "json_schema", "regex", "grammar", "end"), _FORM),
    plan_pb2.BlockGrants: {"rows": Column(MAX_ROWS - 1, MAX_BLOCKS), "indices": _BLOCKS, "block_ids": _BLOCKS},
    plan_pb2.BlockCopies: {"sources": _BLOCKS, "destinations": _BLOCKS},
    plan_pb2.BlockTags: {"block_ids": _BLOCKS, "keys": Data(0, KEY_BYTES * MAX_BLOCKS)},
    plan_pb2.Release: {"row": _ROW, "final": _MESSAGE},
    plan_pb2.FinalRelease: {"num_output_tokens": _LENGTH, "reason": _FINISH_REASON},
    # Results
    plan_pb2.StepResult: {
        "incarnation": _ANY,
        "epoch": _NUMBER,
        "step_id": _NUMBER,
        "rows": _ROWS,
        "num_accepted": _COUNTS,
        "token_ids": Column(_INT32, MAX_STEP_TOKENS),
        "finishes": Data(0, MAX_ROWS),
        "logprobs": Many(MAX_ROWS),
        "errors": Many(MAX_ROWS),
        "grant_hash": _ANY,
        "timings": _MESSAGE,
        "num_draft_tokens": _COUNTS,
        "prompt_logprobs": Many(MAX_ROWS),
        "confirmations": _TRANSFERS,
    },
    plan_pb2.RowLogprobs: {"row": _ROW, "tokens": Many(MAX_STEP_TOKENS)},
    plan_pb2.RowPromptLogprobs: {"row": _ROW, "position": _LENGTH, "tokens": Many(MAX_STEP_TOKENS)},
    sampling_pb2.TokenLogprobs: {
        "token_id": Column(_INT32, MAX_STEP_TOKENS),
        "logprob": Floats(*_LOGPROB, MAX_STEP_TOKENS),
        "top": Many(MAX_TOP),
        "token_bytes": Unread(),
    },
    sampling_pb2.TokenLogprob: {
        "token_id": Column(_INT32, MAX_STEP_TOKENS * MAX_TOP),
        "logprob": Floats(*_LOGPROB, MAX_STEP_TOKENS * MAX_TOP),
        "token_bytes": Unread(),
    },
    plan_pb2.RowError: {"row": _ROW, "error": _MESSAGE},
    sampling_pb2.RequestError: {"code": Whole(0, 16), "message": _SENTENCE, "details": Many(16)},
    sampling_pb2.ErrorDetail: {"type_url": _NAME, "value": Data(0, 4 * MAX_SENTENCE_BYTES)},
    plan_pb2.StepTimings: {
        "waited_ns": _TIME,
        "prepare_ns": _TIME,
        "forward_ns": _TIME,
        "sample_ns": _TIME,
        "idle_ns": _TIME,
        "draft_ns": _TIME,
    },
    # Snapshots
    plan_pb2.SnapshotPart: {
        "rows": Many(1 << 14),
        "tags": _MESSAGE,
        "last": _BIT,
        "adapters": _TRANSFERS,
        "imports": _TRANSFERS,
        "exports": _TRANSFERS,
        "num_parts": Whole(0, 4096),
    },
    plan_pb2.RowState: {
        "id": _MESSAGE,
        "row": _ROW,
        "attempt": _INT,
        "prompt_token_ids": _TOKENS,
        "output_token_ids": _TOKENS,
        "num_computed_tokens": _LENGTH,
        "block_ids": _BLOCKS,
        "finish": _ROW_FINISH,
        "released": _MESSAGE,
        "max_tokens": _INT,
        "sampling": _MESSAGE,
        "end_token_ids": _FEW_TOKENS,
        "context": Data(0, 1 << 20),
        "continues": _BIT,
        "logprobs": _MESSAGE,
        "prompt_logprobs": _MESSAGE,
        "adapter_slot": Whole(0, 1 << 10),
    },
    plan_pb2.LogprobColumns: {
        "offset": _LENGTH,
        "logprobs": Floats(*_LOGPROB, MAX_TOKENS),
        "num_top": Whole(0, MAX_TOP),
        "top_token_ids": Column(_INT32, MAX_TOKENS * MAX_TOP),
        "top_logprobs": Floats(*_LOGPROB, MAX_TOKENS * MAX_TOP),
    },
    # Of later versions: what is set is refused by name, or not read
    plan_pb2.GraphSizes: {
        "num_rows": Many(1 << 8, Whole(1, MAX_ROWS)),
        "num_tokens": Many(1 << 8, Whole(1, MAX_STEP_TOKENS)),
    },
    inference_pb2.Adapter: {"name": _NAME, "digest": TextLength(0, 128), "rank": Whole(0, 1 << 16)},
    plan_pb2.AdapterLoad: {"id": _ANY, "slot": Whole(0, 1 << 10), "digest": TextLength(0, 128)},
    plan_pb2.BlockTransfer: {
        "id": _ANY,
        "block_ids": _BLOCKS,
        "peer": _NAME,
        "peer_block_ids": Column(_INT32, MAX_BLOCKS),
        "token": Data(0, 256),
    },
    plan_pb2.Confirmation: {"id": _ANY, "error": _MESSAGE},
    # What schedulers leave for schedulers
    inference_pb2.PhaseTimes: {"queued": _SPAN, "prefill": _SPAN, "decode": _SPAN, "preempted": _SPAN},
    plan_pb2.RequestContext: {
        # As a client sent it: the scheduler that reads it looks at its fields.
        **dict.fromkeys(("request", "request_with_form"), Inside(is_looked_into=False)),
        "body_digest": _DIGEST,
        "waited": _SPAN,
        "deadline_left": _SPAN,
        "num_preemptions": _INT,
        "num_executor_deaths": _INT,
        "num_prompt_cached_tokens": _INT,
        "last_death_offset": _INT,
        "settings": _MESSAGE,
        "times": _MESSAGE,
        "num_draft_tokens": _INT,
        "num_accepted_draft_tokens": _INT,
        "output_format": TextLength(0, 128, is_name=False),
    },
}

_READ_AS_COLUMNS = (plan_pb2.RowLogprobs, plan_pb2.RowPromptLogprobs)
_LOOK_INSIDE, _LOOK_INSIDE_EACH = 1, 2


@dataclass(frozen=True, slots=True)
class _MessageBounds:
    """A message's part of the table, as it is looked up: by field number, and the fields that may not be left out."""

    by_number: dict[int, tuple[Callable[[Any], str | None] | None, int]]  # None: nothing can be wrong with it
    needed: tuple[tuple[str, Bound], ...]


def _depth(kind: type[Message], bound: Bound) -> int:
    if isinstance(bound, Many):
        return _LOOK_INSIDE_EACH if bound.each is None and kind not in _READ_AS_COLUMNS else 0
    return _LOOK_INSIDE if isinstance(bound, Inside) and bound.is_looked_into else 0


def _is_needed(kind: type[Message], name: str, bound: Bound) -> bool:
    if isinstance(bound, Inside):
        return bound.is_needed
    if kind.DESCRIPTOR.fields_by_name[name].has_presence or isinstance(bound, Column | Floats):
        return False
    return bound.fault(getattr(kind(), name)) is not None


def _fault_of(bound: Bound) -> Callable[[Any], str | None] | None:
    return None if bound in (_ANY, _BIT) or isinstance(bound, Inside | Unread) else bound.fault


def _lines(kind: type[Message], bounds: Mapping[str, Bound]) -> _MessageBounds:
    numbers = {field.name: field.number for field in kind.DESCRIPTOR.fields}
    return _MessageBounds(
        {numbers[name]: (_fault_of(bound), _depth(kind, bound)) for name, bound in bounds.items() if name in numbers},
        tuple((name, bound) for name, bound in bounds.items() if name in numbers and _is_needed(kind, name, bound)),
    )


_LINES = {kind.DESCRIPTOR.full_name: _lines(kind, bounds) for kind, bounds in TABLE.items()}


def check(message: Message, path: str = "") -> None:
    """Raise BoundError if a field of a message is beyond its bound; `path` stands before the names of its fields."""
    lines = _LINES[message.DESCRIPTOR.full_name]
    for field, value in message.ListFields():
        fault_of, depth = lines.by_number[field.number]
        if fault_of is not None and (fault := fault_of(value)) is not None:
            raise BoundError(path + field.name, f"{path}{field.name} {fault}")
        if depth == _LOOK_INSIDE:
            check(value, f"{path}{field.name}.")
        elif depth == _LOOK_INSIDE_EACH:
            for each in value:
                check(each, f"{path}{field.name}.")
    for name, bound in lines.needed:
        _check_needed(message, path + name, name, bound)


def _check_needed(message: Message, path: str, name: str, bound: Bound) -> None:
    """A field that holds its default is not among those that are listed."""
    if isinstance(bound, Inside):
        if not message.HasField(name):
            check(getattr(message, name), f"{path}.")
    elif (fault := bound.fault(getattr(message, name))) is not None:
        raise BoundError(path, f"{path} {fault}")


def check_size(data: bytes, at_most: int) -> None:
    """Raise BoundError for bytes that are too many to be looked at."""
    if len(data) > at_most:
        raise BoundError("message", f"message has {len(data)} bytes, at most {at_most} are allowed")


def check_count(path: str, count: int, at_most: int) -> None:
    """Raise BoundError for more elements than a field may have."""
    if count > at_most:
        raise BoundError(path, f"{path} has {count} elements, at most {at_most} are allowed")


def check_values(path: str, kind: type[Message], name: str, parts: Sequence[Int32Array | Float32Array]) -> None:
    """Check columns made of a field of messages, as `check` checks columns. Raises BoundError."""
    bound = TABLE[kind][name]
    assert isinstance(bound, Column | Floats), "what becomes a column has the bound of one"
    fault = bound.fault_of(np.concatenate([part.ravel() for part in parts]))
    if fault is not None:
        raise BoundError(path, f"{path} {fault}")

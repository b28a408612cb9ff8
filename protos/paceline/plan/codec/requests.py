"""What a scheduler says on a plan stream: hello and plans."""

from dataclasses import fields
from typing import Any

from paceline.plan.codec.columns import ColumnError, MalformedError, column_bytes, fields_set, read_column
from paceline.plan.hashes import seed_of
from paceline.plan.sampling import SamplingParams
from paceline.plan.values import (
    KEY_BYTES,
    NO_COPIES,
    NO_GRANTS,
    NO_TAGS,
    BatchPlan,
    BlockCopies,
    BlockGrants,
    BlockTags,
    Claim,
    FinalRelease,
    FinishReason,
    Heartbeat,
    Hello,
    NewRequest,
    RecordId,
    Release,
)
from paceline.plan.versions import ProtocolRange
from paceline.v1 import inference_pb2, plan_pb2, sampling_pb2

_UNSUPPORTED = ("adapter_loads", "imports", "exports")  # of a plan


def write_hello(hello: Hello) -> plan_pb2.Hello:
    return plan_pb2.Hello(
        scheduler_id=hello.claim.scheduler_id,
        term=hello.claim.term,
        min_protocol=hello.protocols.lowest,
        max_protocol=hello.protocols.highest,
        takeover=hello.takeover,
        tag_key_digest=hello.tag_key_digest,
        address=hello.claim.address,
    )


def read_hello(message: plan_pb2.Hello) -> Hello:
    return Hello(
        claim=Claim(message.term, message.scheduler_id, message.address),
        protocols=ProtocolRange(message.min_protocol, message.max_protocol),
        takeover=message.takeover,
        tag_key_digest=message.tag_key_digest,
    )


def write_heartbeat(heartbeat: Heartbeat) -> inference_pb2.Heartbeat:
    return inference_pb2.Heartbeat(running_step_id=heartbeat.running_step_id, running_ns=heartbeat.running_ns)


def read_heartbeat(message: inference_pb2.Heartbeat) -> Heartbeat:
    return Heartbeat(message.running_step_id, message.running_ns)


def write_plan(plan: BatchPlan) -> plan_pb2.BatchPlan:
    message = plan_pb2.BatchPlan(
        incarnation=plan.incarnation,
        epoch=plan.epoch,
        step_id=plan.step_id,
        rows=column_bytes(plan.rows),
        num_scheduled_tokens=column_bytes(plan.num_scheduled_tokens),
        predicted_ns=plan.predicted_ns,
    )
    # In the steady state none of these is there, and an absent message costs nothing.
    if len(plan.tags.block_ids):
        message.tags.CopyFrom(write_tags(plan.tags))
    if plan.releases:
        message.releases.extend(_write_release(release) for release in plan.releases)
    if plan.new_requests:
        message.new_requests.extend(write_new_request(new) for new in plan.new_requests)
    if len(plan.copies.sources):
        message.copies.sources = column_bytes(plan.copies.sources)
        message.copies.destinations = column_bytes(plan.copies.destinations)
    if len(plan.grants.rows):
        message.grants.CopyFrom(_write_grants(plan.grants))
    if len(plan.shared.rows):
        message.shared.CopyFrom(_write_grants(plan.shared))
    if plan.forget:
        message.forget.extend(write_record_id(record_id) for record_id in plan.forget)
    if len(plan.num_draft_tokens):
        message.num_draft_tokens = column_bytes(plan.num_draft_tokens)
    if plan.min_draft_chance:
        message.min_draft_chance = plan.min_draft_chance
    if plan.draft_spare_ns:
        message.draft_spare_ns = plan.draft_spare_ns
    return message


def read_plan(message: plan_pb2.BatchPlan) -> BatchPlan:
    return BatchPlan(
        incarnation=message.incarnation,
        epoch=message.epoch,
        step_id=message.step_id,
        rows=read_column("rows", message.rows),
        num_scheduled_tokens=read_column("num_scheduled_tokens", message.num_scheduled_tokens),
        predicted_ns=message.predicted_ns,
        tags=read_tags(message.tags) if message.HasField("tags") else NO_TAGS,
        releases=tuple(_read_release(release) for release in message.releases),
        forget=tuple(read_record_id(record_id) for record_id in message.forget),
        copies=_read_copies(message.copies) if message.HasField("copies") else NO_COPIES,
        new_requests=tuple(read_new_request(new) for new in message.new_requests),
        grants=_read_grants("grants", message.grants) if message.HasField("grants") else NO_GRANTS,
        shared=_read_grants("shared", message.shared) if message.HasField("shared") else NO_GRANTS,
        num_draft_tokens=read_column("num_draft_tokens", message.num_draft_tokens),
        min_draft_chance=message.min_draft_chance,
        draft_spare_ns=message.draft_spare_ns,
        unsupported_fields=tuple(name for name in _UNSUPPORTED if getattr(message, name)),
    )


def _write_grants(grants: BlockGrants) -> plan_pb2.BlockGrants:
    return plan_pb2.BlockGrants(
        rows=column_bytes(grants.rows), indices=column_bytes(grants.indices), block_ids=column_bytes(grants.block_ids)
    )


def _read_grants(field: str, message: plan_pb2.BlockGrants) -> BlockGrants:
    return BlockGrants(
        rows=read_column(f"{field}.rows", message.rows),
        indices=read_column(f"{field}.indices", message.indices),
        block_ids=read_column(f"{field}.block_ids", message.block_ids),
    )


def _read_copies(message: plan_pb2.BlockCopies) -> BlockCopies:
    return BlockCopies(
        sources=read_column("copies.sources", message.sources),
        destinations=read_column("copies.destinations", message.destinations),
    )


def write_tags(tags: BlockTags) -> plan_pb2.BlockTags:
    return plan_pb2.BlockTags(block_ids=column_bytes(tags.block_ids), keys=tags.keys)


def read_tags(message: plan_pb2.BlockTags) -> BlockTags:
    block_ids = read_column("tags.block_ids", message.block_ids)
    if len(message.keys) != KEY_BYTES * len(block_ids):
        raise ColumnError("tags.keys", f"tags has {len(block_ids)} blocks but {len(message.keys)} bytes of keys")
    return BlockTags(block_ids, message.keys)


def _write_release(release: Release) -> plan_pb2.Release:
    return plan_pb2.Release(row=release.row, final=write_final(release.final))


def _read_release(message: plan_pb2.Release) -> Release:
    return Release(message.row, read_final("releases.final", message.final) if message.HasField("final") else None)


def write_final(final: FinalRelease | None) -> plan_pb2.FinalRelease | None:
    if final is None:
        return None
    reason = sampling_pb2.FinishReason.ValueType(final.reason)
    return plan_pb2.FinalRelease(num_output_tokens=final.num_output_tokens, reason=reason)


def read_final(field: str, message: plan_pb2.FinalRelease) -> FinalRelease:
    try:
        return FinalRelease(message.num_output_tokens, FinishReason(message.reason))
    except ValueError as error:
        raise MalformedError(
            f"{field}.reason", f"{field}.reason is {message.reason}, which is not a FinishReason"
        ) from error


def write_record_id(record_id: RecordId) -> plan_pb2.RecordId:
    return plan_pb2.RecordId(tenant=record_id.tenant, request_id=record_id.request_id, index=record_id.index)


def read_record_id(message: plan_pb2.RecordId) -> RecordId:
    return RecordId(message.tenant, message.request_id, message.index)


def write_new_request(new: NewRequest) -> plan_pb2.NewRequest:
    """Return the message that places a request."""
    return plan_pb2.NewRequest(
        row=new.row,
        id=write_record_id(new.record_id),
        attempt=new.attempt,
        prompt_token_ids=column_bytes(new.prompt_token_ids),
        output_token_ids=column_bytes(new.output_token_ids),
        num_cached_tokens=new.num_cached_tokens,
        sampling=write_sampling(new.sampling),
        end_token_ids=new.end_token_ids,
        max_tokens=new.max_tokens,
        num_logprobs=new.num_logprobs,
        context=new.context,
        min_tokens=new.min_tokens or None,
        num_prompt_logprobs=new.num_prompt_logprobs,
        bad_word_token_ids=[inference_pb2.TokenIds(ids=word) for word in new.bad_word_token_ids],
        ignored_end_token_ids=new.ignored_end_token_ids,
        trace_parent=new.trace_parent,
        structured=sampling_pb2.StructuredOutput.FromString(new.structured) if new.structured else None,
    )


def read_new_request(message: plan_pb2.NewRequest) -> NewRequest:
    """Return what places a request. Raises MalformedError."""
    record_id = read_record_id(message.id)
    return NewRequest(
        row=message.row,
        record_id=record_id,
        attempt=message.attempt,
        prompt_token_ids=read_column("new_requests.prompt_token_ids", message.prompt_token_ids),
        output_token_ids=read_column("new_requests.output_token_ids", message.output_token_ids),
        num_cached_tokens=message.num_cached_tokens,
        sampling=read_sampling(message.sampling, record_id),
        end_token_ids=tuple(message.end_token_ids),
        max_tokens=message.max_tokens,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        context=message.context,
        min_tokens=message.min_tokens,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        bad_word_token_ids=tuple(tuple(word.ids) for word in message.bad_word_token_ids),
        ignored_end_token_ids=tuple(message.ignored_end_token_ids),
        unsupported_fields=_unsupported_fields(message),
        trace_parent=message.trace_parent,
        structured=message.structured.SerializeToString(deterministic=True),
    )


def _unsupported_fields(message: plan_pb2.NewRequest) -> tuple[str, ...]:
    # A field that is set to the value that changes nothing is honoured.
    sampling = message.sampling
    in_use = {
        "structured": message.HasField("structured") and not message.structured.ByteSize(),  # of no form
        "adapter_slot": message.HasField("adapter_slot"),
        "sampling.bad_words": bool(sampling.bad_words),  # texts, and an executor has no tokenizer
        "sampling.n": sampling.HasField("n") and sampling.n != 1,
    }
    return tuple(field for field, is_set in in_use.items() if is_set)


def write_sampling(sampling: SamplingParams) -> sampling_pb2.SamplingParams:
    """Return resolved parameters; of those that a plan need not name, the ones that change nothing stay unset."""
    message = sampling_pb2.SamplingParams(
        logit_bias=dict(sampling.logit_bias), allowed_token_ids=sampling.allowed_token_ids
    )
    for name, neutral in SAMPLING_NUMBERS.items():
        value = getattr(sampling, name)
        if value != neutral or name in _ALWAYS_NAMED:
            setattr(message, name, value)
    return message


def read_sampling(message: sampling_pb2.SamplingParams, record_id: RecordId) -> SamplingParams:
    """Return the parameters, defaults filled in; a seed that is unset is made of the request's name."""
    numbers = fields_set(message, SAMPLING_NUMBERS)
    if "seed" not in numbers:
        numbers["seed"] = seed_of(record_id)
    if numbers.get("top_k") == 0:
        numbers["top_k"] = -1  # set to 0 is out of range, and -1 says so: 0 means unlimited from here on
    return SamplingParams(
        **numbers,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
    )


SAMPLING_NUMBERS: dict[str, Any] = {
    field.name: field.default for field in fields(SamplingParams) if field.type in (int, float)
}
"""The parameters that are numbers, each with the one that changes nothing."""

# So that no executor takes its model's own default for them.
_ALWAYS_NAMED = ("temperature", "top_p", "min_p", "seed")

"""Who an executor is: its model, its cache, its bounds."""

from dataclasses import fields
from itertools import pairwise

from paceline.plan.codec.bounds import MAX_INFO_BYTES, check, check_size
from paceline.plan.codec.columns import MalformedError, fields_set, parse
from paceline.plan.sampling import GenerationDefaults
from paceline.plan.texts import readable
from paceline.plan.values import (
    ExecutorInfo,
    ExecutorLimits,
    FailedStep,
    GraphSizes,
    KvGeometry,
    Model,
    StepPoint,
    Welcome,
)
from paceline.v1 import executor_pb2, inference_pb2, plan_pb2, sampling_pb2


def write_welcome(welcome: Welcome) -> plan_pb2.Welcome:
    failed = welcome.failed_step
    return plan_pb2.Welcome(
        incarnation=welcome.incarnation,
        epoch=welcome.epoch,
        protocol=welcome.protocol,
        model=write_model(welcome.model),
        geometry=write_geometry(welcome.geometry),
        limits=write_limits(welcome.limits),
        tag_key=welcome.tag_key,
        step_points=[
            plan_pb2.StepPoint(num_tokens=point.num_tokens, duration_ns=point.duration_ns)
            for point in welcome.step_points
        ],
        tokenizer_digest=welcome.tokenizer_digest,
        failed_step=None
        if failed is None
        else plan_pb2.FailedStep(epoch=failed.epoch, step_id=failed.step_id, message=readable(failed.message)),
        graphs=None
        if welcome.graphs is None
        else plan_pb2.GraphSizes(num_rows=welcome.graphs.num_rows, num_tokens=welcome.graphs.num_tokens),
    )


def read_welcome(message: plan_pb2.Welcome) -> Welcome:
    failed = message.failed_step
    return Welcome(
        incarnation=message.incarnation,
        epoch=message.epoch,
        protocol=message.protocol,
        model=_read_model(message.model),
        geometry=_read_geometry(message.geometry),
        limits=_read_limits(message.limits),
        tag_key=message.tag_key,
        tokenizer_digest=message.tokenizer_digest,
        step_points=tuple(StepPoint(point.num_tokens, point.duration_ns) for point in message.step_points),
        failed_step=FailedStep(failed.epoch, failed.step_id, readable(failed.message))
        if message.HasField("failed_step")
        else None,
        graphs=_read_graphs(message.graphs) if message.HasField("graphs") else None,
    )


def _read_graphs(message: plan_pb2.GraphSizes) -> GraphSizes:
    """Raises MalformedError for sizes that do not ascend."""
    graphs = GraphSizes(tuple(message.num_rows), tuple(message.num_tokens))
    for name, sizes in (("num_rows", graphs.num_rows), ("num_tokens", graphs.num_tokens)):
        if any(size >= following for size, following in pairwise(sizes)):
            raise MalformedError(f"graphs.{name}", f"graphs.{name} must ascend")
    return graphs


def write_model(model: Model) -> inference_pb2.Model:
    """Return the description of an executor's model."""
    return inference_pb2.Model(
        name=model.name,
        architecture=model.architecture,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        end_token_ids=model.end_token_ids,
        has_chat_template=model.has_chat_template,
        num_executors=1,
        num_parameters=model.num_parameters,
        quantization=model.quantization,
        default_sampling=write_defaults(model.default_sampling),
        has_dummy_weights=model.has_dummy_weights,
        weight_bytes=model.weight_bytes,
        weights_digest=model.weights_digest,
        num_ranks=model.num_ranks if model.num_ranks > 1 else 0,
        structured_output=model.structured_output,
    )


def _read_model(message: inference_pb2.Model) -> Model:
    return Model(
        name=message.name,
        architecture=message.architecture,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        num_parameters=message.num_parameters,
        quantization=message.quantization,
        end_token_ids=tuple(message.end_token_ids),
        has_chat_template=message.has_chat_template,
        default_sampling=read_defaults(message.default_sampling),
        has_dummy_weights=message.has_dummy_weights,
        weight_bytes=message.weight_bytes,
        weights_digest=message.weights_digest,
        num_ranks=message.num_ranks or 1,
        structured_output=message.structured_output,
    )


def write_defaults(defaults: GenerationDefaults) -> sampling_pb2.SamplingParams:
    """Return the generation defaults that came with a model; 0 for top_k, which keeps all, is sent as unset."""
    named = {field.name: getattr(defaults, field.name) for field in fields(defaults)}
    return sampling_pb2.SamplingParams(**named | {"top_k": defaults.top_k or None})


def read_defaults(message: sampling_pb2.SamplingParams) -> GenerationDefaults:
    """Return the generation defaults that a message names. Raises MalformedError."""
    names = (field.name for field in fields(GenerationDefaults))
    try:
        return GenerationDefaults(**fields_set(message, names))
    except ValueError as error:
        raise MalformedError("default_sampling", f"default_sampling: {error}") from error


def write_geometry(geometry: KvGeometry) -> plan_pb2.KvGeometry:
    """Return the shape of the KV cache."""
    return plan_pb2.KvGeometry(
        num_blocks=geometry.num_blocks,
        block_size=geometry.block_size,
        bytes_per_block=geometry.bytes_per_block,
        dtype=geometry.dtype,
    )


def _read_geometry(message: plan_pb2.KvGeometry) -> KvGeometry:
    return KvGeometry(message.num_blocks, message.block_size, message.bytes_per_block, message.dtype)


def write_limits(limits: ExecutorLimits) -> plan_pb2.ExecutorLimits:
    """Return the bounds that plans keep to."""
    return plan_pb2.ExecutorLimits(
        max_num_rows=limits.max_num_rows,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        max_plans_in_flight=limits.max_plans_in_flight,
        max_num_draft_tokens=limits.max_num_draft_tokens,
    )


def _read_limits(message: plan_pb2.ExecutorLimits) -> ExecutorLimits:
    return ExecutorLimits(
        message.max_num_rows,
        message.max_num_batched_tokens,
        message.max_model_len,
        message.max_plans_in_flight,
        message.max_num_draft_tokens,
    )


def decode_info(data: bytes) -> ExecutorInfo:
    """Return what a GetInfoResponse says about incarnation, holder and tokenizer. Raises MalformedError."""
    check_size(data, MAX_INFO_BYTES)
    info = parse(executor_pb2.GetInfoResponse, data)
    check(info)
    return ExecutorInfo(
        incarnation=info.incarnation,
        term=info.term,
        holder_scheduler_id=info.holder_scheduler_id,
        vocab_size=info.model.vocab_size,
        tokenizer_digest=info.tokenizer_digest,
        num_waiting_schedulers=info.num_waiting_schedulers,
    )

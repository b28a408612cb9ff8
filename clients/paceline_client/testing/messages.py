"""What the fake server says, as messages."""

from collections.abc import Iterator, Sequence

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from paceline.v1 import inference_pb2 as pb
from paceline.v1 import sampling_pb2 as sampling_pb
from paceline_client.hashing import rolling_hash
from paceline_client.results import FinishReason, OutputPart, ReasoningPart, TextPart
from paceline_client.testing.script import End, Fail, Tokens

_REASONS = {
    None: sampling_pb.FINISH_REASON_ERROR,
    FinishReason.STOP: sampling_pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: sampling_pb.FINISH_REASON_CANCELLED,
}


def tokens_delta(step: Tokens, output: Sequence[int], attempt: int, *, wants_parts: bool) -> pb.Delta:
    logprobs = []
    if step.logprob is not None:
        logprobs = [sampling_pb.TokenLogprobs(token_id=token, logprob=step.logprob) for token in step.token_ids]
    prompt_logprobs = []
    if step.prompt_logprob is not None:
        prompt_logprobs = [sampling_pb.TokenLogprobs(token_id=0, logprob=step.prompt_logprob)]
    return pb.Delta(
        index=step.completion,
        prompt_logprobs=prompt_logprobs,
        offset=len(output) + step.offset_error,
        token_ids=step.token_ids,
        text=step.text,
        attempt=attempt,
        rolling_hash=rolling_hash([*output, *step.token_ids]) ^ step.hash_error,
        logprobs=logprobs,
        parts=_parts(step) if wants_parts else (),
    )


def _parts(step: Tokens) -> Iterator[pb.OutputPart]:
    parts: Sequence[OutputPart] = (TextPart(step.text),) if step.text else ()
    for part in parts if step.parts is None else step.parts:
        match part:
            case TextPart(text):
                yield pb.OutputPart(text=text)
            case ReasoningPart(text):
                yield pb.OutputPart(reasoning=text)
            case _:
                call = pb.ToolCallPart(index=part.index, id=part.id, name=part.name, arguments=part.arguments)
                yield pb.OutputPart(tool_call=call)


def end_delta(step: End, output: Sequence[int], attempt: int) -> pb.Delta:
    finish = pb.Finish(
        reason=_REASONS[step.reason],
        usage=pb.Usage(
            num_prompt_tokens=step.num_prompt_tokens,
            num_cached_tokens=step.num_cached_tokens,
            num_output_tokens=len(output),
            num_draft_tokens=step.num_draft_tokens,
            num_accepted_draft_tokens=step.num_accepted_draft_tokens,
        ),
    )
    if step.times_ms is not None:
        times = finish.times
        for phase, ms in zip((times.queued, times.prefill, times.decode, times.preempted), step.times_ms, strict=True):
            phase.FromMilliseconds(ms)
    if isinstance(step.matched_stop, str):
        finish.stop_text = step.matched_stop
    elif step.matched_stop is not None:
        finish.stop_token_id = step.matched_stop
    return pb.Delta(
        index=step.completion, offset=len(output), attempt=attempt, rolling_hash=rolling_hash(output), finish=finish
    )


def error_details(failure: Fail) -> list[Message]:
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=failure.reason, domain="paceline", metadata=dict(failure.metadata))
    ]
    if failure.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=failure.field, description=failure.message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if failure.retry_after_seconds is not None:
        delay = Duration()
        delay.FromNanoseconds(int(failure.retry_after_seconds * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


def request_error(failure: Fail) -> sampling_pb.RequestError:
    packed = [pack(detail) for detail in error_details(failure)]
    return sampling_pb.RequestError(
        code=failure.code.value[0],
        message=failure.message,
        details=[sampling_pb.ErrorDetail(type_url=item.type_url, value=item.value) for item in packed],
    )


def pack(detail: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed

"""What the edge refuses over real gRPC, how it says so, and what of a request goes further than the edge."""

from types import SimpleNamespace

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from structlog.testing import capture_logs

from edge_rig.refusals import refusal_of
from edge_rig.tiny import MODEL
from paceline.plan.values import Claim, FinishReason, RecordId
from paceline.process.callers import Caller, Role
from paceline.v1 import inference_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline_scheduler.api.outbox import Outbox
from paceline_scheduler.api.servicer_guard import Guard
from paceline_scheduler.api.validation import MAX_ORIGIN_BYTES
from paceline_scheduler.errors import InvalidRequestError, NoExecutorError, PermissionDeniedError, UnknownModelError

A_MILLION_UNKNOWN_FIELDS = b"\xf8\x07\x01" * 1_000_000


async def test_every_refusal_is_told_once_with_its_reason(server, stub):
    told = []
    server.edge.on_refusal(lambda key, model, trace, error: told.append((key.request_id, model, trace, type(error))))
    await refusal_of(stub.Generate(pb.GenerateRequest(request_id="a" * 1000, text="x")).read())
    await refusal_of(stub.Generate(pb.GenerateRequest(request_id="b", text="x", model="none", trace_parent="t")).read())
    server.backend.refusal = NoExecutorError("no executor", 1.0)
    await refusal_of(stub.Generate(pb.GenerateRequest(request_id="c", text="x")).read())
    running = stub.Generate(pb.GenerateRequest(request_id="d", text="x"))
    request = await server.backend.next_request()
    server.backend.step({request.handle: [5]}, {request.handle: FinishReason.LENGTH})
    assert [message async for message in running]
    kinds = [
        ("a" * 1000, "", "", InvalidRequestError),
        ("b", "none", "t", UnknownModelError),
        ("c", "", "", NoExecutorError),
    ]
    assert told == kinds


async def test_a_foreign_tenant_is_a_refusal_like_any_other(server):
    told, blue = [], Caller("blue", frozenset({Role.CLIENT}), "blue")
    server.edge.on_refusal(lambda key, model, trace, error: told.append((key, model, type(error))))
    with pytest.raises(PermissionDeniedError):
        server.edge.open(pb.GenerateRequest(request_id="r", tenant="red", model="m"), Outbox(1, 0), blue)
    assert told == [(RecordId("red", "r"), "m", PermissionDeniedError)]


async def test_a_standby_refuses_what_is_new_before_it_looks_at_it(server, stub):
    server.backend.active = Claim(7, "a", "host:1")
    code, sentence, details = await refusal_of(stub.Generate(pb.GenerateRequest()).read())
    assert (code, details[ErrorInfo].reason) == (grpc.StatusCode.UNAVAILABLE, "STANDBY")
    assert sentence == "this scheduler stands by; host:1 serves (term 7)"
    assert 0.1 <= details[RetryInfo].retry_delay.ToMilliseconds() / 1000 <= 0.2


async def test_a_standby_does_not_refuse_what_was_begun_before_it_has_waited(server, stub):
    server.backend.active = Claim(7, "a", "host:1")
    stub.Generate(pb.GenerateRequest(text="hi", request_id="r", resumable=True, attachment=2))
    assert (await server.backend.next_request()).key.request_id == "r"


async def test_fields_that_nobody_knows_go_no_further_than_the_edge(server, channel):
    message = pb.GenerateRequest(text="hi", request_id="r", sampling=sampling_pb2.SamplingParams(top_k=3))
    inner = sampling_pb2.StoppingParams(max_tokens=2).SerializeToString() + b"\xf8\x07\x01" * 10
    data = message.SerializeToString() + b"\x3a" + bytes([len(inner)]) + inner + A_MILLION_UNKNOWN_FIELDS
    call = channel.unary_stream("/paceline.v1.InferenceService/Generate")(data)
    request = await server.backend.next_request()
    message.ClearField("text")
    message.stopping.max_tokens = 2
    assert request.origin == message.SerializeToString(deterministic=True)
    call.cancel()


async def test_the_largest_request_of_known_fields_is_taken(server, stub):
    """The bound on what is kept of a request is no bound on its fields: they have their own."""
    message = pb.GenerateRequest(
        text="hi",
        model=MODEL.name,
        request_id="é" * 64,
        tenant="é" * 64,
        cache_salt="é" * 64,
        bypass_prefix_cache=True,
        stopping=sampling_pb2.StoppingParams(stop=["\U0010ffff" * 256] * 16, stop_token_ids=[399] * 64, max_tokens=100),
        structured=sampling_pb2.StructuredOutput(json_schema='{"title":"' + "x" * 65_520 + '"}'),
        sampling=sampling_pb2.SamplingParams(temperature=1, top_k=400, top_p=0.5, min_p=0.1, seed=2**64 - 1),
        output=sampling_pb2.OutputOptions(logprobs=20, skip_special_tokens=False),
    )
    call = stub.Generate(message)
    request = await server.backend.next_request()
    assert len(request.origin) < MAX_ORIGIN_BYTES
    call.cancel()


async def test_tokenize_names_only_prompts_it_takes(stub):
    code, sentence, _ = await refusal_of(stub.Tokenize(pb.TokenizeRequest()))
    assert (code, sentence) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt: is missing: set one of text and chat")
    code, sentence, _ = await refusal_of(stub.Generate(pb.GenerateRequest()).read())
    assert sentence == "prompt: is missing: set one of text, chat and token_ids"


async def test_a_connection_that_breaks_under_a_write_is_no_error_of_the_scheduler():
    """The log says so at debug level only."""

    class Gone:
        async def write(self, response):
            raise grpc.aio.InternalError("Failed execute_batch")

        def done(self):
            return False

        cancelled = done

    async def answers(request, context):
        yield pb.GenerateResponse()

    async def found(details):
        return grpc.unary_stream_rpc_method_handler(answers, pb.GenerateRequest.FromString, None)

    handler = await Guard().intercept_service(found, SimpleNamespace(method="/Generate"))
    with capture_logs() as lines:
        await handler.unary_stream(b"", Gone())
    assert [(line["event"], line["log_level"]) for line in lines] == [("call_ended_by_client", "debug")]

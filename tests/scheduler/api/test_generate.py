"""InferenceService over real gRPC: one request per call, and the short calls."""

from dataclasses import replace

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from structlog.testing import capture_logs

from paceline.plan.values import FinishReason, RecordId, TokenLogprobs
from paceline.v1 import inference_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline_scheduler.api.limits import EdgeLimits
from paceline_scheduler.errors import DeadlineExceededError, QueueFullError
from paceline_scheduler.testing.edge_server import SLOW_CHANNEL, serve_edge, wait_until
from paceline_scheduler.testing.refusals import refusal_of
from paceline_scheduler.testing.scripted_backend import ScriptedBackend
from paceline_scheduler.testing.tiny import END, MODEL, TOKENIZER, encode


@pytest.fixture
async def server():
    """A server with one model."""
    async with serve_edge(ScriptedBackend(MODEL), EdgeLimits(max_stream_bytes=16 * 1024)) as server:
        yield server


async def rest_of(call):
    """Read to the end."""
    return [message async for message in call]


async def serve_one(stub, backend):
    """Run a request to its end: the server still works."""
    call = stub.Generate(pb.GenerateRequest(text="hi"))
    handle = (await backend.next_request()).handle
    backend.step({handle: encode("Paris")}, {handle: FinishReason.LENGTH})
    return "".join(response.delta.text for response in await rest_of(call))


async def test_tokens_stream_as_they_come(stub, backend):
    call = stub.Generate(pb.GenerateRequest(text="hi", stopping=sampling_pb2.StoppingParams(max_tokens=5)))
    request = await backend.next_request()
    backend.step({request.handle: encode("Pa")})
    first = await call.read()
    backend.step({request.handle: [*encode("ris"), END]}, {request.handle: FinishReason.STOP})
    last = await call.read()
    assert await call.read() is grpc.aio.EOF
    assert (first.delta.text, first.delta.offset, first.delta.attempt) == ("Pa", 0, 1)
    assert (last.delta.text, last.delta.offset) == ("ris", len(encode("Pa")))
    assert last.delta.finish.reason == sampling_pb2.FINISH_REASON_STOP
    assert last.delta.finish.stop_token_id == END
    assert last.delta.finish.usage.num_output_tokens == len(encode("Pa")) + len(encode("ris")) + 1
    assert first.request_id == last.request_id == request.key.request_id != ""


async def test_a_chat_goes_through_the_template(stub, backend):
    stub.Generate(pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])))
    request = await backend.next_request()
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert request.prompt_token_ids.tolist() == encode(expected)


async def test_the_backend_keeps_the_request_without_its_prompt(stub, backend):
    """And a digest of all of it, so that a successor can tell whether a resumed request is the same."""
    digests = []
    for text in ("hi", "hi", "ho"):
        message = pb.GenerateRequest(text=text, request_id="r", tenant="t", cache_salt="s")
        call = stub.Generate(message)
        request = await backend.next_request()
        backend.step({request.handle: [END]}, {request.handle: FinishReason.STOP})
        await call.read()
        message.ClearField("text")
        assert pb.GenerateRequest.FromString(request.origin) == message
        digests.append(request.body_digest)
    assert digests[0] == digests[1] != digests[2]
    assert {len(digest) for digest in digests} == {16}


async def test_logprobs_arrive_with_their_tokens(stub, backend):
    call = stub.Generate(pb.GenerateRequest(text="hi", output=sampling_pb2.OutputOptions(logprobs=1)))
    handle = (await backend.next_request()).handle
    backend.step({handle: [5]}, logprobs={handle: (TokenLogprobs(5, -0.5, ((6, -0.25),)),)})
    (item,) = (await call.read()).delta.logprobs
    assert (item.token_id, item.logprob, item.top[0].token_id, item.top[0].logprob) == (5, -0.5, 6, -0.25)
    call.cancel()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"text": "hi", "sampling": sampling_pb2.SamplingParams(top_p=2)}, "sampling.top_p"),
        ({"text": "hi", "sampling": sampling_pb2.SamplingParams(temperature=float("nan"))}, "sampling.temperature"),
        ({"text": "hi", "stopping": sampling_pb2.StoppingParams(max_tokens=0)}, "stopping.max_tokens"),
        ({"text": "hi", "timeout": Duration(seconds=-1)}, "timeout"),
        ({"text": "hi", "request_id": "x" * 129}, "request_id"),
        ({"text": ""}, "text"),
        ({}, "prompt"),
        ({"text": "x" * 5000}, "text"),
        ({"text": "☃ " * 400}, "prompt"),
        ({"token_ids": pb.TokenIds(ids=[1, -1])}, "token_ids.ids[1]"),
        ({"text": "hi", "resume_from": 2**31}, "resume_from"),
        ({"text": "hi", "resume_from": 3}, "resume_hash"),
        ({"text": "hi", "resume_points": [{"index": 1}]}, "resume_points"),
        ({"token_ids": pb.TokenIds(ids=[1] * 1_000_000)}, "prompt"),
        ({"chat": pb.Chat()}, "chat.messages"),
    ],
)
async def test_a_bad_request_names_its_field_and_the_next_request_works(stub, backend, fields, name):
    code, _, details = await refusal_of(stub.Generate(pb.GenerateRequest(**fields)).read())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in details[BadRequest].field_violations] == [name]
    assert await serve_one(stub, backend) == "Paris"


@pytest.mark.parametrize(
    ("fields", "feature"),
    [
        ({"structured": sampling_pb2.StructuredOutput(json_object=True)}, "structured"),
        ({"structured": sampling_pb2.StructuredOutput()}, "structured"),
    ],
)
async def test_an_unsupported_field_names_itself(stub, fields, feature):
    code, _, details = await refusal_of(stub.Generate(pb.GenerateRequest(text="hi", **fields)).read())
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert details[ErrorInfo].metadata["feature"] == feature


@pytest.mark.parametrize(
    ("data", "name"),
    [(b"\x0a\xff", "message"), (b"\x1a\x02\xff\xfe", "message"), (b"\x1a\x03\xed\xa0\x80", "message"),
     (b"\x98\x3f\x01" * 1_000_000, "prompt")],
    ids=["truncated", "not-utf-8", "half-a-surrogate-pair", "a-million-unknown-fields"],
)  # fmt: skip
async def test_bytes_that_are_no_message_end_their_call_only(channel, stub, backend, data, name):
    """INVALID_ARGUMENT; fields that nobody knows are ignored."""
    call = channel.unary_stream("/paceline.v1.InferenceService/Generate")(data)
    code, _, details = await refusal_of(call.read())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details[BadRequest].field_violations[0].field == name
    assert await serve_one(stub, backend) == "Paris"


async def test_a_message_beyond_the_limit_is_refused_before_it_is_read(stub, backend):
    """4 MiB."""
    code, _, _ = await refusal_of(stub.Generate(pb.GenerateRequest(text="x" * (4 * 1024 * 1024))).read())
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await serve_one(stub, backend) == "Paris"


async def test_a_refusal_by_the_backend_says_when_to_come_back(stub, backend):
    backend.refusal = QueueFullError("the queue is full", 0.5)
    call = stub.Generate(pb.GenerateRequest(text="hi"))
    code, _, details = await refusal_of(call.read())
    assert (code, details[ErrorInfo].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert 400 <= int(dict(await call.trailing_metadata())["grpc-retry-pushback-ms"]) <= 600


async def test_a_failure_ends_the_call_after_its_output(stub, backend):
    call = stub.Generate(pb.GenerateRequest(text="hi"))
    handle = (await backend.next_request()).handle
    backend.step({handle: encode("Pa")})
    backend.fail(handle, DeadlineExceededError("the timeout passed"))
    assert (await call.read()).delta.text == "Pa"
    code, _, details = await refusal_of(call.read())
    assert (code, details[ErrorInfo].reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")


async def test_an_unexpected_error_shows_nothing_of_itself(stub, backend, monkeypatch):
    def broken(event):
        raise RuntimeError("secret")

    monkeypatch.setattr(backend, "feed", broken)
    request = pb.GenerateRequest(request_id="r", tenant="t", text="hi", trace_parent=f"00-{'a' * 32}-{'b' * 16}-01")
    with capture_logs() as lines:
        call = stub.Generate(request)
        code, _, details = await refusal_of(call.read())
    ((event, *about),) = [[line[key] for key in ("event", "request_id", "tenant", "trace_id")] for line in lines]
    assert (event, about) == ("call_failed", ["r", "t", "a" * 32])
    assert (code, details[ErrorInfo].reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "secret" not in (await call.details()) + str(await call.trailing_metadata())


async def test_the_deadline_of_the_call_is_the_requests(stub, backend):
    call = stub.Generate(pb.GenerateRequest(text="hi", timeout=Duration(seconds=500)), timeout=100)
    assert 90 < (await backend.next_request()).deadline_s < 110
    call.cancel()


async def test_a_cancelled_call_ends_its_request_exactly_once(stub, backend, server):
    call = stub.Generate(pb.GenerateRequest(text="hi"))
    handle = (await backend.next_request()).handle
    backend.step({handle: encode("Pa")})
    await call.read()
    call.cancel()
    await wait_until(lambda: backend.asked.ended)
    assert backend.asked.ended == [(handle, len(encode("Pa")), FinishReason.CANCELLED)]
    assert await serve_one(stub, backend) == "Paris"
    assert len(backend.asked.ended) == 1
    await wait_until(lambda: not server.edge.requests.calls())


async def test_a_lost_connection_ends_its_requests(server, backend):
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="hi"))
        handle = (await backend.next_request()).handle
        backend.step({handle: encode("Pa")})
        await call.read()
    await wait_until(lambda: backend.asked.ended)
    assert backend.asked.ended == [(handle, len(encode("Pa")), FinishReason.CANCELLED)]


async def test_cancel_ends_a_request_of_the_same_tenant(stub, backend):
    call = stub.Generate(pb.GenerateRequest(text="hi", tenant="t", request_id="r"))
    await backend.next_request()
    for tenant, request_id, code in (
        ("other", "r", grpc.StatusCode.NOT_FOUND),
        ("t", "x" * 129, grpc.StatusCode.INVALID_ARGUMENT),
        ("t", "", grpc.StatusCode.INVALID_ARGUMENT),
    ):
        refusal = await refusal_of(stub.Cancel(pb.CancelRequest(tenant=tenant, request_id=request_id)))
        assert refusal.code is code
    await stub.Cancel(pb.CancelRequest(tenant="t", request_id="r"))
    assert (await call.read()).delta.finish.reason == sampling_pb2.FINISH_REASON_CANCELLED
    assert await call.read() is grpc.aio.EOF
    assert backend.asked.cancelled == [RecordId("t", "r")]


async def test_a_client_that_does_not_read_is_cut_and_others_are_not(server, stub, backend):
    async with grpc.aio.insecure_channel(server.address, options=SLOW_CHANNEL) as channel:
        slow = InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="hi", request_id="slow"))
        slow_handle = (await backend.next_request()).handle
        other = stub.Generate(pb.GenerateRequest(text="hi", request_id="other"))
        other_handle = (await backend.next_request()).handle
        text, num_steps = encode("x" * 4000), 0
        most = 2 * 7 * len(text)  # a step brings more than the limit and is taken whole: one is being sent, one waits
        while not backend.asked.ended:
            backend.step({slow_handle: text, other_handle: encode("y")})
            assert max(outbox.num_bytes for outbox in server.edge.requests.calls()) <= most
            assert (await other.read()).delta.text == "y"
            num_steps += 1
            assert num_steps < 10_000
        backend.step({other_handle: encode("z")}, {other_handle: FinishReason.LENGTH})
        assert (await other.read()).delta.text == "z"
        assert [(handle, reason) for handle, _, reason in backend.asked.ended] == [(slow_handle, FinishReason.ERROR)]
        code, _, details = await refusal_of(rest_of(slow))
    assert (code, details[ErrorInfo].reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")


async def test_random_weights_are_told_of(stub, backend):
    """Nobody should take their outputs for a model's."""
    (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert not model.has_dummy_weights
    backend.served = tuple(replace(served, has_dummy_weights=True) for served in backend.served)
    (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert model.has_dummy_weights


async def test_models_are_listed_and_described(stub, backend):
    """By name, or the only one."""
    (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert (model.name, model.max_model_len, model.vocab_size) == ("tiny", 256, 400)
    assert (list(model.end_token_ids), model.has_chat_template, model.num_executors) == ([END], True, 1)
    assert not model.default_sampling.HasField("temperature")
    assert (await stub.GetModel(pb.GetModelRequest())).model == model
    assert (await refusal_of(stub.GetModel(pb.GetModelRequest(model="missing")))).code is grpc.StatusCode.NOT_FOUND
    backend.served = ()
    assert (await refusal_of(stub.GetModel(pb.GetModelRequest()))).code is grpc.StatusCode.UNAVAILABLE


async def test_tokenize_and_detokenize_are_inverse(stub):
    response = await stub.Tokenize(pb.TokenizeRequest(text="Paris 𝔘", return_token_texts=True))
    assert list(response.token_ids) == encode("Paris 𝔘")
    assert response.max_model_len == 256
    assert response.token_texts[0] == TOKENIZER.decode([response.token_ids[0]])
    assert "\ufffd" in response.token_texts[-1]
    assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=response.token_ids))).text == "Paris 𝔘"


async def test_detokenize_skips_special_tokens_unless_told_otherwise(stub):
    token_ids = [*encode("a"), END]
    assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids))).text == "a"
    shown = await stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=False))
    assert shown.text == "a<|im_end|>"
    assert (await stub.Detokenize(pb.DetokenizeRequest())).text == ""


@pytest.mark.parametrize(
    ("method", "request_", "name"),
    [
        ("Tokenize", pb.TokenizeRequest(), "prompt"),
        ("Tokenize", pb.TokenizeRequest(text="x" * 5000), "text"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[400]), "token_ids[0]"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1] * 257), "token_ids"),
    ],
)
async def test_the_short_calls_name_a_wrong_field_too(stub, method, request_, name):
    code, _, details = await refusal_of(getattr(stub, method)(request_))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in details[BadRequest].field_violations] == [name]


async def test_a_generate_call_ends_with_its_last_completion(stub, backend):
    call = stub.Generate(pb.GenerateRequest(text="hi", sampling=sampling_pb2.SamplingParams(n=2)))
    first, second = [(await backend.next_request()).handle for _ in range(2)]
    backend.step({first: [END], second: encode("b")}, {first: FinishReason.STOP})
    backend.step({second: [END]}, {second: FinishReason.STOP})
    deltas = [response.delta async for response in call]
    ends = [delta.index for delta in deltas if delta.HasField("finish")]
    assert ends == [0, 1]
    assert {delta.finish.usage.num_prompt_tokens for delta in deltas if delta.HasField("finish")} == {len(encode("hi"))}

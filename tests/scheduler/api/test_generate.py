"""InferenceService over real gRPC: one request per call, and the short calls."""

from dataclasses import replace

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from structlog.testing import capture_logs

from edge_rig.edge_server import wait_until
from edge_rig.refusals import refusal_of
from edge_rig.tiny import END, TOKENIZER, encode
from paceline.plan.values import FinishReason, RecordId, TokenLogprobs
from paceline.v1 import inference_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline_scheduler.errors import DeadlineExceededError


async def rest_of(call):
    return [message async for message in call]


async def field_at_fault(call):
    """The field that an INVALID_ARGUMENT names."""
    code, _, details = await refusal_of(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = details[BadRequest].field_violations
    return violation.field


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
        ({}, "prompt"),
        ({"text": "☃ " * 400}, "prompt"),
        ({"token_ids": pb.TokenIds(ids=[1, -1])}, "token_ids.ids[1]"),
        ({"text": "hi", "resume_points": [{"index": 1}]}, "resume_points"),
        ({"token_ids": pb.TokenIds(ids=[1] * 1_000_000)}, "prompt"),
    ],
)
async def test_a_bad_request_names_its_field_and_the_next_request_works(stub, backend, fields, name):
    assert await field_at_fault(stub.Generate(pb.GenerateRequest(**fields)).read()) == name
    assert await serve_one(stub, backend) == "Paris"


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


async def test_models_are_listed_and_described(stub, backend):
    """By name, or the only one."""
    (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert (model.name, model.max_model_len, model.vocab_size) == ("tiny", 256, 400)
    assert (list(model.end_token_ids), model.has_chat_template, model.num_executors) == ([END], True, 1)
    assert not model.default_sampling.HasField("temperature")
    assert not model.has_dummy_weights
    assert (await stub.GetModel(pb.GetModelRequest())).model == model
    assert (await refusal_of(stub.GetModel(pb.GetModelRequest(model="missing")))).code is grpc.StatusCode.NOT_FOUND
    backend.served = tuple(replace(served, has_dummy_weights=True) for served in backend.served)
    (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert model.has_dummy_weights, "nobody should take their outputs for a model's"
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
    assert await field_at_fault(getattr(stub, method)(request_)) == name


async def test_a_generate_call_ends_with_its_last_completion(stub, backend):
    call = stub.Generate(pb.GenerateRequest(text="hi", sampling=sampling_pb2.SamplingParams(n=2)))
    first, second = [(await backend.next_request()).handle for _ in range(2)]
    backend.step({first: [END], second: encode("b")}, {first: FinishReason.STOP})
    backend.step({second: [END]}, {second: FinishReason.STOP})
    deltas = [response.delta async for response in call]
    ends = [delta.index for delta in deltas if delta.HasField("finish")]
    assert ends == [0, 1]
    assert {delta.finish.usage.num_prompt_tokens for delta in deltas if delta.HasField("finish")} == {len(encode("hi"))}


# Explain and Estimate


async def test_a_request_is_explained(stub, backend):
    call = stub.Generate(pb.GenerateRequest(text="hi", request_id="r", tenant="t"))
    handle = (await backend.next_request()).handle
    backend.step({handle: encode("a")})
    explained = await stub.Explain(pb.ExplainRequest(request_id="r", tenant="t"))
    assert explained == pb.ExplainResponse(
        state=pb.REQUEST_STATE_WAITING,
        waiting_for="a row for 0",
        queue_position=1,
        num_preemptions=2,
        preemption_reason="it was big",
        num_computed_tokens=3,
        num_output_tokens=len(encode("a")),
    )
    call.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Explain(pb.ExplainRequest(request_id="r"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_request_is_estimated(stub):
    """Times and tokens, or the status that it would get, with its details."""
    estimated = await stub.Estimate(pb.EstimateRequest(request=pb.GenerateRequest(text="hi")))
    assert (estimated.time_to_first_token.ToMilliseconds(), estimated.inter_token_time.ToMilliseconds()) == (500, 25)
    assert (estimated.num_prompt_tokens, estimated.num_cached_tokens) == (len(encode("hi")), 1)
    assert not estimated.HasField("would_be_refused")
    refused = (await stub.Estimate(pb.EstimateRequest())).would_be_refused
    assert refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert refused.details[1].type_url.endswith("google.rpc.BadRequest")


# What shapes the choice of a token, and prompts' log-probabilities back


def spelt(text):
    """The tokens of a part of a text."""
    return tuple(encode(text))


async def submitted(stub, backend, **fields):
    """The core's request of a message with these fields."""
    stub.Generate(pb.GenerateRequest(text="hi", **fields))
    return await backend.next_request()


async def test_a_stop_text_before_the_minimum_is_text(stub, backend):
    stopping = sampling_pb2.StoppingParams(min_tokens=2, stop=["a"])
    call = stub.Generate(pb.GenerateRequest(text="hi", stopping=stopping))
    handle = (await backend.next_request()).handle
    for token_id in (*spelt("a"), *spelt("b"), *spelt("a")):
        backend.step({handle: [token_id]})
    assert "".join([response.delta.text async for response in call]) == "ab"


async def test_bad_words_are_spelt_with_and_without_a_space(stub, backend):
    sampling = sampling_pb2.SamplingParams(bad_words=["no", " never", "no"])
    sent = await submitted(stub, backend, sampling=sampling)
    assert sent.bad_words == (spelt("no"), spelt("never"), spelt(" no"), spelt(" never"))


async def test_bad_words_that_take_too_many_tokens_are_refused(stub, backend):
    sampling = sampling_pb2.SamplingParams(bad_words=["ß" * 62 + chr(0x4E00 + i) for i in range(256)])
    assert (
        await field_at_fault(stub.Generate(pb.GenerateRequest(text="hi", sampling=sampling)).read())
        == "sampling.bad_words"
    )


async def test_prompt_logprobs_come_with_the_first_delta(stub, backend):
    call = stub.Generate(pb.GenerateRequest(text="hi", output=sampling_pb2.OutputOptions(prompt_logprobs=1)))
    request = await backend.next_request()
    assert request.num_prompt_logprobs == 1
    told = (TokenLogprobs(5, -0.5, ((6, -0.25),)), TokenLogprobs(7, -1.0, ((7, -1.0),)))
    backend.step({request.handle: spelt("a")}, prompt_logprobs={request.handle: told})
    first = (await call.read()).delta
    backend.step({request.handle: spelt("b")}, {request.handle: FinishReason.LENGTH})
    last = (await call.read()).delta
    assert [(item.token_id, item.logprob) for item in first.prompt_logprobs] == [(5, -0.5), (7, -1.0)]
    assert [(top.token_id, top.logprob) for item in first.prompt_logprobs for top in item.top] == [
        (6, -0.25),
        (7, -1.0),
    ]
    assert not last.prompt_logprobs


async def test_only_the_first_completion_asks_for_the_prompts(stub, backend):
    stub.Generate(
        pb.GenerateRequest(
            text="hi",
            sampling=sampling_pb2.SamplingParams(n=2),
            output=sampling_pb2.OutputOptions(prompt_logprobs=0),
        )
    )
    asked = [(await backend.next_request()).num_prompt_logprobs for _ in range(2)]
    assert asked == [0, None]

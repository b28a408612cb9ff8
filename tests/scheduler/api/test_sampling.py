"""What shapes the choice of a token, from the message to the core's request, and prompts' log-probabilities back."""

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest

from paceline.plan.values import FinishReason, TokenLogprobs
from paceline.v1 import inference_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline_scheduler.testing.edge_server import serve_edge
from paceline_scheduler.testing.refusals import refusal_of
from paceline_scheduler.testing.scripted_backend import ScriptedBackend
from paceline_scheduler.testing.tiny import END, MODEL, encode


@pytest.fixture
async def server():
    """A server with one model."""
    async with serve_edge(ScriptedBackend(MODEL)) as server:
        yield server


def spelt(text):
    """The tokens of a part of a text."""
    return tuple(encode(text))


async def submitted(stub, server, **fields):
    """The core's request of a message with these fields."""
    stub.Generate(pb.GenerateRequest(text="hi", **fields))
    return await server.backend.next_request()


async def field_at_fault(call):
    """The field that an INVALID_ARGUMENT names."""
    code, _, details = await refusal_of(call.read())
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    return details[BadRequest].field_violations[0].field


async def test_penalties_and_lists_reach_the_core_as_they_were_sent(stub, server):
    """A penalty of 0 is sent; floats are those of the message."""
    sampling = sampling_pb2.SamplingParams(
        presence_penalty=0.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.25,
        logit_bias={9: 1.5, 3: -100.0},
        allowed_token_ids=[4, 9, 4],
    )
    sent = (await submitted(stub, server, sampling=sampling)).sampling
    assert (sent.presence_penalty, sent.frequency_penalty, sent.repetition_penalty) == (0.0, -1.5, 1.25)
    assert sent.logit_bias == ((3, -100.0), (9, 1.5))
    assert sent.allowed_token_ids == (4, 9)


async def test_a_minimum_masks_the_models_end_tokens_even_where_they_are_ignored(stub, server):
    stopping = sampling_pb2.StoppingParams(min_tokens=3, stop_token_ids=[7], ignore_eos=True)
    sent = await submitted(stub, server, stopping=stopping)
    assert (sent.min_tokens, sent.end_token_ids, sent.ignored_end_token_ids) == (3, (7,), (END,))


async def test_a_stop_text_before_the_minimum_is_text(stub, server):
    stopping = sampling_pb2.StoppingParams(min_tokens=2, stop=["a"])
    call = stub.Generate(pb.GenerateRequest(text="hi", stopping=stopping))
    handle = (await server.backend.next_request()).handle
    for token_id in (*spelt("a"), *spelt("b"), *spelt("a")):
        server.backend.step({handle: [token_id]})
    assert "".join([response.delta.text async for response in call]) == "ab"


async def test_bad_words_are_spelt_with_and_without_a_space(stub, server):
    sampling = sampling_pb2.SamplingParams(bad_words=["no", " never", "no"])
    sent = await submitted(stub, server, sampling=sampling)
    assert sent.bad_words == (spelt("no"), spelt("never"), spelt(" no"), spelt(" never"))


async def test_bad_words_that_take_too_many_tokens_are_refused(stub, server):
    sampling = sampling_pb2.SamplingParams(bad_words=["ß" * 62 + chr(0x4E00 + i) for i in range(256)])
    assert await field_at_fault(stub.Generate(pb.GenerateRequest(text="hi", sampling=sampling))) == "sampling.bad_words"


async def test_prompt_logprobs_come_with_the_first_delta(stub, server):
    call = stub.Generate(pb.GenerateRequest(text="hi", output=sampling_pb2.OutputOptions(prompt_logprobs=1)))
    request = await server.backend.next_request()
    assert request.num_prompt_logprobs == 1
    told = (TokenLogprobs(5, -0.5, ((6, -0.25),)), TokenLogprobs(7, -1.0, ((7, -1.0),)))
    server.backend.step({request.handle: spelt("a")}, prompt_logprobs={request.handle: told})
    first = (await call.read()).delta
    server.backend.step({request.handle: spelt("b")}, {request.handle: FinishReason.LENGTH})
    last = (await call.read()).delta
    assert [(item.token_id, item.logprob) for item in first.prompt_logprobs] == [(5, -0.5), (7, -1.0)]
    assert [(top.token_id, top.logprob) for item in first.prompt_logprobs for top in item.top] == [
        (6, -0.25),
        (7, -1.0),
    ]
    assert not last.prompt_logprobs


async def test_only_the_first_completion_asks_for_the_prompts(stub, server):
    stub.Generate(
        pb.GenerateRequest(
            text="hi",
            sampling=sampling_pb2.SamplingParams(n=2),
            output=sampling_pb2.OutputOptions(prompt_logprobs=0),
        )
    )
    asked = [(await server.backend.next_request()).num_prompt_logprobs for _ in range(2)]
    assert asked == [0, None]

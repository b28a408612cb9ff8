"""Explain and Estimate over real gRPC: what the backend says of a request arrives field by field."""

import grpc
import pytest

from paceline.v1 import inference_pb2 as pb
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline_scheduler.testing.edge_server import serve_edge
from paceline_scheduler.testing.scripted_backend import ScriptedBackend
from paceline_scheduler.testing.tiny import MODEL, encode


@pytest.fixture
def backend():
    """One model."""
    return ScriptedBackend(MODEL)


@pytest.fixture
async def stub(backend):
    """A client of a server with this backend."""
    async with serve_edge(backend) as server, grpc.aio.insecure_channel(server.address) as channel:
        yield InferenceServiceStub(channel)


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

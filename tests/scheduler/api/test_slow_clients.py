"""Many clients that do not read, over real sockets, beside some that do."""

import asyncio
from contextlib import AsyncExitStack

import grpc
import grpc.aio

from edge_rig.edge_server import SLOW_CHANNEL, serve_edge
from edge_rig.scripted_backend import ScriptedBackend
from edge_rig.tiny import MODEL, encode
from edge_rig.tokenizers import served_model
from paceline.plan.values import FinishReason, TokenLogprobs
from paceline.v1 import inference_pb2 as pb
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline_scheduler.api.limits import EdgeLimits

NUM_SLOW, NUM_FAST = 100, 8
MAX_STREAM_BYTES = 16 * 1024
ENDLESS_MODEL = served_model(MODEL.tokenizer, max_model_len=1 << 20)
LETTER = encode("y")
PART = encode("x" * 20)  # a step's output of one slow client, most of whose bytes are log-probabilities
NUM_TOP = 20
LOGPROBS = tuple(TokenLogprobs(token, -1.0, tuple((top, -1.0) for top in range(NUM_TOP))) for token in PART)
PART_BYTES = 8 * 1024  # at most


class SlowClient:
    """Reads nothing until it is told to; then it comes back as often as it takes, with every token it has."""

    def __init__(self, channel, request_id):
        self._stub = InferenceServiceStub(channel)
        self._request = pb.GenerateRequest(text="hi", request_id=request_id, resumable=True)
        self._request.output.logprobs = NUM_TOP
        self._call = self._stub.Generate(self._request)
        self.num_cuts = 0
        self.token_ids = []

    async def read_all(self):
        while True:
            try:
                while (response := await self._call.read()) is not grpc.aio.EOF:
                    self.token_ids += response.delta.token_ids
                    rolling_hash = response.delta.rolling_hash
                return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
            self.num_cuts += 1
            again = pb.GenerateRequest(attachment=1 + self.num_cuts, prior_output_token_ids=self.token_ids)
            again.resume_from, again.resume_hash = len(self.token_ids), rolling_hash
            again.MergeFrom(self._request)
            self._call = self._stub.Generate(again)


async def test_a_hundred_clients_that_do_not_read_are_cut_and_find_every_token_later():
    async with AsyncExitStack() as stack:
        limits = EdgeLimits(max_stream_bytes=MAX_STREAM_BYTES)
        server = await stack.enter_async_context(serve_edge(ScriptedBackend(ENDLESS_MODEL), limits))
        backend, slow = server.backend, []
        for number in range(NUM_SLOW):
            channel = grpc.aio.insecure_channel(server.address, options=SLOW_CHANNEL)
            slow.append(SlowClient(await stack.enter_async_context(channel), f"slow{number}"))
        stub = InferenceServiceStub(await stack.enter_async_context(grpc.aio.insecure_channel(server.address)))
        fast = [stub.Generate(pb.GenerateRequest(text="hi", request_id=f"fast{number}")) for number in range(NUM_FAST)]
        requests = [await backend.next_request() for _ in range(NUM_SLOW + NUM_FAST)]
        handles = {request.key.request_id: request.handle for request in requests}
        slow_handles = [handles[f"slow{number}"] for number in range(NUM_SLOW)]
        num_parts = 0
        while len(backend.asked.detached) < NUM_SLOW:
            parts = dict.fromkeys(handles.values(), LETTER) | dict.fromkeys(slow_handles, PART)
            backend.step(parts, logprobs=dict.fromkeys(slow_handles, LOGPROBS))
            num_parts += 1
            assert max(outbox.num_bytes for outbox in server.edge.requests.calls()) <= MAX_STREAM_BYTES + 2 * PART_BYTES
            assert [(await call.read()).delta.text for call in fast] == ["y"] * NUM_FAST
        ends = {handles[client]: FinishReason.LENGTH for client in handles}
        backend.step(dict.fromkeys(handles.values(), LETTER), ends, dict.fromkeys(slow_handles, LOGPROBS[:1]))
        await asyncio.gather(*(client.read_all() for client in slow))
    assert {client.num_cuts for client in slow} == {1}
    assert all(client.token_ids == [*PART * num_parts, *LETTER] for client in slow)

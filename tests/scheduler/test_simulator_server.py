"""The simulated executor behind real gRPC: it answers every call of ExecutorService as an executor does."""

import asyncio

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from paceline.v1 import executor_pb2 as pb
from paceline.v1 import plan_pb2, sampling_pb2
from paceline.v1.executor_pb2_grpc import ExecutorServiceStub
from paceline_scheduler.link.transport_grpc import GrpcTransport
from paceline_scheduler.simulator.server import SimulatedServer, server_config
from paceline_scheduler.testing.requests import expected_output, make_request
from paceline_scheduler.testing.rig import SchedulerRig

CONFIG = server_config(num_blocks=64, max_num_rows=8)


@pytest.fixture
async def server():
    """A simulated executor on a free port."""
    server = await SimulatedServer.start(CONFIG)
    yield server
    await server.stop()


@pytest.fixture
async def stub(server):
    """A client of it."""
    async with grpc.aio.insecure_channel(server.address, options=(("grpc.max_send_message_length", -1),)) as channel:
        yield ExecutorServiceStub(channel)


async def refusal(awaitable):
    """The code of a failed call and its reason."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    (detail,) = Status.FromString(dict(caught.value.trailing_metadata())["grpc-status-details-bin"]).details
    return caught.value.code(), ErrorInfo.FromString(detail.value).reason


async def test_rows_and_records_are_shown(server, stub):
    """Of a request that runs, and of one that has ended and was not acknowledged."""
    async with SchedulerRig(server.address, GrpcTransport()) as rig:
        await rig.until_ready()
        ended, running = make_request(20, 3), make_request(5, 900)
        rig.submit(ended, running)
        await rig.until(lambda: ended.handle in rig.client.ended and server.service.executor.records)
        state = await stub.GetState(pb.GetStateRequest(include_records=True, include_token_ids=True))
    assert (state.num_rows_in_use, state.num_records, state.truncated) == (1, 1, False)
    row, record = state.rows
    assert (row.request_id, row.num_prompt_tokens, row.HasField("row")) == (running.key.request_id, 5, True)
    assert len(row.block_ids) == state.num_granted_blocks > 0
    assert row.num_output_tokens == len(row.output_token_ids)
    assert (record.request_id, record.HasField("row")) == (ended.key.request_id, False)
    assert tuple(record.output_token_ids) == expected_output(ended, CONFIG.tokens)
    assert list(record.prompt_token_ids) == ended.prompt_token_ids.tolist()
    assert record.released_reason == sampling_pb2.FINISH_REASON_LENGTH
    assert state.num_tagged_blocks == 1


async def test_what_is_shown_is_bounded(server, stub):
    """Rows only, unless records are asked for; and no more than wanted."""
    async with SchedulerRig(server.address, GrpcTransport()) as rig:
        await rig.until_ready()
        rig.submit(make_request(3, 2), make_request(3, 2))
        await rig.until(lambda: len(server.service.executor.records) == 2)
        nothing = await stub.GetState(pb.GetStateRequest())
        assert (len(nothing.rows), nothing.num_records, nothing.truncated) == (0, 2, False)
        one = await stub.GetState(pb.GetStateRequest(include_records=True, max_num_rows=1))
        assert (len(one.rows), one.truncated, list(one.rows[0].prompt_token_ids)) == (1, True, [])
    invalid = refusal(stub.GetState(pb.GetStateRequest(max_num_rows=1025)))
    assert await invalid == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")


async def test_what_is_not_simulated_says_so_for_programs_too(stub):
    """Profile."""
    assert await refusal(stub.Profile(pb.ProfileRequest(num_steps=1)).read()) == (
        grpc.StatusCode.UNIMPLEMENTED,
        "UNSUPPORTED",
    )


async def test_a_plan_far_above_the_defaults_of_grpc_is_read(stub):
    """This one has 5 MiB and breaks a rule: only who has read it can tell."""
    call = stub.Attach()
    hello = plan_pb2.Hello(scheduler_id="s", term=1, min_protocol=1, max_protocol=1)
    await call.write(plan_pb2.AttachRequest(hello=hello))
    assert (await call.read()).HasField("welcome")
    big = plan_pb2.NewRequest(prompt_token_ids=bytes(5 * 1024 * 1024))
    await call.write(plan_pb2.AttachRequest(plan=plan_pb2.BatchPlan(step_id=99, new_requests=[big])))

    async def read_to_the_end():
        async with asyncio.timeout(20):
            while await call.read() is not grpc.aio.EOF:
                pass

    assert await refusal(read_to_the_end()) == (grpc.StatusCode.INVALID_ARGUMENT, "PLAN_VIOLATION")

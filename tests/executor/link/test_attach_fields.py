"""Fields of a placement over real gRPC: what comes back in the snapshot, and what a later version will act on."""

import grpc
import numpy as np
import pytest

from paceline.v1 import plan_pb2, sampling_pb2
from paceline_executor.testing.hash_executor import HASH_LIMITS, hash_executor
from paceline_executor.testing.hash_runner import continuation
from paceline_executor.testing.plan_client import attached, grants, info_of, request, tokens_by_row, values_of

pytestmark = pytest.mark.usefixtures("seen_or_hidden")

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
async def executor():
    """Eight rows of 64 tokens, 32 blocks of 4."""
    async with hash_executor() as executor:
        yield executor


def _expected(num_tokens):
    return continuation(PROMPT, num_tokens, HASH_LIMITS.vocab_size)


def _placing(row=0, **options):
    """A plan that puts a request on a row, with blocks of its own."""
    cells = [(row, index, row * 5 + index) for index in range(5)]
    return plan_pb2.BatchPlan(new_requests=[request(row, PROMPT, **options)], grants=grants(cells))


LATER_FIELDS = {
    "structured": plan_pb2.NewRequest(structured=sampling_pb2.StructuredOutput(json_object=True)),
    "adapter_slot": plan_pb2.NewRequest(adapter_slot=0),
    "sampling.bad_words": plan_pb2.NewRequest(sampling=sampling_pb2.SamplingParams(bad_words=["x"])),
    "sampling.n": plan_pb2.NewRequest(sampling=sampling_pb2.SamplingParams(n=2)),
}


@pytest.mark.parametrize("field", LATER_FIELDS)
async def test_what_a_later_version_acts_on_is_refused_by_name(executor, field):
    placing = _placing()
    placing.new_requests[0].MergeFrom(LATER_FIELDS[field])
    async with attached(executor.address) as client:
        result = await client.run([(0, 6)], placing)
    async with attached(executor.address) as client:
        (row,) = client.rows

    (error,) = result.errors
    assert error.error.code == grpc.StatusCode.UNIMPLEMENTED.value[0]
    assert error.error.message.startswith(f"{field} is not supported")
    assert row.id == placing.new_requests[0].id


LATER_PLANS = {
    "adapter_loads": plan_pb2.BatchPlan(adapter_loads=[{"id": 1, "digest": "d"}]),
    "imports": plan_pb2.BatchPlan(imports=[{"id": 1}]),
    "exports": plan_pb2.BatchPlan(exports=[{"id": 1}]),
}


@pytest.mark.parametrize("field", LATER_PLANS)
async def test_a_plan_of_a_later_version_ends_the_stream_by_name(executor, field):
    """Nobody can wait for a confirmation that never comes."""
    async with attached(executor.address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.run((), LATER_PLANS[field])

    info = info_of(failure.value)
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert (info.reason, info.metadata["field"]) == ("UNSUPPORTED_FIELD", field)


async def test_fields_of_a_later_version_that_change_nothing_are_honoured(executor):
    placing = _placing()
    placing.new_requests[0].MergeFrom(plan_pb2.NewRequest(min_tokens=0))
    async with attached(executor.address) as client:
        result = await client.run([(0, 6)], placing)

    assert not result.errors
    assert tokens_by_row(result)[0] == _expected(1)


async def test_completions_of_a_request_run_side_by_side(executor):
    cells = [(row, index, row * 5 + index) for row in (0, 1) for index in range(5)]
    placing = plan_pb2.BatchPlan(new_requests=[request(row, PROMPT) for row in (0, 1)], grants=grants(cells))
    for row in (0, 1):
        placing.new_requests[row].id.CopyFrom(plan_pb2.RecordId(request_id="r", index=row))
    async with attached(executor.address) as client:
        result = await client.run([(0, 6), (1, 6)], placing)
    async with attached(executor.address) as client:
        ids = [row.id for row in client.rows]

    assert not result.errors
    assert ids == [plan_pb2.RecordId(request_id="r"), plan_pb2.RecordId(request_id="r", index=1)]


async def test_another_completion_of_a_request_is_another_record(executor):
    release = plan_pb2.Release(row=0, final=plan_pb2.FinalRelease(num_output_tokens=1, reason=1))
    async with attached(executor.address) as client:
        await client.run([(0, 6)], _placing())
        await client.run((), plan_pb2.BatchPlan(releases=[release]))
        await client.run((), plan_pb2.BatchPlan(forget=[plan_pb2.RecordId(request_id="request-0", index=1)]))
    async with attached(executor.address) as client:
        (record,) = client.rows

    assert record.id == plan_pb2.RecordId(request_id="request-0")


async def test_the_snapshot_returns_the_logprobs_of_the_whole_output(executor):
    async with attached(executor.address) as client:
        await client.run([(0, 6)], _placing(num_logprobs=2))
        results = [await client.run([(0, 1), (1, 6)], _placing(1)), await client.run([(0, 1)])]
    async with attached(executor.address) as client:
        row, other = client.rows

    told = [token for result in results for token in result.logprobs[0].tokens]
    logprobs = row.logprobs
    assert (logprobs.offset, logprobs.num_top, values_of(row.output_token_ids)) == (0, 2, _expected(3))
    assert np.frombuffer(logprobs.logprobs, "<f4").tolist()[1:] == [token.logprob for token in told]
    assert values_of(logprobs.top_token_ids)[2:] == [top.token_id for token in told for top in token.top]
    assert np.frombuffer(logprobs.top_logprobs, "<f4").tolist()[2:] == [t.logprob for token in told for t in token.top]
    assert not other.HasField("logprobs")

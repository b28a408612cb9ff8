"""The plan stream over real gRPC: attaching, planning ahead, being refused, coming back, giving way to another one."""

import asyncio
import hashlib

import grpc
import numpy as np
import pytest

from executor_rig.hash_executor import HASH_LIMITS
from executor_rig.hash_runner import continuation
from executor_rig.plan_client import (
    attach_until,
    attached,
    beating,
    column,
    grants,
    hello,
    info_of,
    read,
    request,
    tokens_by_row,
    values_of,
)
from paceline.plan.hashes import HASH_START
from paceline.v1 import plan_pb2, sampling_pb2

# On the twin `test_attach_order` and all of `rows` have a step's fates.
SEEN = ["seen", "hidden", pytest.param("twin", marks=pytest.mark.slow)]
pytestmark = [
    pytest.mark.usefixtures("seen_or_hidden"),
    pytest.mark.parametrize("seen_or_hidden", SEEN, indirect=True, scope="module"),
]

PROMPT = [5, 6, 7, 8, 9, 10]


def _expected(num_tokens):
    return continuation(PROMPT, num_tokens, HASH_LIMITS.vocab_size)


def _placing(row=0, prompt=PROMPT, num_blocks=5, **options):
    """A plan that puts a request on a row, with blocks of its own."""
    cells = [(row, index, row * num_blocks + index) for index in range(num_blocks)]
    return plan_pb2.BatchPlan(new_requests=[request(row, prompt, **options)], grants=grants(cells))


async def _reason(awaitable):
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await awaitable
    return failure.value.code(), info_of(failure.value).reason


async def _until(holds):
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


async def _until_in_flight(executor, num_plans):
    """Wait until the executor has so many unanswered plans; 0 also when nobody drives."""
    streams = executor.service.plan_streams
    await _until(lambda: (streams._driver.num_in_flight if streams._driver else 0) == num_plans)


async def test_welcome_says_what_the_executor_is(executor):
    async with attached(executor.address) as client:
        welcome = client.welcome

    assert (welcome.epoch, welcome.protocol, len(welcome.tag_key)) == (1, 1, 32)
    assert (welcome.geometry.num_blocks, welcome.geometry.block_size) == (32, 4)
    assert welcome.limits.max_plans_in_flight == 4
    assert [point.num_tokens for point in welcome.step_points] == [1, 64]
    assert (client.rows, client.tags) == ([], {})


@pytest.mark.parametrize(("num_ahead", "chunk"), [(1, 6), (2, 4), (3, 1), (4, 6)])
async def test_planning_ahead_gives_the_same_tokens_as_one_plan_at_a_time(executor, num_ahead, chunk):
    schedule = [chunk] * (6 // chunk) + [6 % chunk] * bool(6 % chunk) + [1] * 7
    output, in_flight = [], 0
    async with attached(executor.address) as client:
        for number, num_tokens in enumerate(schedule):
            await client.step([(0, num_tokens)], _placing() if number == 0 else None)
            in_flight += 1
            if in_flight == num_ahead:
                output += tokens_by_row(await client.result())[0]
                in_flight -= 1
        for _ in range(in_flight):
            output += tokens_by_row(await client.result())[0]

    assert output == _expected(8)


async def test_results_carry_identities_finishes_and_timings(executor):
    async with attached(executor.address) as client:
        result = await client.run([(0, 6)], _placing(max_tokens=1))

    assert (result.incarnation, result.epoch, result.step_id) == (client.welcome.incarnation, 1, 1)
    assert list(result.finishes) == [plan_pb2.ROW_FINISH_LENGTH]
    assert result.timings.forward_ns == 1000
    assert result.timings.prepare_ns > 0


async def test_a_request_that_cannot_run_fails_alone_with_a_typed_error(executor):
    """Its row is in the snapshot until it is released."""
    sampling = sampling_pb2.SamplingParams(temperature=0, seed=0, bad_words=["x"], repetition_penalty=1)
    async with attached(executor.address) as client:
        await client.run((), _placing(1))
        result = await client.run([(1, 6), (0, 6)], _placing(0, sampling=sampling))
    async with attached(executor.address) as client:
        names = [row.id.request_id for row in client.rows]

    (error,) = result.errors
    assert (error.row, error.error.code) == (0, grpc.StatusCode.UNIMPLEMENTED.value[0])
    assert error.error.message.startswith("sampling.bad_words is not supported")
    assert error.error.details[0].type_url == "type.googleapis.com/google.rpc.ErrorInfo"
    assert values_of(result.num_accepted) == [1, 0]
    assert sorted(names) == ["request-0", "request-1"]


async def test_a_broken_stream_is_taken_up_from_the_snapshot(executor):
    """Attach again, read the row's state, go on: the tokens are those of an undisturbed request."""
    async with attached(executor.address) as client:
        await client.run([(0, 6)], _placing())
        await client.run([(0, 1)])
    async with attached(executor.address) as client:
        (row,) = client.rows
        last = [tokens_by_row(await client.run([(0, 1)]))[0][0] for _ in range(2)]

    assert client.welcome.epoch == 2
    assert (row.row, row.num_computed_tokens, values_of(row.block_ids)) == (0, 7, [0, 1, 2, 3, 4])
    assert values_of(row.output_token_ids) + last == _expected(4)


async def test_plans_queued_when_the_stream_breaks_have_no_effect(executor):
    """Only the running step is finished; the grant hash of the next epoch starts anew."""
    async with attached(executor.address) as client:
        await client.run([(0, 6)], _placing())
        executor.runner.gate.clear()
        for _ in range(3):
            await client.step([(0, 1)])
        while not (await read(client.call)).heartbeat.running_step_id:  # in flight is not yet launched
            pass
        await _until_in_flight(executor, 3)
    await _until_in_flight(executor, 0)
    executor.runner.gate.set()
    async with attached(executor.address) as client:
        (row,) = client.rows
        result = await client.run([(0, 1)])

    assert row.num_computed_tokens == 7
    assert tokens_by_row(result)[0] == _expected(3)[2:]
    assert result.grant_hash == HASH_START


async def test_the_snapshot_returns_a_request_as_it_was_placed(executor):
    """Context, sampling, limits and end tokens, for a successor that knows nothing."""
    sampling = sampling_pb2.SamplingParams(temperature=0.5, seed=7, top_k=3, top_p=0.75, min_p=0.25)
    placing = _placing(2, sampling=sampling, max_tokens=9, end_token_ids=[3, 1], attempt=4)
    placing.new_requests[0].context = b"opaque"
    placing.new_requests[0].id.tenant = "tenant"
    async with attached(executor.address) as client:
        await client.run([(2, 6)], placing)
    async with attached(executor.address) as client:
        (row,) = client.rows

    assert (row.id.tenant, row.id.request_id, row.attempt, row.context) == ("tenant", "request-2", 4, b"opaque")
    assert (row.sampling, row.max_tokens, list(row.end_token_ids)) == (sampling, 9, [3, 1])
    assert values_of(row.prompt_token_ids) == PROMPT


async def test_records_survive_until_they_are_forgotten(executor):
    """Each by its own name: another completion of the request is another record."""
    release = plan_pb2.Release(row=0, final=plan_pb2.FinalRelease(num_output_tokens=1, reason=1))
    own, other = plan_pb2.RecordId(request_id="request-0"), plan_pb2.RecordId(request_id="request-0", index=1)
    async with attached(executor.address) as client:
        await client.run([(0, 6)], _placing())
        await client.run((), plan_pb2.BatchPlan(releases=[release], forget=[other]))
    async with attached(executor.address) as client:
        (record,) = client.rows
        await client.run((), plan_pb2.BatchPlan(forget=[own]))
    async with attached(executor.address) as client:
        assert client.rows == []

    assert (record.id, record.HasField("row"), record.released) == (own, False, release.final)


async def test_completions_of_a_request_run_side_by_side(executor):
    placing = plan_pb2.BatchPlan(
        new_requests=[request(row, PROMPT) for row in (0, 1)],
        grants=grants([(row, index, row * 5 + index) for row in (0, 1) for index in range(5)]),
    )
    for row in (0, 1):
        placing.new_requests[row].id.CopyFrom(plan_pb2.RecordId(request_id="r", index=row))
    async with attached(executor.address) as client:
        result = await client.run([(0, 6), (1, 6)], placing)
    async with attached(executor.address) as client:
        ids = [row.id for row in client.rows]

    assert not result.errors
    assert ids == [plan_pb2.RecordId(request_id="r"), plan_pb2.RecordId(request_id="r", index=1)]


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


async def test_tags_outlive_the_scheduler_unless_it_brings_another_key(executor):
    tags = plan_pb2.BlockTags(block_ids=column([3, 9]), keys=bytes(range(1, 33)))
    async with attached(executor.address) as client:
        await client.run((), plan_pb2.BatchPlan(tags=tags))
    digest = hashlib.blake2b(client.welcome.tag_key, digest_size=16).digest()
    greeting = hello()
    greeting.tag_key_digest = digest
    async with attached(executor.address, greeting) as client:
        same_key = client.tags
    greeting.tag_key_digest = b"another"
    async with attached(executor.address, greeting) as client:
        other_key = client.tags

    assert same_key == {3: bytes(range(1, 17)), 9: bytes(range(17, 33))}
    assert other_key == {}


REFUSED = {
    "a row not in use": ([(3, 1)], plan_pb2.BatchPlan(), "PLAN_ROW_NOT_IN_USE"),
    "a release of one": ([], plan_pb2.BatchPlan(releases=[plan_pb2.Release(row=0)]), "PLAN_ROW_NOT_IN_USE"),
    "a block out of range": ([], plan_pb2.BatchPlan(grants=grants([(0, 0, 99)])), "PLAN_BLOCK_OUT_OF_RANGE"),
    "half a number": ([], plan_pb2.BatchPlan(tags=plan_pb2.BlockTags(block_ids=b"abc")), "PLAN_COLUMN_LENGTH"),
    "num_draft_tokens": ([], plan_pb2.BatchPlan(num_draft_tokens=column([1])), "UNSUPPORTED_FIELD"),
    "imports": ([], plan_pb2.BatchPlan(imports=[{"id": 1}]), "UNSUPPORTED_FIELD"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_malformed_plan_ends_its_stream_and_the_executor_serves_the_next(executor, what):
    """What a later version would do is named: nobody can wait for a confirmation that never comes."""
    scheduled, plan, reason = REFUSED[what]
    async with attached(executor.address) as client:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.run(scheduled, plan)
    async with attached(executor.address) as client:
        result = await client.run([(0, 6)], _placing())

    is_unsupported = reason == "UNSUPPORTED_FIELD"
    code = grpc.StatusCode.UNIMPLEMENTED if is_unsupported else grpc.StatusCode.INVALID_ARGUMENT
    assert (failure.value.code(), info_of(failure.value).reason) == (code, reason)
    assert not is_unsupported or dict(info_of(failure.value).metadata) == {"field": what}
    assert tokens_by_row(result)[0] == _expected(1)


async def test_a_gap_in_the_plans_ends_the_stream(executor):
    """DATA_LOSS: attach again."""
    async with attached(executor.address) as client:
        client.last_step_id = 1
        refusal = await _reason(client.run())

    assert refusal == (grpc.StatusCode.DATA_LOSS, "PLAN_OUT_OF_ORDER")


@pytest.mark.parametrize("field", ["epoch", "incarnation"])
async def test_a_plan_of_another_epoch_or_incarnation_ends_the_stream(executor, field):
    async with attached(executor.address) as client:
        setattr(client.welcome, field, 77)
        refusal = await _reason(client.run())

    assert refusal == (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH")


async def test_more_plans_than_allowed_end_the_stream(executor):
    executor.runner.gate.clear()
    async with attached(executor.address) as client:
        await client.step([(0, 6)], _placing())
        for _ in range(4):
            await client.step([(0, 1)])
        refusal = await _reason(client.result())
        executor.runner.gate.set()

    assert refusal == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_PLANS")


async def test_a_scheduler_that_stops_writing_gets_its_results_and_a_good_end(executor):
    async with attached(executor.address) as client:
        await client.step([(0, 6)], _placing())
        await client.step([(0, 1)])
        await client.call.done_writing()
        results = [await client.result(), await client.result()]
        with pytest.raises(ConnectionError):
            await client.result()

    assert [tokens_by_row(result)[0][0] for result in results] == _expected(2)


async def test_a_step_that_fails_as_a_whole_ends_the_stream_and_advances_no_row(executor):
    async with attached(executor.address) as client:
        await client.run([(0, 6)], _placing())
        executor.runner.fail_next = RuntimeError("secret words of the device")
        executor.runner.gate.clear()
        await client.step([(0, 1)])
        await client.step([(0, 1)])
        await _until_in_flight(executor, 2)
        executor.runner.gate.set()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await client.result()
    async with attached(executor.address) as client:
        (row,) = client.rows
        result = await client.run([(0, 1)])

    assert failure.value.code() is grpc.StatusCode.INTERNAL
    assert info_of(failure.value).reason == "STEP_FAILED"
    assert "secret" not in failure.value.details()
    assert row.num_computed_tokens == 6
    assert tokens_by_row(result)[0] == _expected(2)[1:]


async def test_heartbeats_name_the_running_step(executor):
    """So that a scheduler tells a long step from a dead executor."""
    executor.runner.gate.clear()
    async with attached(executor.address) as client:
        await client.step([(0, 6)], _placing())
        while True:
            message = await read(client.call)
            if message.heartbeat.running_step_id:
                break
        executor.runner.gate.set()
        await client.result()

    assert message.heartbeat.running_step_id == 1
    assert message.heartbeat.running_ns > 0


async def test_twenty_attachments_leave_nothing_behind(executor):
    num_tasks = len(asyncio.all_tasks())
    for _ in range(20):
        async with attached(executor.address):
            pass
    await _until(lambda: executor.service.plan_streams.fence.holder is None)

    assert executor.service.plan_streams.fence.epoch == 20
    assert len(asyncio.all_tasks()) <= num_tasks + 2


async def test_a_plan_far_above_the_defaults_of_grpc_is_read(executor):
    """This one has 5 MiB and a request that no row can hold: only who has read it can tell."""
    async with attached(executor.address) as client:
        big = plan_pb2.NewRequest(row=0, prompt_token_ids=bytes(5 * 1024 * 1024), attempt=1)
        big.id.request_id = "big"
        result = await client.run((), plan_pb2.BatchPlan(new_requests=[big]))

    (error,) = result.errors
    assert error.row == 0


async def test_a_lower_term_is_refused_with_the_holders_name(executor):
    async with attached(executor.address, hello("driver", 5)) as client:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await attach_until(executor.address, "welcome", hello("other", 4))
        result = await client.run([(0, 6)], _placing())

    info = info_of(failure.value)
    assert (failure.value.code(), info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "TERM_SUPERSEDED")
    assert (info.metadata["holder_scheduler_id"], info.metadata["holder_term"]) == ("driver", "5")
    assert tokens_by_row(result)[0] == _expected(1)


async def test_one_that_is_queued_gets_the_executor_when_the_driver_leaves(executor):
    async with attached(executor.address, hello("driver", 5)) as client:
        await client.run([(0, 6)], _placing())
        async with beating(client.call):
            call, message = await attach_until(executor.address, "waiting", hello("other", 6))
        holder = message.waiting
    async with beating(call):
        while (message := await read(call)).WhichOneof("message") != "snapshot":
            pass
    call.cancel()

    assert (holder.holder_scheduler_id, holder.holder_term) == ("driver", 5)
    assert [row.num_computed_tokens for row in message.snapshot.rows] == [6]


async def test_the_driver_replaces_its_own_stream(executor):
    async with attached(executor.address) as old, attached(executor.address) as new:
        refusal = await _reason(old.result())
        result = await new.run([(0, 6)], _placing())

    assert refusal == (grpc.StatusCode.ABORTED, "EPOCH_ENDED")
    assert (new.welcome.epoch, values_of(result.num_accepted)) == (2, [1])

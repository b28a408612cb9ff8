"""Steps that fail and rows that fail: with a real model and a real plan stream, only what is at fault is affected."""

from dataclasses import replace

import grpc
import numpy as np
import pytest

from executor_rig.cpu import cpu_runner
from executor_rig.driving import Driver
from executor_rig.hash_executor import hash_executor, loaded, serving
from executor_rig.plan_client import attached, grants, info_of, request, tokens_by_row, values_of
from paceline.v1 import plan_pb2, sampling_pb2
from paceline_executor.errors import DeviceError
from paceline_executor.limits import RowLimits
from paceline_executor.runner.device.host_model import HostModel
from random_models import RandomCheckpoint, tiny_checkpoint

LIMITS = RowLimits(
    num_rows=4, max_model_len=128, max_num_batched_tokens=64, num_blocks=24, block_size=8, vocab_size=512
)
BAD_TOKEN = 500
GOOD_PROMPT = [(7 * i * i + 3) % 499 for i in range(11)]
BAD_PROMPT = [1, 2, BAD_TOKEN, 3, 4, 5]
NUM_TOKENS = 6


class PartlyNan(RandomCheckpoint):
    """Weights of which the embedding of one token is NaN."""

    def tensor(self, name):
        """A weight by name."""
        values = super().tensor(name)
        if name == "model.embed_tokens.weight":
            values = values.copy()
            values[BAD_TOKEN] = np.nan
        return values


def checkpoint(*, is_sound=True):
    """A tiny model whose output weights are not those of its embeddings."""
    tiny = tiny_checkpoint(tie_word_embeddings=False)
    return tiny if is_sound else PartlyNan(replace(tiny.config), 0)


def new_runner(**options):
    """Of the tiny model, on one thread."""
    return cpu_runner(checkpoint(**options), num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size)


@pytest.fixture
def _short_of_memory(monkeypatch):
    """Steps with a certain token need more memory than there is."""
    hidden = HostModel.hidden

    def hidden_or_not(self, inputs, *more):
        if BAD_TOKEN in inputs.token_ids:
            np.empty(1 << 62, dtype=np.int8)  # raises a MemoryError
        return hidden(self, inputs, *more)

    monkeypatch.setattr(HostModel, "hidden", hidden_or_not)


@pytest.fixture(scope="module")
def expected():
    """The output of the good prompt, undisturbed."""
    driver = Driver(new_runner())
    row = driver.add(GOOD_PROMPT, max_chunk=64)
    driver.run([row], NUM_TOKENS)
    return row.output


def place(*rows):
    """A plan that places a request on each row: a bad one on row 1, good ones on the others."""
    return plan_pb2.BatchPlan(
        new_requests=[request(row, BAD_PROMPT if row == 1 else GOOD_PROMPT) for row in rows],
        grants=grants([(row, index, 4 * row + index) for row in rows for index in range(3)]),
    )


@pytest.mark.usefixtures("_short_of_memory")
async def test_a_step_without_memory_is_told_at_the_next_welcome(expected):
    """By epoch and number, since how a stream ended can get lost; the rows beside it lose no token."""
    async with serving(lambda: loaded(new_runner(), LIMITS)) as (_, address):
        async with attached(address) as client:
            assert not client.welcome.HasField("failed_step")
            output = tokens_by_row(await client.run([(0, 11)], place(0)))[0]
            output += tokens_by_row(await client.run([(0, 1)]))[0]
            await client.step([(0, 1), (1, 6)], place(1))
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await client.result()
            failed_in = (client.welcome.epoch, client.last_step_id)
        async with attached(address) as client:
            told = client.welcome.failed_step
            (row,) = client.rows
            assert values_of(row.output_token_ids) == output
            while len(output) < NUM_TOKENS:
                output += tokens_by_row(await client.run([(0, 1)]))[0]

    assert info_of(failure.value).reason == "STEP_FAILED"
    assert (told.epoch, told.step_id) == failed_in
    assert "memory ran out" in told.message
    assert output == expected


@pytest.mark.parametrize("chunks", [[6], [3, 3], [1] * 6], ids=["whole", "halves", "ones"])
async def test_a_row_whose_numbers_are_none_fails_alone(expected, chunks):
    async with serving(lambda: loaded(new_runner(is_sound=False), LIMITS)) as (_, address), attached(address) as client:
        output = tokens_by_row(await client.run([(0, 11)], place(0)))[0]
        errors = []
        for number, chunk in enumerate(chunks):
            result = await client.run([(0, 1), (1, chunk)], place(1) if number == 0 else None)
            output += tokens_by_row(result)[0]
            errors += [(number, error.row) for error in result.errors]

    assert errors == [(len(chunks) - 1, 1)]
    assert output[:NUM_TOKENS] == expected[: len(output)]


ASKED = {
    "its log-probabilities": {"num_logprobs": 2},
    "those of its prompt": {"num_prompt_logprobs": 1},
    "penalties": {"sampling": sampling_pb2.SamplingParams(temperature=0.5, seed=1, presence_penalty=1.0)},
}


@pytest.mark.parametrize("asked", ASKED)
async def test_whatever_such_a_row_asks_for_it_fails_alone(expected, asked):
    """It gets neither a token nor a log-probability; the other row gets its token."""
    plan = place(0, 1)
    plan.new_requests[1].MergeFrom(plan_pb2.NewRequest(**ASKED[asked]))
    async with serving(lambda: loaded(new_runner(is_sound=False), LIMITS)) as (_, address), attached(address) as client:
        result = await client.run([(0, 11), (1, 6)], plan)

    assert tokens_by_row(result) == {0: expected[:1], 1: []}
    assert [error.row for error in result.errors] == [1]
    assert "not finite numbers" in result.errors[0].error.message
    assert not result.logprobs
    assert not result.prompt_logprobs


@pytest.mark.usefixtures("seen_or_hidden")
async def test_a_third_request_that_fails_alone_shows_that_the_executor_is_to_blame():
    async with hash_executor() as executor:
        for row in (0, 1, 0, 1, 2):
            executor.runner.fail_next = RuntimeError("device lost")
            async with attached(executor.address) as client:
                await client.step([(row, 3)], _hash_request(row))
                with pytest.raises(grpc.aio.AioRpcError):
                    await client.result()
        with pytest.raises(DeviceError, match=r"request-0.*request-1.*request-2"):
            await executor.service.run()


@pytest.mark.usefixtures("seen_or_hidden")
async def test_what_succeeds_between_two_failures_clears_the_executor():
    async with hash_executor() as executor:
        for row, is_failing in ((0, True), (0, True), (1, True), (2, False), (3, True), (1, True)):
            executor.runner.fail_next = RuntimeError("device lost") if is_failing else None
            async with attached(executor.address) as client:
                await client.step([(row, 3)], _hash_request(row))
                if is_failing:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await client.result()
                else:
                    await client.result()
        async with attached(executor.address) as client:
            result = await client.run([(2, 1)])

    assert len(tokens_by_row(result)[2]) == 1


def _hash_request(row):
    return plan_pb2.BatchPlan(
        new_requests=[request(row, [1, 2, 3])], grants=grants([(row, 0, 2 * row), (row, 1, 2 * row + 1)])
    )

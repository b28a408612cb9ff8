"""Executors of two ranks, as processes: the tokens of one, and all end where one is killed or stands still."""

import asyncio
import json
import os
import signal
from dataclasses import replace

import grpc
import pytest
from gguf.constants import GGMLQuantizationType

from executor_rig.cpu import cpu_runner
from executor_rig.driving import Driver
from executor_rig.plan_client import attached, column, grants, info_of, request, tokens_by_row
from executor_rig.rank_processes import GENEROUS_S, ON_CPU, ranks, until_gone
from paceline.process.command import ExitCode
from paceline.v1 import plan_pb2
from random_models import MIXTURE_CONFIGS, RandomCheckpoint, gguf_mixture, gguf_parts

ON_TWIN = ["--runner", "twin", "--max-num-batched-tokens", "64", "--block-size", "16"]
PLACING = plan_pb2.BatchPlan(new_requests=[request(0, [5, 6, 7])], grants=grants([(0, 0, 0)]))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random model as a GGUF file."""
    return gguf_parts(RandomCheckpoint()).write(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.mark.parametrize("way", ["on a CPU", "captured", pytest.param("drafted", marks=pytest.mark.slow)])
async def test_two_ranks_serve_the_tokens_of_one_and_end_in_good_order(model, way):
    """Each rank has all of a model that drafts, here the target itself, so all drafts are right."""
    drafter = {"drafter": "draft_model", "model": str(model)}
    options = {"on a CPU": ON_CPU, "captured": ON_TWIN, "drafted": [*ON_TWIN, "--speculation", json.dumps(drafter)]}
    with ranks(model, 2, options[way]) as (process, port, followers):
        async with attached(f"127.0.0.1:{port}") as client:
            results = [await client.run([(0, 2)], PLACING), await client.run([(0, 1)])]  # the first draws nothing
            if way == "drafted":
                drafts = plan_pb2.BatchPlan(num_draft_tokens=column([2]))
                results += [await client.run([(0, 3)], drafts) for _ in range(2)]
            else:
                results += [await client.run([(0, 1)]) for _ in range(6)]
        process.send_signal(signal.SIGTERM)
        _, complaint = process.communicate(timeout=GENEROUS_S)
        until_gone(followers)
    driver = Driver(cpu_runner(RandomCheckpoint(), num_blocks=4, block_size=16))
    expected = driver.run([driver.add([5, 6, 7], max_chunk=8)], 7)[0]

    assert [token for result in results for token in tokens_by_row(result).get(0, ())] == expected
    assert (len(followers), process.returncode, complaint) == (1, ExitCode.OK, "")


@pytest.mark.slow
async def test_two_ranks_of_the_twin_serve_the_tokens_of_a_mixture(tmp_path):
    """Each has some of its experts, and the steps are captured."""
    config = replace(MIXTURE_CONFIGS["mixtral"], sliding_window=None)
    checkpoint = RandomCheckpoint(config)
    file = gguf_mixture(checkpoint, GGMLQuantizationType.F32).write(tmp_path / "mixture.gguf")
    with ranks(file, 2, [*ON_TWIN, "--batch-invariant", "--quantization", "none"]) as (_, port, _):
        async with attached(f"127.0.0.1:{port}") as client:
            results = [await client.run([(0, 3)], PLACING), *[await client.run([(0, 1)]) for _ in range(6)]]
    driver = Driver(cpu_runner(checkpoint, num_blocks=4, block_size=16))
    (expected,) = driver.run([driver.add([5, 6, 7], max_chunk=8)], 7)
    assert [token for result in results for token in tokens_by_row(result)[0]] == expected


FAULTS = {"killed": (signal.SIGKILL, "was ended by signal 9"), "frozen": (signal.SIGSTOP, "stands still")}


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_happens_to_one_rank_ends_all(model, fault):
    """Where a step waits for it, for ever, that one has failed."""
    number, said = FAULTS[fault]
    with ranks(model, 2) as (process, port, followers):
        async with attached(f"127.0.0.1:{port}") as client:
            os.kill(followers[0], signal.SIGSTOP)
            await client.step([(0, 3)], PLACING)
            await asyncio.sleep(0.2)
            os.kill(followers[0], number)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await client.result()
        log, complaint = process.communicate(timeout=GENEROUS_S)
        until_gone(followers)

    assert info_of(failure.value).reason == "STEP_FAILED"
    assert failure.value.details() in complaint
    assert process.returncode == ExitCode.FAILED
    assert complaint.startswith("paceline-executor: error: rank 1 ")
    assert said in complaint
    assert json.loads(log.splitlines()[-1])["reason"] in complaint


@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
async def test_no_rank_outlives_the_first(model, degree):
    """Not even one that stands still, which the others wait for."""
    with ranks(model, degree) as (process, port, followers):
        async with attached(f"127.0.0.1:{port}") as client:
            os.kill(followers[0], signal.SIGSTOP)
            running = asyncio.create_task(client.run([(0, 3)], PLACING))
            await asyncio.sleep(0.2)
            process.kill()
            until_gone(followers)
            with pytest.raises(grpc.aio.AioRpcError):
                await running

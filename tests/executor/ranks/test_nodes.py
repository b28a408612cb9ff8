"""Executors whose ranks are on two nodes, here on one machine: the bits of one rank, and all end with any of them."""

import asyncio
import json
import os
import random
import signal
import socket
from contextlib import ExitStack, closing

import grpc
import pytest

from both_sides.certificates import Authority
from executor_rig.cpu import cpu_runner
from executor_rig.driving import Draw, DrawnLogprobs, Driver
from executor_rig.plan_client import attached, grants, info_of, request, tokens_by_row
from executor_rig.rank_processes import GENEROUS_S, ON_CPU, children_of, two_nodes, until_gone
from paceline.process.command import ExitCode
from paceline.v1 import plan_pb2, sampling_pb2
from paceline_cli.chaos.proxy import Direction, FaultProxy, LinkState
from paceline_executor.config import parse_config
from paceline_executor.ranks.memory import Descriptors, GroupMemory
from paceline_executor.start.loading_cpu import CpuRank
from random_models import RandomCheckpoint, gguf_parts

ON_TWIN = ("--runner", "twin", "--max-num-batched-tokens", "64", "--block-size", "16")
SLOW = pytest.mark.slow
SEEDED = sampling_pb2.SamplingParams(temperature=0.8, seed=7)
PLACING = plan_pb2.BatchPlan(
    new_requests=[request(0, [5, 6, 7], sampling=SEEDED, num_logprobs=2)], grants=grants([(0, 0, 0)])
)
NUM_TOKENS = 6
CHANCE = random.Random(0)  # noqa: S311, links that are whole need none


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random model as a GGUF file."""
    return gguf_parts(RandomCheckpoint()).write(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def drawn():
    """Tokens and log-probabilities of one rank, without a process."""
    driver = Driver(cpu_runner(RandomCheckpoint(), num_blocks=4, block_size=16))
    row = driver.add([5, 6, 7], Draw(temperature=0.8, seed=7, num_logprobs=2), max_chunk=3)
    driver.run([row], NUM_TOKENS)
    return row.output, row.logprobs


async def drawn_by(client):
    results = [await client.run([(0, 2)], PLACING)]  # which draws nothing
    results += [await client.run([(0, 1)]) for _ in range(NUM_TOKENS)]
    told = [token for result in results for row in result.logprobs for token in row.tokens]
    logprobs = [
        DrawnLogprobs(token.logprob, tuple(top.token_id for top in token.top), tuple(top.logprob for top in token.top))
        for token in told
    ]
    return [token for result in results for token in tokens_by_row(result).get(0, ())], logprobs


def test_a_node_offers_the_blocks_that_its_own_memory_has_room_for():
    """As rank 0 does for the ranks beside it."""
    options = ["--quantization", "none", "--tensor-parallel-size", "2", "--kv-cache-memory", "256KiB"]
    config = parse_config([*options, "--node", "1/2@127.0.0.1:1"])
    model = RandomCheckpoint()
    with closing(Descriptors.new(2)) as descriptors:
        rank = CpuRank(config, model, GroupMemory(descriptors, 1, config.share))
        bytes_per_token = 4 * 2 * model.config.num_layers * model.config.num_kv_heads // 2 * model.config.head_dim
        assert rank.num_blocks == (128 << 10) // (16 * bytes_per_token) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("degree", "options"), [(4, ON_CPU), (2, ON_TWIN)], ids=["four ranks", "captured"])
async def test_nodes_draw_the_bits_of_one_rank_and_end_in_good_order(model, drawn, degree, options):
    with two_nodes(model, degree, options) as nodes:
        ranks = [*children_of(nodes.first.pid), *nodes.ranks_of_head]
        async with attached(f"127.0.0.1:{nodes.port}") as client:
            tokens, logprobs = await drawn_by(client)
        nodes.head.send_signal(signal.SIGTERM)
        if options is ON_CPU:  # as a cluster stops a group, or a machine of it
            nodes.first.send_signal(signal.SIGTERM)
        ends = [process.communicate(timeout=GENEROUS_S)[1] for process in (nodes.first, nodes.head)]
        until_gone(ranks)
    assert tokens == drawn[0]
    if options is ON_CPU:
        assert logprobs == drawn[1]
    assert (len(ranks), ends, nodes.first.returncode, nodes.head.returncode) == (degree - 1, ["", ""], 0, 0)


def end(pid):
    os.kill(pid, signal.SIGKILL)


def freeze(pid):
    os.kill(pid, signal.SIGSTOP)


FAULTS = {
    "a rank killed": (lambda nodes: end(nodes.ranks_of_head[0]), "rank 1 on node 1 was ended by signal 9"),
    "a rank frozen": (lambda _: None, "rank 1 on node 1 (process"),
    "a node's head killed": (lambda nodes: end(nodes.head.pid), "the connection to node 1 has ended"),
    "a node's head frozen": (lambda nodes: freeze(nodes.head.pid), "node 1 stands still"),
}


@pytest.mark.parametrize(
    "fault", ["a rank killed", *(pytest.param(fault, marks=SLOW) for fault in FAULTS if fault != "a rank killed")]
)
async def test_nodes_draw_the_bits_of_one_rank_until_anything_happens_to_one(model, drawn, fault):
    """In a step that waits for a rank of the other node."""
    happen, said = FAULTS[fault]
    with two_nodes(model, 2) as nodes:
        ranks = nodes.ranks_of_head
        async with attached(f"127.0.0.1:{nodes.port}") as client:
            assert await drawn_by(client) == drawn
            freeze(ranks[0])
            await client.step([(0, 1)])
            await asyncio.sleep(0.2)
            happen(nodes)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await client.result()
        log, complaint = nodes.first.communicate(timeout=GENEROUS_S)
        nodes.head.send_signal(signal.SIGCONT)
        nodes.head.communicate(timeout=GENEROUS_S)
        until_gone(ranks)

    assert info_of(failure.value).reason == "STEP_FAILED"
    assert failure.value.details() in complaint
    assert complaint.startswith(f"paceline-executor: error: {said}")
    assert json.loads(log.splitlines()[-1])["reason"] in complaint
    assert nodes.first.returncode == ExitCode.FAILED
    assert nodes.head.returncode != ExitCode.OK  # so that it is started again


@pytest.mark.slow
async def test_no_node_outlives_the_first(model):
    """Not even ranks that stand still, which others wait for."""
    with two_nodes(model, 4) as nodes:
        ranks = [*children_of(nodes.first.pid), *nodes.ranks_of_head]
        freeze(ranks[-1])
        nodes.first.kill()
        _, complaint = nodes.head.communicate(timeout=GENEROUS_S)
        until_gone(ranks)
    assert complaint == "paceline-executor: error: the connection to node 0 has ended, so all ranks end\n"
    assert nodes.head.returncode == ExitCode.FAILED


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "silent"])
async def test_both_nodes_end_where_what_connects_them_does(model, fault):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with FaultProxy("127.0.0.1", port, CHANCE) as proxy:
        with ExitStack() as stack:
            started = two_nodes(model, 2, port=port, joined=proxy.address)
            nodes = await asyncio.to_thread(stack.enter_context, started)
            ranks = nodes.ranks_of_head
            if fault == "silent":
                proxy.become(LinkState(silent=frozenset(Direction)))
            else:
                proxy.cut()
            _, complaint = await asyncio.to_thread(nodes.first.communicate, timeout=GENEROUS_S)
            proxy.cut()
            await asyncio.to_thread(nodes.head.communicate, timeout=GENEROUS_S)
            until_gone(ranks)
    said = {"cut": "the connection to node 1 has ended", "silent": "node 1 stands still"}
    assert complaint == f"paceline-executor: error: {said[fault]}, so all ranks end\n"
    assert (nodes.first.returncode, nodes.head.returncode) == (ExitCode.FAILED, ExitCode.FAILED)


@pytest.mark.slow
async def test_nodes_draw_the_bits_of_one_rank_behind_certificates(model, drawn, tmp_path):
    executor = Authority().mount(tmp_path / "executor", "paceline://executor", "paceline://scheduler")
    with two_nodes(model, 2, (*ON_CPU, "--tls-dir", str(executor))) as nodes:
        files = [(executor / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt")]
        async with attached(f"localhost:{nodes.port}", credentials=grpc.ssl_channel_credentials(*files)) as client:
            assert await drawn_by(client) == drawn

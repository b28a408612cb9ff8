"""An executor that runs the code for GPUs on the CPU: it starts as one on a GPU does, and computes the same."""

import json
import subprocess
import sys
from contextlib import contextmanager

import pytest

from paceline.v1 import plan_pb2
from paceline_executor.runner.cpu import CpuRunner
from paceline_executor.testing.driving import Driver
from paceline_executor.testing.models import RandomCheckpoint, gguf_parts
from paceline_executor.testing.plan_client import attached, grants, request, tokens_by_row

pytest.importorskip("paceline_executor.runner.cuda")

PROMPT, NUM_TOKENS = [5, 6, 7, 80, 81], 6
OPTIONS = ["--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--port", "0", "--health-port", "0"]


@contextmanager
def twin(model):
    """A process that serves the model, and its events up to the one that says so, or why not."""
    command = [sys.executable, "-m", "paceline_executor", "--model", str(model), "--runner", "twin", *OPTIONS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        events = [json.loads(process.stdout.readline())]
        while events[-1]["event"] not in ("ready", "failed"):
            events.append(json.loads(process.stdout.readline()))
        try:
            yield events
        finally:
            process.terminate()


async def test_the_twin_starts_as_a_gpu_does_and_draws_what_the_cpu_draws(tmp_path):
    """In float32, greedy; schedulers are told which steps it has captured."""
    checkpoint = RandomCheckpoint()
    with twin(gguf_parts(checkpoint).write(tmp_path / "tiny.gguf")) as events:
        async with attached(f"127.0.0.1:{events[-1]['port']}") as client:
            placing = plan_pb2.BatchPlan(new_requests=[request(0, PROMPT)], grants=grants([(0, 0, 0)]))
            results = [await client.run([(0, len(PROMPT))], placing)]
            results += [await client.run([(0, 1)]) for _ in range(NUM_TOKENS - 1)]
    driver = Driver(CpuRunner(checkpoint, num_blocks=4, block_size=16, num_threads=1))
    expected = driver.run([driver.add(PROMPT, max_chunk=8)], NUM_TOKENS)[0]

    assert [token for result in results for token in tokens_by_row(result)[0]] == expected
    assert (client.welcome.graphs.num_rows[-1], client.welcome.graphs.num_tokens[-1]) == (2, 64)
    assert [event["event"] for event in events if event["event"] in ("memory", "numerics")] == ["memory", "numerics"]

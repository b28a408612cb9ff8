"""A profile of a device: of a CPU, and on the twin of a GPU torch.profiler's trace and ranges for other tools."""

import asyncio
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from both_sides.chrome_trace import read_trace
from executor_rig.cpu import cpu_runner
from executor_rig.hash_executor import HASH_LIMITS, loaded, serving
from executor_rig.plan_client import attached, grants, request
from paceline.v1 import executor_pb2, executor_pb2_grpc, plan_pb2
from paceline_executor.models.layers import HostWeights
from paceline_executor.models.llama import LlamaModel
from paceline_executor.numerics import FLOAT32_NUMERICS, KvDtype, MatrixKind, Numerics
from paceline_executor.profiling.profiler import StepMark
from paceline_executor.profiling.torch_trace import TorchProfiler
from paceline_executor.runner.device.buckets import buckets_of
from paceline_executor.runner.device.runner import DeviceRunner
from paceline_executor.runner.device.twin import TwinDevice
from paceline_executor.runner.kv_cache import allocate_kv_cache, kv_geometry
from random_models import TINY_CONFIG, RandomCheckpoint, tiny_checkpoint

LIMITS = replace(HASH_LIMITS, num_rows=2, vocab_size=TINY_CONFIG.vocab_size, block_size=16)
PACKED = Numerics(MatrixKind.PACKED, KvDtype.INT8)
PLACING = plan_pb2.BatchPlan(new_requests=[request(0, [5, 6, 7])], grants=grants([(0, i, i) for i in range(4)]))
MARK = StepMark(1, 1, 1, 0, 0, 0, 0, 0)


class Ranges:
    """What a tool that follows ranges sees: names as they begin, their ends."""

    def __init__(self):
        self.seen = []

    def push(self, name):
        self.seen.append(name)

    def pop(self):
        self.seen.append("end")


def gpu_runner(device):
    """With a tiny model, on the twin of a device."""
    geometry = kv_geometry(TINY_CONFIG, LIMITS.num_blocks, LIMITS.block_size, FLOAT32_NUMERICS)
    model = LlamaModel(HostWeights(RandomCheckpoint()), LIMITS.max_model_len)
    cache, buckets = allocate_kv_cache(geometry, FLOAT32_NUMERICS.kv), buckets_of(2, 4)
    return DeviceRunner(device, model, cache, geometry, LIMITS, buckets=buckets)


async def trace_of(runner):
    """Of a prompt and a decode."""
    async with (
        serving(lambda: loaded(runner, LIMITS)) as (_, address),
        attached(address) as client,
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = executor_pb2_grpc.ExecutorServiceStub(channel).Profile(executor_pb2.ProfileRequest(num_steps=2))
        async with asyncio.timeout(120):
            while not runner.profiler.is_on:
                await asyncio.sleep(0.01)
        await client.run([(0, 3)], PLACING)
        for _ in range(2):
            await client.run([(0, 1)])
        return b"".join([part.trace async for part in call])


async def test_a_cpus_compute_thread_has_a_track_with_what_it_computed():
    """Beside that of the step thread, which launches it."""
    checkpoint = tiny_checkpoint(head_dim=32, intermediate_size=96)
    runner = cpu_runner(checkpoint, num_blocks=8, block_size=16, numerics=PACKED)
    events = json.loads(await trace_of(runner))["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    seen = {(tracks[event["tid"]], event["cat"], event["name"]) for event in events if event["ph"] == "X"}
    computed = {(category, name) for track, category, name in seen if track == "compute thread"}

    assert computed >= {("phase", "forward"), ("phase", "draw"), ("kernel", "qkv"), ("kernel", "logits")}
    assert {track for track, category, _ in seen if category == "kernel"} == {"compute thread"}
    assert ("step thread", "phase", "compute") in seen


async def test_a_device_is_profiled_by_torch_and_its_steps_have_ranges(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ranges, device = Ranges(), TwinDevice()
    device.profiler = TorchProfiler(device.profiler._activities, ranges.push, ranges.pop)
    text = await trace_of(gpu_runner(device))
    (head, *_), events = ranges.seen, read_trace(text)
    names = [event.name for event in events]

    assert head == "launch"
    assert sum(name.startswith("ProfilerStep#") for name in names) == 2
    assert {"launch", "apply the plan", "compute", "rules", "forward", "draw", "land", "tell"} <= set(names)
    assert around(events, "forward") >= {"compute", "launch"}
    assert around(events, "rules") >= {"compute", "launch"}
    assert around(events, "wait for the device") >= {"land"}
    assert order(ranges.seen)[:6] == ["launch", "apply the plan", "compute", "rules", "forward", "draw"]
    assert ranges.seen.count("end") == len(order(ranges.seen))
    assert not list(tmp_path.glob("paceline-*"))


def order(seen):
    return [name for name in seen if name != "end"]


def around(events, name):
    """What every event of this name lies within."""
    return set.intersection(*(set(parents(event)) for event in events if event.name == name))


def parents(event):
    while (event := event.parent) is not None:
        yield event.name


def test_what_was_cut_before_a_step_is_an_empty_trace():
    profiler = TorchProfiler(TwinDevice().profiler._activities)
    profiler.start(3)
    profiler.stop()
    assert json.loads(b"".join(iter(profiler.read, None))) == {"traceEvents": []}
    assert profiler.num_steps == 0


def test_what_was_discarded_is_gone_and_it_begins_anew():
    profiler = TorchProfiler(TwinDevice().profiler._activities)
    for _ in range(2):
        profiler.start(1)
        profiler.end_step(MARK)
        profiler.end_step(MARK)
        assert (profiler.is_on, profiler.num_steps) == (False, 1)
        profiler.discard()
        assert profiler.read() is None


@pytest.mark.parametrize(("num_bytes", "num_steps"), [(0, 1), (3_000_000, 1), (1_500_000, 2), (3_000_000, 0)])
def test_rates_are_of_the_recorded_steps_and_of_kernels_that_ran(num_bytes, num_steps):
    kernels = [("nvjet_tst_64x8", 2000.0), *[("write_results_kernel", 3.0)] * num_steps]
    trace = {
        "traceEvents": [{"ph": "X", "cat": "kernel", "name": name, "ts": 5.0, "dur": dur} for name, dur in kernels]
    }

    class Written:
        def export_chrome_trace(self, path):
            Path(path).write_text(json.dumps(trace), encoding="utf-8")

    profiler = TorchProfiler(TwinDevice().profiler._activities)
    profiler.start(1)
    profiler.add_bytes("linear", 77)
    profiler.end_step(MARK)
    profiler.add_bytes("linear", num_bytes)
    profiler.end_step(MARK)
    profiler.discard()
    profiler._keep(Written())
    rates = {"linear": 1.5e9} if num_bytes and num_steps else {}
    assert profiler.rates() == rates
    first = profiler.read()
    assert profiler.rates() == rates
    assert json.loads(first + b"".join(iter(profiler.read, None))) == trace

"""A profile as its callers get it: a Chrome trace of so many steps, one at a time, and an end whatever happens."""

import asyncio
import threading
from contextlib import asynccontextmanager

import grpc
import pytest

from both_sides.chrome_trace import NoTraceError, check_steps, read_trace, steps_of
from executor_rig.hash_executor import hash_executor
from executor_rig.plan_client import attached, grants, info_of, request
from paceline.v1 import executor_pb2, executor_pb2_grpc, plan_pb2
from paceline_executor.errors import ProfileRunningError
from paceline_executor.link.metrics import PROFILED_RATE
from paceline_executor.link.profiles import Profiles
from paceline_executor.profiling import host_trace

SECRET = 977  # a token of the prompt
PLACING = plan_pb2.BatchPlan(new_requests=[request(0, [SECRET] * 3)], grants=grants([(0, i, i) for i in range(8)]))


@pytest.fixture
async def executor(seen_or_hidden):
    """One that computes in its launches, and one with several steps in flight."""
    if seen_or_hidden == "twin":
        pytest.skip("its traces are torch's own: profiling/test_device_trace.py has them")
    async with hash_executor() as executor:
        yield executor


@asynccontextmanager
async def recording(executor, num_steps):
    """A profile whose first part has come, so that it records."""
    async with grpc.aio.insecure_channel(executor.address) as channel:
        call = executor_pb2_grpc.ExecutorServiceStub(channel).Profile(executor_pb2.ProfileRequest(num_steps=num_steps))
        parts = aiter(call)
        try:
            yield parts, (await anext(parts)).trace
        finally:
            call.cancel()


async def rest_of(parts):
    return b"".join([part.trace async for part in parts])


def profiles_of(executor):
    return executor.service._servicer._profiles


async def decode(client, num_steps):
    """Place the row, then let it decode."""
    await client.run([(0, 3)], PLACING)
    for _ in range(num_steps - 1):
        await client.run([(0, 1)])


async def test_a_profile_is_a_trace_of_the_next_steps(executor):
    async with attached(executor.address) as client, recording(executor, 3) as (parts, first):
        await decode(client, 5)
        text = first + await rest_of(parts)
    events = read_trace(text)
    check_steps(events)
    steps, names = steps_of(events), {event.name for event in events}

    assert [(step.name, step.args["step_id"], step.args["rows"]) for step in steps] == [
        (f"step {number}", number, 1) for number in (1, 2, 3)
    ]
    assert [step.args["tokens"] for step in steps] == [3, 1, 1]
    assert names >= {"launch", "apply the plan", "compute", "land", "advance rows", "tell", "wait for a plan"}
    assert {event.parent.name for event in events if event.name == "apply the plan"} == {"launch"}
    # Times may have the token's digits by chance.
    assert not any(str(SECRET) in name for name in names)
    assert {key for event in events for key in event.args} == {
        *("step_id", "rows", "tokens", "predicted_us", "plan_waited_us")
    }


async def test_a_profile_ends_with_the_steps_that_ran(executor):
    profiles_of(executor)._max_profile_s = 1.0
    async with attached(executor.address) as client, recording(executor, 50) as (parts, first):
        await decode(client, 2)
        events = read_trace(first + await rest_of(parts))
    assert len(steps_of(events)) == 2


async def test_what_kernels_reached_is_a_metric_after_a_profile(executor):
    """Of each kind over all steps: 9,000 bytes in 3 us."""
    profiler = executor.runner.profiler
    async with attached(executor.address) as client, recording(executor, 1) as (parts, _):
        profiler.add_kernel("qkv", 0, 1000, 2000, 4000)
        profiler.add_kernel("qkv", 1, 2000, 4000, 5000)
        profiler.add_kernel("norm", 0, 4000, 5000, 0)
        await client.run([(0, 3)], PLACING)
        await rest_of(parts)
    rates = next(one.values for one in executor.service.metrics.read() if one.definition == PROFILED_RATE)
    assert rates == {("qkv",): pytest.approx(3e9)}


async def test_a_profile_without_steps_says_what_to_do(executor):
    """UNAVAILABLE: nothing ran."""
    profiles_of(executor)._max_profile_s = 0.2
    async with recording(executor, 5) as (parts, _):
        with pytest.raises(grpc.aio.AioRpcError, match="send requests") as failure:
            await rest_of(parts)
    assert (failure.value.code(), info_of(failure.value).reason) == (grpc.StatusCode.UNAVAILABLE, "NO_STEPS")


async def test_one_profile_is_recorded_at_a_time_and_leaving_it_ends_it(executor):
    """The second is refused by name. After the first was left another one begins, and has its own steps only."""
    async with attached(executor.address) as client:
        async with recording(executor, 50):
            with pytest.raises(grpc.aio.AioRpcError, match="another profile") as failure:
                async with recording(executor, 1):
                    pass
            await client.run([(0, 3)], PLACING)
        async with asyncio.timeout(60):
            while profiles_of(executor)._is_recording:
                await asyncio.sleep(0.01)
        async with recording(executor, 1) as (parts, first):
            await client.run([(0, 1)])
            events = read_trace(first + await rest_of(parts))
    code, reason = failure.value.code(), info_of(failure.value).reason
    assert (code, reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "PROFILE_RUNNING")
    assert [step.args["step_id"] for step in steps_of(events)] == [2]


class SlowToPrepare:
    """A profiler that is prepared once it is let, and the step loop that owns it."""

    def __init__(self):
        self.is_on, self.num_steps, self.calls = False, 1, []
        self._may_end = threading.Event()

    async def ask_profiler(self, question):
        return question(self)

    def let(self):
        self._may_end.set()

    def prepare(self):
        self.calls.append("begins")
        self._may_end.wait(60)
        self.calls.append("is prepared")

    def start(self, num_steps):
        self.calls.append("starts")

    def stop(self):
        self.calls.append("stops")

    def discard(self):
        """Nothing is kept."""

    def rates(self):
        return {}

    def read(self):
        return None


async def test_a_profile_that_is_left_while_it_is_prepared_ends_behind_that():
    """What prepares is a thread, which cannot be cancelled: another one beside it would crash the process."""
    profiles, slow = Profiles(lambda _: None), SlowToPrepare()
    left = asyncio.create_task(anext(profiles.record(slow, 1), None))
    async with asyncio.timeout(60):
        while not slow.calls:
            await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.wait({left})
        with pytest.raises(ProfileRunningError):
            await anext(profiles.record(slow, 1))
        assert slow.calls == ["begins"]
        slow.let()
        while profiles._is_recording:
            await asyncio.sleep(0.01)
    assert await anext(profiles.record(slow, 1), None) is None
    assert slow.calls[:4] == ["begins", "is prepared", "stops", "begins"]


@pytest.mark.parametrize("num_steps", [0, 1001, 2**32 - 1])
async def test_a_number_of_steps_out_of_range_names_the_field(executor, num_steps):
    with pytest.raises(grpc.aio.AioRpcError, match="num_steps") as failure:
        async with recording(executor, num_steps):
            pass
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_is_kept_is_bounded(executor, monkeypatch):
    """It ends as soon as it is full, and the parts are at most 1 MiB."""
    monkeypatch.setattr(host_trace, "_MAX_EVENTS", 1)
    async with attached(executor.address) as client, recording(executor, 50) as (parts, first):
        await client.run([(0, 3)], PLACING)
        events = read_trace(first + await rest_of(parts))
    assert len(steps_of(events)) == 1


def test_a_long_trace_comes_in_parts():
    """None above 1 MiB, together the whole."""
    profiler = host_trace.HostProfiler(lambda: 0)
    profiler.start(1)
    for start in range(20_000):
        profiler.add("x" * 60, start, start + 1)
    profiler.stop()
    parts = list(iter(profiler.read, None))
    assert len(parts) > 1
    assert max(map(len, parts)) <= 2**20
    assert len(read_trace(b"".join(parts))) == 20_000


@pytest.mark.parametrize(
    "spoilt",
    [
        b'{"traceEvents":[{"ph":"?","name":"a"}]}',
        b'{"traceEvents":[{"ph":"X","name":"a","ts":1,"pid":1,"tid":1}]}',
        b'{"traceEvents":[{"ph":"X","name":"a","ts":1,"dur":-1,"pid":1,"tid":1}]}',
        b'{"traceEvents":[{"ph":"X","name":"a","ts":1,"dur":1,"pid":1,"tid":null}]}',
        b'{"traceEvents":[{"ph":"X","name":"a","ts":1,"dur":5,"pid":1,"tid":1},'
        b'{"ph":"X","name":"b","ts":3,"dur":5,"pid":1,"tid":1}]}',
    ],
)
def test_the_checker_notices_what_the_format_forbids(spoilt):
    with pytest.raises(NoTraceError):
        read_trace(spoilt)

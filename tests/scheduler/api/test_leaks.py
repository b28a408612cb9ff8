"""However a client's stream ends, nothing of it stays: in the edge, in the core, on the executor, in gRPC."""

import asyncio
import gc
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from client_loads.stream_ends import leave_often, ways
from edge_rig.edge_server import wait_until
from executor_rig.hash_executor import simulated_executor
from paceline_scheduler.core.events import Acknowledge
from scheduler_rig.whole_scheduler import serve_scheduler
from service_processes.measured import event, module_process, scheduler_of

NUM_STREAMS_PER_WAY = 12
NUM_STREAMS = NUM_STREAMS_PER_WAY * len(ways())
NUM_STREAMS_SOAK, NUM_ROUNDS_SOAK = 2000, 5
MAX_GROWTH_KIB = 2048  # of a process, over all of them: less than 0.3 KiB a stream, where one object would be more
SETTLE_S = 30.0


def objects_of_ours():
    """How many objects of each of the scheduler's types there are."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("paceline_scheduler"))


def tasks():
    """How many tasks run each coroutine."""
    return Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())


def num_files(process_id="self"):
    """How many file descriptors a process has open."""
    return len(list(Path(f"/proc/{process_id}/fd").iterdir()))


def memory_kib(process_id="self"):
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


async def test_streams_that_end_in_every_way_leave_nothing_behind(capsys):
    async with (
        simulated_executor(step_ms=0.5) as executor,
        serve_scheduler(executor.address) as scheduler,
    ):
        table = executor.table

        def nothing_is_open():
            (status,) = scheduler.executors.statuses()
            is_free = status.num_free_blocks + status.num_cached_blocks == status.num_total_blocks
            requests = scheduler.edge.requests
            return is_free and not (requests.calls() or requests.running or table.num_rows_in_use)

        async def leave(num_streams):
            keys = await leave_often(scheduler.address, num_streams)
            await wait_until(nothing_is_open, SETTLE_S)
            scheduler.runtime.feed(Acknowledge(keys))  # else records of their ends would be kept for a minute
            await wait_until(lambda: not table.states(), SETTLE_S)

        await leave(len(ways()))
        before_tasks, before_objects, before_files = tasks(), objects_of_ours(), num_files()
        before_kib = memory_kib()
        await leave(NUM_STREAMS)
        await wait_until(lambda: tasks() == before_tasks, SETTLE_S)
        assert len(scheduler.edge.requests) == 0
        # A frame that waits holds the last message it had. What one way to end leaves behind each time would be more.
        more = objects_of_ours() - before_objects
        assert max(more.values(), default=0) < NUM_STREAMS_PER_WAY, more
        assert num_files() <= before_files
        with capsys.disabled():
            print(f"\n{NUM_STREAMS} streams: {memory_kib() - before_kib} KiB more in memory")


@pytest.mark.soak
async def test_ten_thousand_streams_leave_processes_as_they_were(capsys):
    """Descriptors, threads and memory of scheduler and executor after 10,000 are what they were after 2,000."""
    async with AsyncExitStack() as stack:
        options = ("--runner", "simulated", "--port", "0", "--health-port", "0", "--metrics-port", "0")
        executor = await stack.enter_async_context(module_process("paceline_executor", *options))
        address = f"127.0.0.1:{(await event(executor, 'ready'))['port']}"
        scheduler, ready = await stack.enter_async_context(scheduler_of(address))
        clients = f"127.0.0.1:{ready['port']}"
        processes = {"scheduler": scheduler.pid, "executor": executor.pid, "client": "self"}

        figures = []
        for _ in range(NUM_ROUNDS_SOAK):  # of the same ids, so that records of ends, kept for a minute, do not add up
            await leave_often(clients, NUM_STREAMS_SOAK)
            await asyncio.sleep(2)
            figures.append({name: (num_files(number), memory_kib(number)) for name, number in processes.items()})
        before, after = figures[0], figures[-1]
        with capsys.disabled():
            print(f"\n(files, KiB) before {before}, after {after}")
        for name in processes:
            assert after[name][0] <= before[name][0] + 1, f"files of the {name}: a poller of gRPC's may come and go"
            assert after[name][1] - before[name][1] < MAX_GROWTH_KIB, f"memory of the {name}"

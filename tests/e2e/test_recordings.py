"""A scheduler process records itself; the command repeats and explains it in another process."""

import asyncio

import grpc

from paceline.v1.admin_pb2 import SetPlanRecordingRequest
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from paceline_client import AsyncClient, Sampling, Stopping
from repository_checks.programs import run
from service_processes.measured import scheduler_of, simulated_executor

NUM_REQUESTS = 40


async def ask(target, first):
    """Send requests that share a prompt's beginning, and wait for all."""
    async with AsyncClient(target) as client:
        await asyncio.gather(
            *(
                client.generate(
                    token_ids=[1, 2, 3] * 12 + [number],
                    sampling=Sampling(seed=number),
                    stopping=Stopping(max_tokens=12),
                    request_id=f"asked-{first + number}",
                )
                for number in range(NUM_REQUESTS)
            )
        )


async def written(folder, num_files):
    """Wait until so many files are there and nothing more is written: that is done within a fifth of a second."""
    before, sizes = {}, {}
    async with asyncio.timeout(60):
        while len(sizes) < num_files or sizes != before:
            await asyncio.sleep(1.0)
            before, sizes = sizes, {file: file.stat().st_size for file in folder.iterdir()}
    return sorted(sizes)


async def test_what_a_process_recorded_is_repeated_by_another(tmp_path):
    folder = tmp_path / "recordings"
    async with (
        simulated_executor(step_ms=1.0) as address,
        scheduler_of(address, "--record-dir", f"raw:{folder}") as (_, ready),
    ):
        target = f"127.0.0.1:{ready['port']}"
        await ask(target, 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ready['admin_port']}") as channel:
            admin = AdminServiceStub(channel)
            await admin.SetPlanRecording(SetPlanRecordingRequest(name="asked"))
            await ask(target, 100)
            await admin.SetPlanRecording(SetPlanRecordingRequest())
        files = await written(folder, 2)
    assert [file.name.split("-")[0] for file in files] == ["asked", "start"]
    for file, form in zip(files, ("stand_ins", "raw"), strict=True):
        done = await asyncio.to_thread(run, "paceline", "replay", str(file))
        assert done.returncode == 0, done.stdout
        assert form in done.stdout
        assert "every plan was reproduced" in done.stdout
    told = await asyncio.to_thread(run, "paceline", "explain", str(files[0]), "asked-107")
    assert told.returncode == 0, told.stdout
    assert "placed on row" in told.stdout
    assert "ended: LENGTH after 12 tokens" in told.stdout

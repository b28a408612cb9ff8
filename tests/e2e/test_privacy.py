"""What is written for operators holds no prompt and no output: logs, recordings, profiles, metrics and lists."""

import asyncio
import json
import struct
import urllib.request

import grpc
import pytest

from paceline.v1.admin_pb2 import ListExecutorsRequest, ListRequestsRequest, SetPlanRecordingRequest
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from paceline.v1.executor_pb2 import GetStateRequest, ProfileRequest
from paceline.v1.executor_pb2_grpc import ExecutorServiceStub
from paceline_client import AsyncClient, InvalidRequestError, Message, Sampling, Stopping
from service_processes.measured import event, module_process

MARK = "Zq7!kW9#vX3-pL5"
NUM_OUTPUT, NUM_SEEN = 60, 12
PORTS = ("--port", "0", "--health-port", "0", "--metrics-port", "0", "--log-level", "debug")


def spellings(text):
    """A text as it may stand somewhere, also as its tokens, which are its bytes here."""
    numbers = text.encode()
    yield text.encode()
    yield json.dumps(text)[1:-1].encode()
    yield repr(text)[1:-1].encode()
    for kind in "iq":
        yield struct.pack(f"<{len(numbers)}{kind}", *numbers)
    for between in (", ", ",", " "):
        yield between.join(map(str, numbers)).encode()


async def ask(client, number):
    """Send the mark in a text, a chat and a stop text; return the output."""
    prompt = {"prompt": f"Say {MARK}"} if number % 2 else {"messages": [Message("user", f"{MARK}<|im_end|>")]}
    stopping = Stopping(max_tokens=NUM_OUTPUT, stop=[f"{MARK}{number}"])
    return (await client.generate(**prompt, stopping=stopping, sampling=Sampling(seed=number))).text


async def keep_asking(client, number, is_over):
    """One request after the other; return all outputs."""
    outputs = []
    while not is_over.is_set():
        outputs.append(await ask(client, number))
    return outputs


async def running(admin):
    """A list of requests, when there are some."""
    async with asyncio.timeout(60):
        while not (listed := await admin.ListRequests(ListRequestsRequest())).requests:
            await asyncio.sleep(0.01)
    return listed


async def profile(stub):
    return b"".join([part.trace async for part in stub.Profile(ProfileRequest(num_steps=20))])


async def metrics(port):
    url = f"http://127.0.0.1:{port}/metrics"
    return await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=60).read())


async def said(process):
    """All that a process has logged since it was ready, to its end."""
    process.terminate()
    text, _ = await process.communicate()
    assert process.returncode == 0
    return text


@pytest.fixture
def step_times(tmp_path):
    """Steps of 5 ms, so that requests are seen while they run."""
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"points": [{"num_tokens": 1, "duration_us": 5000}]}))
    return path


async def test_prompts_and_outputs_stand_nowhere_but_where_somebody_asked_for_them(step_times, tmp_path):
    """In the raw recording, that is, which shows that they would be found."""
    folder, written = tmp_path / "recordings", {}
    logging = ("--log-requests", "1", "--log-statistics", "0.2", "--record-dir", str(folder), "--admin-port", "0")
    async with module_process("paceline_executor", *PORTS, "--runner", f"simulated:{step_times}") as executor:
        at = await event(executor, "ready")
        address = f"127.0.0.1:{at['port']}"
        async with (
            module_process("paceline_scheduler", *PORTS, *logging, "--executors", address) as scheduler,
            grpc.aio.insecure_channel(address) as of_executor,
        ):
            ready = await event(scheduler, "ready")
            async with (
                grpc.aio.insecure_channel(f"127.0.0.1:{ready['admin_port']}") as channel,
                AsyncClient(f"127.0.0.1:{ready['port']}") as client,
            ):
                admin, looking = AdminServiceStub(channel), ExecutorServiceStub(of_executor)
                is_over = asyncio.Event()
                asking = [asyncio.create_task(keep_asking(client, number, is_over)) for number in range(6)]
                written["profile"] = await profile(looking)
                for name, call in (
                    ("requests", running(admin)),
                    ("executors", admin.ListExecutors(ListExecutorsRequest())),
                    ("rows", looking.GetState(GetStateRequest(include_records=True))),
                ):
                    written[name] = (await call).SerializeToString()
                is_over.set()
                outputs = [output for each in await asyncio.gather(*asking) for output in each]
                with pytest.raises(InvalidRequestError):
                    await client.generate(MARK, sampling=Sampling(temperature=-1))
                await admin.SetPlanRecording(SetPlanRecordingRequest(name="raw", raw=True))
                outputs.append(await ask(client, 1))
                for name, port in (("scheduler", ready["metrics_port"]), ("executor", at["metrics_port"])):
                    written[f"metrics of the {name}"] = await metrics(port)
            written["scheduler's log"] = await said(scheduler)
        written["executor's log"] = await said(executor)
    written |= {path.name: path.read_bytes() for path in folder.iterdir()}

    assert b"request_finished" in written["scheduler's log"]
    assert all(written.values())
    secrets = [MARK, *(output[:NUM_SEEN] for output in outputs)]
    assert min(map(len, secrets)) >= NUM_SEEN
    found = {
        name.partition("-")[0]
        for name, data in written.items()
        if any(spelt in data for secret in secrets for spelt in spellings(secret))
    }
    assert found == {"raw"}

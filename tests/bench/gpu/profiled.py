"""Whether a profile shows what a device did: its steps, the kernels in them, and how fast these read memory.

Knows a trace as torch.profiler writes it. Apart from the stage, which has the processes.
"""

import asyncio
import json
from collections import Counter
from pathlib import Path

from gpu.errors import CheckFailedError
from gpu.system import START_S, System
from gpu.system_cells import patient_client
from paceline_cli.wire_profile import trace_parts
from paceline_client.credentials import Credentials
from paceline_executor.profiling.bandwidth import ATTENTION, LINEAR, kind_of, num_traced_steps

_NUM_STEPS = 12
_NUM_STREAMS = 4
_NUM_TOKENS = 64  # more steps than are recorded


def shows_kernels(system: System, file: Path, *, is_cuda: bool) -> str:
    """Record steps of streams that go on; the trace stays in the file. Raises CheckFailedError."""
    asyncio.run(_recorded(system, file))
    events = json.loads(file.read_bytes())["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")}
    if len(steps) != _NUM_STEPS:
        raise CheckFailedError(f"the trace has {len(steps)} steps, not {_NUM_STEPS}")
    kernels = [event for event in events if event.get("cat") == "kernel"]
    kinds, num_traced = Counter(kind_of(event["name"]) for event in kernels), num_traced_steps(kernels)
    if is_cuda and (abs(num_traced - _NUM_STEPS) > 1 or any(kinds[kind] < num_traced for kind in (LINEAR, ATTENTION))):
        raise CheckFailedError(f"the trace has {num_traced} steps' kernels, of the known kinds {dict(kinds)}")
    of_kinds = f"{kinds[LINEAR]} of products, {kinds[ATTENTION]} of attention"
    return f"{len(steps)} steps, the {len(kernels)} kernels of {num_traced}, {of_kinds}"


async def _recorded(system: System, file: Path) -> None:
    async with patient_client(system.target) as client:
        await client.wait_until_ready(START_S)

        async def generate(number: int) -> int:
            stopping = {"max_tokens": _NUM_TOKENS, "ignore_eos": True}
            result = await client.generate(token_ids=[5, 6, 7 + number], stopping=stopping)
            return len(result.completions[0].token_ids)

        address = f"127.0.0.1:{system.ports.executors[0].api}"
        recording = asyncio.create_task(_write(address, file))
        while not recording.done():  # the first steps may be over before it begins
            counts = await asyncio.gather(*map(generate, range(_NUM_STREAMS)))
            if set(counts) != {_NUM_TOKENS}:
                raise CheckFailedError(f"streams ended with {counts} tokens, not with {_NUM_TOKENS} each")
        await recording


async def _write(address: str, file: Path) -> None:
    with file.open("wb") as stream:
        async for part in trace_parts(address, _NUM_STEPS, Credentials(None, None)):
            stream.write(part)

"""A client process that is there to be killed: `python -m paceline_cli.chaos.victim TARGET MODEL`.

Starts a few long streams, prints `{"event": "ready"}` once each has delivered something, and reads on.
"""

import asyncio
import json
import sys

from paceline_client.async_client import AsyncClient
from paceline_client.requests import Sampling, Stopping

NUM_STREAMS = 4
_MAX_TOKENS = 96


async def stream(target: str, model: str) -> None:
    begun = asyncio.Barrier(NUM_STREAMS + 1)

    async def read(number: int) -> None:
        request = client.stream(
            f"A letter to number {number}:",
            model=model,
            sampling=Sampling(temperature=0.8, seed=number),
            stopping=Stopping(max_tokens=_MAX_TOKENS, ignore_eos=True),
        )
        async with request:
            await anext(request)
            await begun.wait()
            await request.collect()

    async with AsyncClient(target) as client, asyncio.TaskGroup() as group:
        for number in range(NUM_STREAMS):
            group.create_task(read(number))
        await begun.wait()
        print(json.dumps({"event": "ready"}), flush=True)


if __name__ == "__main__":
    asyncio.run(stream(*sys.argv[1:]))

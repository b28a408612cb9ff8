"""A polite tenant beside three that flood: `python -m scheduler_cost.polite_tenant [HOST:PORT]`, against `paceline up`.

Prints what of its requests was served, and how long they waited for their first token: alone, then beside 150 requests
in flight of the others. Whoever is refused waits as told.
"""

import argparse
import asyncio
import random
import statistics
from dataclasses import dataclass, field

from paceline_client import AsyncClient, OverloadedError

_FLOODS = ("flood-a", "flood-b", "flood-c")
_IN_FLIGHT = 50  # of each
_POLITE_IN_FLIGHT = 4
_SECONDS = 20.0


@dataclass
class Seen:
    first_token_s: list[float] = field(default_factory=list)
    num_refused: int = 0

    def __str__(self) -> str:
        median_ms = 1e3 * statistics.median(self.first_token_s)
        num_served = len(self.first_token_s)
        return f"{num_served} of {num_served + self.num_refused} served, first token after {median_ms:.0f} ms (median)"


async def keep_asking(client: AsyncClient, tenant: str, num_prompt: int, num_output: int, seen: Seen) -> None:
    """One request after the other, of random tokens."""
    chance = random.Random(tenant)  # noqa: S311
    while True:
        prompt = [chance.randrange(5, 250) for _ in range(num_prompt)]
        stopping = {"max_tokens": num_output, "ignore_eos": True}
        try:
            result = await client.generate(token_ids=prompt, stopping=stopping, tenant=tenant)
        except OverloadedError as refusal:
            seen.num_refused += 1
            await asyncio.sleep(refusal.retry_after or 1.0)
        else:
            times = result.completions[0].times
            if times is not None:
                seen.first_token_s.append(times.queued + times.prefill)


async def polite(client: AsyncClient) -> Seen:
    """Ask for a while."""
    seen = Seen()
    asking = [asyncio.ensure_future(keep_asking(client, "polite", 24, 24, seen)) for _ in range(_POLITE_IN_FLIGHT)]
    await asyncio.wait(asking, timeout=_SECONDS)
    for each in asking:
        each.cancel()
    return seen


async def measure(target: str) -> None:
    """Print both and their ratio."""
    async with AsyncClient(target) as client:
        await polite(client)  # warms up
        alone = await polite(client)
        print("alone:", alone)
        floods = [asyncio.ensure_future(keep_asking(client, tenant, 60, 64, Seen())) for tenant in _FLOODS * _IN_FLIGHT]
        await asyncio.wait(floods, timeout=_SECONDS / 2)  # until the rows are taken
        beside = await polite(client)
        print("beside the floods:", beside)
        ratio = statistics.median(beside.first_token_s) / statistics.median(alone.first_token_s)
        print(f"first token: {ratio:.1f} times as late")
        for each in floods:
            each.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure what a flood by others costs a polite tenant.")
    parser.add_argument("target", nargs="?", default="127.0.0.1:50051", help="a scheduler (default 127.0.0.1:50051)")
    asyncio.run(measure(parser.parse_args().target))

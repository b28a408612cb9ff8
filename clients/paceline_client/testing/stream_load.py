"""A client process that only streams: `python -m paceline_client.testing.stream_load TARGET --num-streams 32`.

Keeps that many requests running, reads their output as it comes, and prints now and then what that took, as JSON lines:
the tokens and deltas read since the start, and the CPU time of this process. For programs that measure what streaming
costs. Knows two ways to ask: the client's session, and one Generate call per request.
"""

import argparse
import asyncio
import itertools
import json
import time
from dataclasses import asdict, dataclass

import grpc.aio

from paceline.v1 import inference_pb2 as pb
from paceline.v1 import sampling_pb2 as sampling_pb
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline_client import AsyncClient, Sampling, Stopping

_PROMPT_TOKENS = 8
_REPORT_SECONDS = 0.25


@dataclass(slots=True)
class LoadProgress:
    """What was read since the start; `cpu_ns` is this process's CPU time in nanoseconds, all threads."""

    num_tokens: int = 0
    num_deltas: int = 0
    cpu_ns: int = 0

    def add(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.num_deltas += 1


async def stream_in_session(client: AsyncClient, number: int, max_tokens: int, progress: LoadProgress) -> None:
    stopping = Stopping(max_tokens=max_tokens, ignore_eos=True)
    stream = client.stream(token_ids=_prompt(number), sampling=Sampling(temperature=0.0), stopping=stopping)
    async for delta in stream:
        progress.add(len(delta.token_ids))


async def stream_in_call(channel: grpc.aio.Channel, number: int, max_tokens: int, progress: LoadProgress) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=_prompt(number)),
        sampling=sampling_pb.SamplingParams(temperature=0.0),
        stopping=sampling_pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )
    async for response in InferenceServiceStub(channel).Generate(request):
        progress.add(len(response.delta.token_ids))


def main() -> None:
    """Stream until killed."""
    parser = argparse.ArgumentParser(description="Keep requests streaming and print what reading them takes.")
    parser.add_argument("target", help="host:port of a scheduler")
    parser.add_argument("--num-streams", type=int, default=1, help="requests running at once (default 1)")
    parser.add_argument("--max-tokens", type=int, default=2000, help="output tokens of each request (default 2000)")
    parser.add_argument("--call", choices=("session", "generate"), default="session", help="how to ask")
    options = parser.parse_args()
    asyncio.run(_stream(options.target, options.num_streams, options.max_tokens, options.call))


async def _stream(target: str, num_streams: int, max_tokens: int, call: str) -> None:
    progress, numbers = LoadProgress(), itertools.count()
    async with (
        AsyncClient(target) as client,
        grpc.aio.insecure_channel(target) as channel,
        asyncio.TaskGroup() as group,
    ):

        async def keep_running() -> None:
            while True:
                if call == "session":
                    await stream_in_session(client, next(numbers), max_tokens, progress)
                else:
                    await stream_in_call(channel, next(numbers), max_tokens, progress)

        for _ in range(num_streams):
            group.create_task(keep_running())
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            progress.cpu_ns = time.process_time_ns()
            print(json.dumps(asdict(progress)), flush=True)


def _prompt(number: int) -> list[int]:
    """Token ids that no other request has."""
    return [97 + number // 26**digit % 26 for digit in range(_PROMPT_TOKENS)]


if __name__ == "__main__":
    main()

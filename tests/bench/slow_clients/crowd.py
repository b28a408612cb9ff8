"""Many clients with a connection each that read everything, now and then, or nothing: `python -m slow_clients.crowd`.

Prints a line when every one of them has got its first output, and runs until it is killed.
"""

import argparse
import asyncio
import enum
from contextlib import AsyncExitStack

import grpc
import grpc.aio

from paceline.v1 import inference_pb2 as pb
from paceline.v1 import sampling_pb2 as sampling_pb
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline_scheduler.testing.edge_server import SLOW_CHANNEL

_PROMPT_TOKENS = 8
_NUM_TOP = 20  # log-probabilities, which make output large enough to fill what waits
_MAX_TOKENS = 1900


class Reading(enum.StrEnum):
    """How a client reads."""

    ALL = "all"
    ONE_PER_SECOND = "one-per-second"
    NOTHING = "nothing"


async def main() -> None:
    """Run the crowd."""
    parser = argparse.ArgumentParser(prog="python -m slow_clients.crowd", description="Many clients, slow or not.")
    parser.add_argument("target", help="host:port of a scheduler")
    parser.add_argument("--num-clients", type=int, default=100, help="default 100")
    parser.add_argument("--reading", type=Reading, choices=tuple(Reading), default=Reading.NOTHING)
    options = parser.parse_args()
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        clients = []
        for number in range(options.num_clients):
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(options.target, options=SLOW_CHANNEL))
            clients.append(_Client(channel, number, options.reading))
        await asyncio.gather(*(client.begin() for client in clients))
        print("all have begun", flush=True)
        for client in clients:
            group.create_task(client.go_on())
            await asyncio.sleep(1 / len(clients))  # those who read a message per second read at different times
        await asyncio.Event().wait()


class _Client:
    """One request after another, each read to its end if that comes."""

    def __init__(self, channel: grpc.aio.Channel, number: int, reading: Reading) -> None:
        self._stub = InferenceServiceStub(channel)
        self._prompt = [number % 256] * _PROMPT_TOKENS
        self._reading = reading

    async def begin(self) -> None:
        """Return when the first output is there."""
        self._call = self._stub.Generate(self._request())
        await self._call.read()

    async def go_on(self) -> None:
        """Read on, as this client reads; what was cut begins anew."""
        while self._reading is not Reading.NOTHING:
            try:
                await self._read_to_the_end()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
            await self.begin()

    async def _read_to_the_end(self) -> None:
        while await self._call.read() is not grpc.aio.EOF:
            if self._reading is Reading.ONE_PER_SECOND:
                await asyncio.sleep(1)

    def _request(self) -> pb.GenerateRequest:
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=self._prompt),
            sampling=sampling_pb.SamplingParams(temperature=0.0),
            stopping=sampling_pb.StoppingParams(max_tokens=_MAX_TOKENS, ignore_eos=True),
            output=sampling_pb.OutputOptions(logprobs=_NUM_TOP),
        )


if __name__ == "__main__":
    asyncio.run(main())

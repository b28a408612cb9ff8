"""A rogue beside honest processes: `python -m scheduler_cost.rogue PORT HONEST`.

It is an executor at PORT that says of itself, and sends, what is chosen by chance; and a scheduler that greets the
honest executor at HONEST a hundred times a second, by any term, with plans that are none. Runs until it is killed.
Apart from who measures, so that lying costs a process of its own.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import grpc
import grpc.aio

from paceline.v1 import executor_pb2, plan_pb2

_SERVICE = "paceline.v1.ExecutorService"
_TERMS = (0, 1, 2**20, 2**39, 2**47, 2**48, 2**62)
_PAUSE_S = 0.01
_CALL_S = 0.3
_random = Random(1)  # noqa: S311 - nothing secret


async def _get_info(request: bytes, context: object) -> bytes:
    del request, context
    info = executor_pb2.GetInfoResponse(incarnation=_random.getrandbits(62) | 1, term=_random.choice(_TERMS))
    return info.SerializeToString()


async def _attach(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
    del context
    await anext(requests)
    for _ in range(50):
        waiting = plan_pb2.WaitingInLine(holder_scheduler_id="nobody", holder_term=_random.getrandbits(40))
        yield _random.choice((plan_pb2.AttachResponse(waiting=waiting).SerializeToString(), _random.randbytes(20)))
        await asyncio.sleep(_PAUSE_S / 5)


async def _greetings() -> AsyncIterator[bytes]:
    hello = plan_pb2.Hello(scheduler_id="rogue", term=_random.choice(_TERMS), min_protocol=1, max_protocol=2)
    yield plan_pb2.AttachRequest(hello=hello).SerializeToString()
    for _ in range(20):
        plan = plan_pb2.BatchPlan(step_id=_random.getrandbits(40), rows=_random.randbytes(8))
        yield plan_pb2.AttachRequest(plan=plan).SerializeToString()


async def _greet_for_ever(honest: str) -> None:
    while True:
        async with grpc.aio.insecure_channel(honest) as channel:
            attach: Any = channel.stream_stream(f"/{_SERVICE}/Attach")
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                async with asyncio.timeout(_CALL_S):
                    async for _ in attach(_greetings()):
                        pass
        await asyncio.sleep(_PAUSE_S)


async def main(port: str, honest: str) -> None:
    """Never returns."""
    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "GetInfo": grpc.unary_unary_rpc_method_handler(_get_info),
        "Attach": grpc.stream_stream_rpc_method_handler(_attach),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(json.dumps({"event": "ready"}), flush=True)
    await _greet_for_ever(honest)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

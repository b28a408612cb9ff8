"""Takes OTLP traces and throws them away: `python -m scheduler_cost.receiver` prints its port as a JSON line.

Apart from who measures, so that receiving costs a process of its own.
"""

import asyncio
import json

import grpc
import grpc.aio

_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


async def _serve() -> None:
    async def export(request: bytes, context: object) -> bytes:
        del request, context
        return b""

    server = grpc.aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"event": "ready", "port": port}), flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve())

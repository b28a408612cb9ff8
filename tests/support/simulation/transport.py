"""Calls over the simulated network as gRPC gives them, and the link's transport that consists of such calls."""

import asyncio
from typing import cast

import grpc
import grpc.aio

from paceline.plan.codec.tokenizers import TokenizerParts
from paceline.plan.values import ExecutorInfo
from paceline.process.statuses import ErrorStatus, trailing_metadata
from paceline_scheduler.errors import StreamEndedError, UnreachableError
from paceline_scheduler.link import wire
from paceline_scheduler.link.transport_grpc import GrpcPlanCall
from simulation.executors import ATTACH, GET_INFO, GET_TOKENIZER
from simulation.loop import Node
from simulation.network import Call, CallEndedError, End, Network


class SimulatedTransport:
    """Connections of one scheduler process."""

    def __init__(self, network: Network, node: Node) -> None:
        self._network = network
        self._node = node

    def connect(self, address: str) -> "SimulatedConnection":
        """Return a connection; it dials when it is used."""
        return SimulatedConnection(self._network, self._node, address.partition(":")[0])


class SimulatedConnection:
    """A connection to one executor."""

    def __init__(self, network: Network, node: Node, name: str) -> None:
        self._network = network
        self._node = node
        self._name = name

    async def get_info(self, timeout_s: float) -> ExecutorInfo:
        return wire.decode_info((await self._ask(GET_INFO, timeout_s))[0])

    async def get_tokenizer(self, timeout_s: float) -> bytes:
        parts = TokenizerParts()
        for data in await self._ask(GET_TOKENIZER, timeout_s):
            wire.add_tokenizer_part(parts, data)
        return parts.content()

    def attach(self) -> GrpcPlanCall:
        call = SimulatedCall(self._network.call(self._node, self._name, ATTACH))
        return GrpcPlanCall(cast("grpc.aio.StreamStreamCall[bytes, bytes]", call))

    async def close(self) -> None:
        """Nothing is held."""

    async def _ask(self, method: str, timeout_s: float) -> list[bytes]:
        call = self._network.call(self._node, self._name, method)
        answers: list[bytes] = []
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    answers.append(_bytes(await call.answer()))
        except CallEndedError as ended:
            if ended.end is End.FINISHED:
                return answers
            if ended.end in (End.REFUSED, End.BROKEN):
                raise UnreachableError(f"the connection was {ended.end}") from None
            raise StreamEndedError(str(ended.end)) from None
        except TimeoutError:
            raise StreamEndedError("no answer in time") from None
        finally:
            call.cancel()


class SimulatedCall:
    """A call over the simulated network, as links and the client library use one of grpc.aio."""

    def __init__(self, call: Call) -> None:
        self._call = call

    async def read(self) -> object:
        try:
            return await self._call.answer()
        except CallEndedError as ended:
            if ended.end in (End.FINISHED, End.HALF_CLOSED):
                return grpc.aio.EOF
            raise _rpc_error(ended.end) from None

    async def write(self, message: object) -> None:
        try:
            self._call.ask(message)
        except CallEndedError as ended:
            raise _rpc_error(ended.end) from None

    async def done_writing(self) -> None:
        self._call.half_close()

    def cancel(self) -> bool:
        self._call.cancel()
        return True


def _bytes(message: object) -> bytes:
    assert isinstance(message, bytes), "what executors say"
    return message


def _rpc_error(end: object) -> grpc.aio.AioRpcError:
    """Return what gRPC raises; servers end calls with a status, networks with an End."""
    code, trailing, details = grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), f"the call is {end}"
    match end:
        case ErrorStatus():
            code, details = end.code, end.message
            trailing = grpc.aio.Metadata(*trailing_metadata(end))
        case End.CANCELLED:
            code = grpc.StatusCode.CANCELLED
        case End.FINISHED | End.HALF_CLOSED:
            code = grpc.StatusCode.OK
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)

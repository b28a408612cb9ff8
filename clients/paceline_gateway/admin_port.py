"""What executors do now, by the scheduler's admin port, for whoever shows an operator's key there. Keeps no answer."""

import asyncio
from typing import Any

from paceline.v1 import admin_pb2 as pb
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from paceline_client.addresses import ADMIN_PORT, Addresses, admin_target
from paceline_client.channel import GrpcChannel
from paceline_client.config import Retry, Tls
from paceline_client.credentials import Credentials
from paceline_client.dialler import Dialler
from paceline_client.errors import UnavailableError
from paceline_client.wire import errors_of_calls

_CONNECT_S = 3.0
_CALL_S = 5.0
_STATES = {number: name.removeprefix("EXECUTOR_STATE_").lower() for name, number in pb.ExecutorState.items()}


class AdminPort:
    """`admin` are the admin ports; None: those that follow the ports of `target`, which need not have any. Nothing is
    dialled before somebody asks.
    """

    def __init__(self, target: str, admin: str | None, tls: Tls | None) -> None:
        self._target = target
        self._admin = admin
        self._tls = tls
        self._connecting = asyncio.Lock()
        self._dialler: Dialler[GrpcChannel] | None = None

    async def fleet(self, bearer: str | None) -> dict[str, Any]:
        """As JSON, of the scheduler that drives the executors if one answers. Raises PacelineError."""
        metadata = Credentials(token=bearer).metadata()
        dialler = self._dialler = self._dialler or self._make_dialler()
        passed: set[str] = set()
        while True:
            async with self._connecting:
                endpoint = await dialler.connect(asyncio.get_running_loop().time() + _CONNECT_S)
            with dialler.use(endpoint) as channel, errors_of_calls():
                stub = AdminServiceStub(channel.calls.channel)
                found = await stub.ListExecutors(pb.ListExecutorsRequest(), timeout=_CALL_S, metadata=metadata)
            holders = [each.holder_address or each.holder_scheduler_id for each in found.executors]
            if not holders or not all(holders) or endpoint.address in passed:
                return _shown(found)
            passed.add(endpoint.address)
            dialler.turned_away(endpoint, UnavailableError(f"stands by for {holders[0]}", reason="STANDBY"))

    async def close(self) -> None:
        if self._dialler is not None:
            await self._dialler.close()

    def _make_dialler(self) -> Dialler[GrpcChannel]:
        addresses = Addresses(self._admin or admin_target(self._target), default_port=ADMIN_PORT)
        credentials = Credentials(self._tls)
        return Dialler(
            addresses,
            dial=lambda address: GrpcChannel(address, credentials, server_name=addresses.name_of(address)),
            retry=Retry(),
        )


def _shown(found: pb.ListExecutorsResponse) -> dict[str, Any]:
    return {
        "scheduler_id": found.scheduler_id,
        "num_waiting_requests": found.num_waiting_requests,
        "executors": [
            {
                "address": executor.address,
                "state": _STATES.get(executor.state, "unspecified"),
                "model": executor.model,
                "num_running_requests": executor.num_running_requests,
                "max_num_rows": executor.max_num_rows,
                "num_blocks": executor.blocks.total,
                "num_used_blocks": executor.blocks.used,
                "num_output_tokens": executor.steps.num_output_tokens,
                "last_error": executor.last_error,
            }
            for executor in found.executors
        ],
    }

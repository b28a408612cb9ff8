"""What the stages ask a scheduler's operators' side, as messages.

Apart from the stages, because only modules of this name know generated messages.
"""

from dataclasses import dataclass

import grpc.aio

from paceline.v1 import admin_pb2, admin_pb2_grpc


@dataclass(frozen=True, slots=True)
class StepSums:
    """Of an executor's finished steps; times in ns, by the device's clock."""

    num_steps: int
    busy_ns: int

    def since(self, before: "StepSums") -> "StepSums":
        return StepSums(self.num_steps - before.num_steps, self.busy_ns - before.busy_ns)


async def read_step_sums(channel: grpc.aio.Channel) -> StepSums:
    """Ask the scheduler for those of its only executor."""
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    answer = await stub.ListExecutors(admin_pb2.ListExecutorsRequest())
    (executor,) = answer.executors
    steps = executor.steps
    return StepSums(steps.num_steps, steps.timings.forward_ns + steps.timings.sample_ns)

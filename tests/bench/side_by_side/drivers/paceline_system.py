"""Drives this system as its users do: a scheduler, an executor and a client, three processes that speak gRPC.

Run by the project's own interpreter with the GGUF file, the size of the KV cache and options of the scheduler as
arguments. This process is the client. What the executor's steps took is read from AdminService where a workload asks
for it.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Self

import grpc.aio
import uvloop

from paceline.v1.admin_pb2 import WatchStepsRequest, WatchStepsResponse
from paceline.v1.admin_pb2_grpc import AdminServiceStub
from paceline_cli.supervisor.programs import LOOPBACK, Deployment, free_ports, programs_of
from paceline_client import AsyncClient, Sampling, Stopping, UnavailableError
from side_by_side.drivers.protocol import Answer, Facts, Request, Step, Workload, reserve_stdout, serve

# What the default does not say; empty: as a user gets it.
_EXECUTOR_OPTIONS: tuple[str, ...] = ()
_LOOK_S = 5.0
_STOP_S = 30
_WATCH_S = 0.2
Processes = Sequence["subprocess.Popen[bytes]"]


class System:
    """The running system as a client sees it: its API, and the watch on its steps."""

    def __init__(self, deployment: Deployment) -> None:
        self._client = AsyncClient(deployment.target)
        self._channel = grpc.aio.insecure_channel(f"{LOOPBACK}:{deployment.ports.scheduler.admin}")

    @classmethod
    async def connect(cls, deployment: Deployment, processes: Processes) -> Self:
        """Return when the system serves; made here because a channel belongs to the loop it is made on."""
        system = cls(deployment)
        while all(process.poll() is None for process in processes):
            with suppress(UnavailableError):
                await system._client.wait_until_ready(_LOOK_S)
                return system
        raise RuntimeError("the scheduler or the executor ended instead of serving")

    async def close(self) -> None:
        await self._client.close()
        await self._channel.close()

    async def run(self, workload: Workload) -> Answer:
        """Run a workload; its steps come with the answer if they are watched."""
        run = _Run(self._client, workload)
        return await (self._watched(run) if workload.is_watched else run.answer())

    async def _watched(self, run: "_Run") -> Answer:
        watch = AdminServiceStub(self._channel).WatchSteps(WatchStepsRequest())
        steps: list[Step] = []
        watching = asyncio.create_task(_collect(watch, steps))
        await asyncio.sleep(_WATCH_S)
        try:
            answer = await run.answer()
            await asyncio.sleep(_WATCH_S)
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        answer.steps = steps
        return answer


class _Run:
    """One workload under way."""

    def __init__(self, client: AsyncClient, workload: Workload) -> None:
        self._client = client
        self._requests = workload.requests
        self._slots = asyncio.Semaphore(workload.at_most or len(workload.requests))
        self._answer = Answer([0.0] * len(workload.requests), [[] for _ in workload.requests])
        self._progress = asyncio.Condition()
        self._start = time.perf_counter()

    async def answer(self) -> Answer:
        async with asyncio.TaskGroup() as tasks:
            for number, request in enumerate(self._requests):
                tasks.create_task(self._run(number, request))
        return self._answer

    async def _run(self, number: int, request: Request) -> None:
        async with self._slots:
            if request.after_tokens:
                async with self._progress:
                    await self._progress.wait_for(lambda: self._has_come(request.after_tokens))
            self._answer.sent_s[number] = time.perf_counter() - self._start
            stream = self._client.stream(
                token_ids=request.prompt,
                sampling=Sampling(temperature=0.0),
                stopping=Stopping(max_tokens=request.num_tokens, ignore_eos=True),
            )
            async for delta in stream:
                now = time.perf_counter() - self._start
                self._answer.token_s[number] += [now] * len(delta.token_ids)
                if self._is_awaited():
                    async with self._progress:
                        self._progress.notify_all()

    def _is_awaited(self) -> bool:
        return any(request.after_tokens for request in self._requests)

    def _has_come(self, num_tokens: int) -> bool:
        pairs = zip(self._answer.token_s, self._requests, strict=True)
        return all(len(times) >= num_tokens for times, request in pairs if not request.after_tokens)


async def _collect(watch: "grpc.aio.UnaryStreamCall[WatchStepsRequest, WatchStepsResponse]", steps: list[Step]) -> None:
    async for step in watch:
        timings = step.timings
        busy_ns = timings.prepare_ns + timings.forward_ns + timings.sample_ns
        steps.append(
            Step(
                num_rows=step.num_rows,
                num_tokens=step.num_tokens,
                busy_s=busy_ns / 1e9,
                idle_s=timings.idle_ns / 1e9,
            )
        )


@contextmanager
def running(deployment: Deployment) -> Iterator[Processes]:
    """Start scheduler and executor, drain them at the end."""
    scheduler, executor = (program.command for program in programs_of(deployment))
    processes = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr) for command in (scheduler, executor)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait()


def main() -> None:
    channel = reserve_stdout()
    model, kv_cache, *scheduler_options = sys.argv[1:]
    deployment = Deployment(
        model=model,
        host=LOOPBACK,
        ports=free_ports(1),
        shutdown_timeout_seconds=_STOP_S,
        scheduler_options=tuple(scheduler_options),
        executor_options=("--kv-cache-memory", kv_cache, *_EXECUTOR_OPTIONS),
    )
    configuration = " ".join(("defaults, KV cache", kv_cache, *scheduler_options, *_EXECUTOR_OPTIONS))
    with running(deployment) as processes, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        system = runner.run(System.connect(deployment, processes))
        pids = tuple(process.pid for process in processes)
        facts = Facts(version("paceline"), "client, scheduler and executor over gRPC", configuration, pids)
        serve(channel, facts, lambda workload: runner.run(system.run(workload)))
        runner.run(system.close())


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    main()

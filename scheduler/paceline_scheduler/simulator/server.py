"""A simulated executor as a process of its own: `python -m paceline_scheduler.simulator.server --port 50061`.

For load tests without a model and for trying out a deployment; it speaks ExecutorService like a real one, but refuses
Profile, and puts no bound of its own on fields of a plan.
"""

import argparse
import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import grpc.aio

from paceline.plan.values import StepPoint
from paceline_scheduler.simulator.bytes_tokenizer import VOCAB_SIZE, make_bytes_tokenizer
from paceline_scheduler.simulator.config import SimulatorConfig
from paceline_scheduler.simulator.executor import SimulatedExecutor
from paceline_scheduler.simulator.service import SimulatedService
from paceline_scheduler.simulator.servicer_executor import SimulatedExecutorServicer
from paceline_scheduler.simulator.tokens import TokenRule

MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # a plan may be as large as for a real executor


@dataclass(slots=True)
class SimulatedServer:
    """A simulated executor that listens on 127.0.0.1."""

    service: SimulatedService
    servicer: SimulatedExecutorServicer
    port: int
    _server: grpc.aio.Server
    _steps: asyncio.Task[None]

    @staticmethod
    async def start(
        config: SimulatorConfig,
        port: int = 0,
        time_scale: float = 1.0,
        on_first_plan: Callable[[], None] = lambda: None,
    ) -> "SimulatedServer":
        """Listen on a port, 0 for any free one; raises RuntimeError when it is taken.

        `on_first_plan` is called with the first plan of each epoch.
        """
        executor = SimulatedExecutor(config, incarnation=secrets.randbits(63))
        service = SimulatedService(executor, time.monotonic, time_scale, on_first_plan=on_first_plan)
        servicer = SimulatedExecutorServicer(service, make_bytes_tokenizer(config.tokens.vocab_size))
        size = (
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        )
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0), *size))
        servicer.add_to(server)
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return SimulatedServer(service, servicer, bound, server, asyncio.create_task(service.run_steps()))

    @property
    def address(self) -> str:
        """Where it can be dialled."""
        return f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """Close the listener and every stream at once."""
        self._steps.cancel()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await self._steps
        finally:
            # One that is dropped while it runs stalls the process when its remains are collected.
            await self._server.stop(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


def server_config(
    *,
    num_blocks: int = 2048,
    block_size: int = 16,
    max_num_rows: int = 64,
    max_num_batched_tokens: int = 512,
    max_model_len: int = 2048,
    end_probability: float = 0.0,
    vocab_size: int = VOCAB_SIZE,
    step_points: tuple[StepPoint, ...] = (StepPoint(1, 2_000_000), StepPoint(512, 40_000_000)),
) -> SimulatorConfig:
    """Return a simulated executor whose vocabulary is that of its tokenizer: at least 259 tokens."""
    return SimulatorConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_rows=max_num_rows,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        tokens=TokenRule(vocab_size=vocab_size, end_probability=end_probability),
        step_points=step_points,
    )


def main() -> None:
    """Run until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline_scheduler.simulator.server",
        description="An executor without a model, on 127.0.0.1, for load tests of the scheduler.",
    )
    parser.add_argument(
        "--port", type=int, default=50061, help="port to listen on, 0 for any free one (default: 50061)"
    )
    parser.add_argument("--num-blocks", type=int, default=2048, help="KV blocks of 16 slots (default: 2048)")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="rows (default: 64)")
    parser.add_argument("--time-scale", type=float, default=1.0, help="stretches step times; 0 for none (default: 1)")
    parser.add_argument("--step-ms", type=float, help="the time of every step (default: 2 for a token, 40 for 512)")
    parser.add_argument("--end-probability", type=float, default=0.0, help="chance of an end token (default: 0)")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE, help="tokens (default: %(default)s)")
    options = parser.parse_args()
    config = server_config(
        num_blocks=options.num_blocks,
        max_num_rows=options.max_num_seqs,
        end_probability=options.end_probability,
        vocab_size=options.vocab_size,
    )
    if options.step_ms is not None:
        step_ns = round(options.step_ms * 1e6)
        config = replace(config, step_points=(StepPoint(1, step_ns), StepPoint(512, step_ns)))
    asyncio.run(_serve(config, options.port, options.time_scale))


def _tell_first_plan() -> None:
    print(f"first plan of an epoch at {time.time():.6f}", flush=True)


async def _serve(config: SimulatorConfig, port: int, time_scale: float) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    server = await SimulatedServer.start(config, port, time_scale, _tell_first_plan)
    print(f"listening on {server.address}", flush=True)
    await stopped.wait()
    await server.stop()


if __name__ == "__main__":
    main()

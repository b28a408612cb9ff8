"""An executor in this process, over real gRPC with real rows, and any runner."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from executor_rig.hash_runner import HashRunner
from executor_rig.stepping import as_seen
from paceline.bytes_tokenizer import VOCAB_SIZE
from paceline.plan.sampling import GenerationDefaults
from paceline_executor.config import parse_config
from paceline_executor.limits import RowLimits
from paceline_executor.link.description import Loaded
from paceline_executor.link.engine import Engine
from paceline_executor.link.service import ExecutorService, ServiceConfig
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.interface import Runner
from paceline_executor.runner.step_times import StepTimeCurve
from paceline_executor.start.loading import describe_simulated, load_simulated
from paceline_executor.weights.tokenizer import SpecialTokens, make_bundle

HASH_LIMITS = RowLimits(
    num_rows=8, max_model_len=64, max_num_batched_tokens=32, num_blocks=32, block_size=4, vocab_size=1000
)


@dataclass(frozen=True, slots=True)
class HashExecutor:
    """`runner` is there to break it."""

    address: str
    service: ExecutorService
    runner: HashRunner


@asynccontextmanager
async def hash_executor(
    limits: RowLimits = HASH_LIMITS, config: ServiceConfig | None = None, tokenizer_json: bytes = b"{}"
) -> AsyncIterator[HashExecutor]:
    """Serves on a free port of 127.0.0.1."""
    runner = HashRunner(limits.num_blocks, limits.block_size, limits.vocab_size)
    try:
        async with serving(lambda: loaded(runner, limits, tokenizer_json), config) as (service, address):
            yield HashExecutor(address, service, runner)
    finally:
        runner.gate.set()


class SimulatedExecutor:
    """What `paceline-executor --runner simulated` runs; it can be ended and started again.

    Every step takes `step_ms`. Use `simulated_executor`.
    """

    def __init__(self, options: Sequence[str], step_ms: float, vocab_size: int, engine: type[Engine]) -> None:
        config = parse_config(["--runner", "simulated", "--port", "0", *options])
        self._load = partial(load_simulated, config, StepTimeCurve(((1, step_ms * 1e6),)), vocab_size, engine)
        self.port = config.port

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """A new incarnation, at the address of the one before."""
        loaded = self._load()
        self.table = loaded.engine.table
        self.service = ExecutorService(ServiceConfig("127.0.0.1", self.port, None), lambda: loaded)
        self.port, _ = await self.service.listen()
        await self.service.load()

    async def stop(self) -> None:
        await self.service.stop()

    async def restart(self) -> None:
        await self.stop()
        await self.start()


@asynccontextmanager
async def simulated_executor(
    *options: str, step_ms: float = 2.0, vocab_size: int = VOCAB_SIZE, engine: type[Engine] = Engine
) -> AsyncIterator[SimulatedExecutor]:
    """Options are those of `paceline-executor`; the address is on 127.0.0.1."""
    executor = SimulatedExecutor(options, step_ms, vocab_size, engine)
    await executor.start()
    try:
        yield executor
    finally:
        await executor.stop()


@asynccontextmanager
async def serving(
    load: Callable[[], Loaded], config: ServiceConfig | None = None
) -> AsyncIterator[tuple[ExecutorService, str]]:
    """On a free port of 127.0.0.1; yields the service and its address."""
    service = ExecutorService(config or ServiceConfig("127.0.0.1", 0, None), load)
    port, _ = await service.listen()
    try:
        await service.load()
        yield service, f"127.0.0.1:{port}"
    finally:
        await service.stop()


def loaded(runner: Runner, limits: RowLimits = HASH_LIMITS, tokenizer_json: bytes = b"{}") -> Loaded:
    """The tokenizer is none."""
    special = SpecialTokens(None, 0, (0,))
    tokenizer = make_bundle(tokenizer_json, None, special, GenerationDefaults())
    description = describe_simulated("hash", runner, limits, tokenizer)
    return Loaded(Engine(RowTable(limits), as_seen(runner, limits)), description)

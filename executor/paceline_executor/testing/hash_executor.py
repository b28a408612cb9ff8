"""An executor in this process, over real gRPC with real rows: with the hash runner, or any other one.

For tests of whatever attaches to executors.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from paceline.plan.values import GenerationDefaults
from paceline_executor.link.description import Description, Loaded
from paceline_executor.link.engine import Engine
from paceline_executor.link.service import ExecutorService, ServiceConfig
from paceline_executor.rows.limits import RowLimits
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.interface import Runner
from paceline_executor.testing.hash_runner import HashRunner
from paceline_executor.testing.stepping import as_seen
from paceline_executor.weights.tokenizer import TokenizerBundle

HASH_LIMITS = RowLimits(
    num_rows=8, max_model_len=64, max_num_batched_tokens=32, num_blocks=32, block_size=4, vocab_size=1000
)


@dataclass(frozen=True, slots=True)
class HashExecutor:
    """A running executor: where it listens, and its runner, to break it."""

    address: str
    service: ExecutorService
    runner: HashRunner


@asynccontextmanager
async def hash_executor(
    limits: RowLimits = HASH_LIMITS, config: ServiceConfig | None = None, tokenizer_json: bytes = b"{}"
) -> AsyncIterator[HashExecutor]:
    """Serve the hash runner on a free port of 127.0.0.1 until the block ends."""
    runner = HashRunner(limits.num_blocks, limits.block_size, limits.vocab_size)
    try:
        async with serving(lambda: loaded(runner, limits, tokenizer_json), config) as (service, address):
            yield HashExecutor(address, service, runner)
    finally:
        runner.gate.set()


@asynccontextmanager
async def serving(
    load: Callable[[], Loaded], config: ServiceConfig | None = None
) -> AsyncIterator[tuple[ExecutorService, str]]:
    """Serve what `load` gives on a free port of 127.0.0.1 until the block ends; yields the service and its address."""
    service = ExecutorService(config or ServiceConfig("127.0.0.1", 0, None), load)
    port, _ = await service.listen()
    try:
        await service.load()
        yield service, f"127.0.0.1:{port}"
    finally:
        await service.stop()


def loaded(runner: Runner, limits: RowLimits = HASH_LIMITS, tokenizer_json: bytes = b"{}") -> Loaded:
    """What loading a model gives, around a runner; the tokenizer is none."""
    bundle = TokenizerBundle(
        tokenizer_json=tokenizer_json,
        chat_template=None,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        end_token_ids=(0,),
        add_bos=False,
        defaults=GenerationDefaults(),
        digest="hash",
    )
    description = Description(
        model="hash",
        architecture="hash",
        num_parameters=0,
        quantization="",
        limits=limits,
        geometry=runner.kv_geometry,
        kv_dtype="int64",
        tokenizer=bundle,
        step_points=runner.warm_up(),
        device="none",
        num_threads=0,
    )
    return Loaded(Engine(RowTable(limits), as_seen(runner)), description)

"""From a configuration to a loaded model: fetch, read, allocate, warm up. Runs in the step thread.

Knows the order and the sums: how many blocks fit into memory, how long a row may be. It refuses to know file formats
(`weights`) and computing (`runner`), and imports the latter, with torch, only when it is needed.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import structlog

from paceline.bytes_tokenizer import CHAT_TEMPLATE, END_TOKEN_IDS, PRINTABLE, VOCAB_SIZE, make_bytes_tokenizer
from paceline.plan.texts import MAX_NAME_BYTES, readable
from paceline.plan.values import MAX_BLOCKS, GenerationDefaults
from paceline_executor.config import Config, LoadFormat, RunnerKind
from paceline_executor.errors import LimitError, ShortMemoryError
from paceline_executor.link.description import Description, Loaded
from paceline_executor.link.engine import Engine
from paceline_executor.memory import available_bytes
from paceline_executor.numerics import Numerics, choose_numerics
from paceline_executor.rows.limits import RowLimits
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.interface import Runner, WarmUpProgress
from paceline_executor.runner.simulated import BYTES_PER_TOKEN as SIMULATED_TOKEN_BYTES
from paceline_executor.runner.simulated import SimulatedRunner
from paceline_executor.runner.step_times import StepTimes, read_step_times
from paceline_executor.speculation.drafter import MAX_NUM_DRAFT_TOKENS
from paceline_executor.weights import (
    Checkpoint,
    FetchOptions,
    FetchProgress,
    ModelConfig,
    load_dummy,
    load_model,
    resolve_model,
)
from paceline_executor.weights.known_models import KNOWN_MODELS
from paceline_executor.weights.tokenizer import SpecialTokens, TokenizerBundle, make_bundle, with_defaults

_MAX_DEFAULT_KV_BYTES = 2 * 2**30
_DEFAULT_KV_SHARE = 4  # a quarter of what is free
_MIN_POOL_TOKENS = 128  # less would hold no conversation
_MIN_EVENT_S = 0.5
_SIMULATED_MODEL_LEN = 8192


class ProgressLog:
    """Logs how far a phase of loading is: when it begins, when it is done, and at most twice a second between."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._log = structlog.get_logger()
        self._clock_s = clock_s
        self._last = ("", "")
        self._last_s = 0.0

    def fetch(self, progress: FetchProgress) -> None:
        """The model is being fetched."""
        fraction = progress.num_bytes / progress.total_bytes if progress.total_bytes else 0.0
        self.log("model_fetch", progress.phase.value, fraction)

    def log(self, event: str, phase: str, fraction: float) -> None:
        """`fraction` of `phase` is done."""
        now_s = self._clock_s()
        if (event, phase) == self._last and fraction < 1 and now_s - self._last_s < _MIN_EVENT_S:
            return
        self._last, self._last_s = (event, phase), now_s
        self._log.info(event, phase=phase, fraction=round(fraction, 3))


def load(config: Config) -> Loaded:
    """Load the configured model or the simulated runner. Raises ModelError for the model's faults, ShortMemoryError,
    LimitError and StepTimesError for the configuration's.
    """
    if config.runner is RunnerKind.SIMULATED:
        return load_simulated(config, read_step_times(config.step_times) if config.step_times else StepTimes())
    return _load_model(config)


def load_simulated(
    config: Config, step_times: StepTimes, vocab_size: int = VOCAB_SIZE, engine: type[Engine] = Engine
) -> Loaded:
    """A tokenizer of bytes, and of words if the vocabulary is larger."""
    max_model_len = config.max_model_len or _SIMULATED_MODEL_LEN
    needs = ModelNeeds(0, SIMULATED_TOKEN_BYTES, max_model_len, vocab_size)
    limits = limits_within(config, needs, available_bytes())
    runner = SimulatedRunner(limits.num_blocks, limits.block_size, vocab_size, drawn=PRINTABLE, step_times=step_times)
    tokenizer = simulated_tokenizer(vocab_size)
    description = describe_simulated(config.served_model_name or "simulated", runner, limits, tokenizer)
    return Loaded(engine(RowTable(limits), runner), description)


@cache
def simulated_tokenizer(vocab_size: int = VOCAB_SIZE) -> TokenizerBundle:
    """The tokenizer of bytes that a runner without a model has."""
    special = SpecialTokens(None, END_TOKEN_IDS[0], None, END_TOKEN_IDS, add_bos=False)
    return make_bundle(make_bytes_tokenizer(vocab_size), CHAT_TEMPLATE, special, GenerationDefaults())


def describe_simulated(name: str, runner: Runner, limits: RowLimits, tokenizer: TokenizerBundle) -> Description:
    """What is said of a runner without a model."""
    return Description(
        model=name,
        architecture="simulated",
        num_parameters=0,
        quantization="",
        limits=limits,
        geometry=runner.kv_geometry,
        kv_dtype="int32",
        tokenizer=tokenizer,
        step_points=runner.warm_up(),
        device="simulated",
        num_threads=0,
    )


def _load_model(config: Config) -> Loaded:
    progress = ProgressLog()
    path = resolve_model(
        config.model,
        cache_dir=config.cache_dir,
        on_progress=progress.fetch,
        options=FetchOptions(config.revision, config.hub_endpoint, config.offline),
    )
    structlog.get_logger().info("model", path=str(path))
    progress.log("model_load", "reading", 0.0)
    checkpoint, tokenizer = _open(config, path)
    numerics = choose_numerics(config.quantization, config.kv_cache_dtype, checkpoint.config, config.block_size)
    limits = limits_for(config, checkpoint.config, numerics, available_bytes())

    from paceline_executor.runner.cpu import CpuRunner  # with torch, which takes seconds to import

    def on_warm_up(warm_up: WarmUpProgress) -> None:
        progress.log("warm_up", warm_up.step, warm_up.index / warm_up.num_steps)

    progress.log("model_load", "weights", 0.5)
    runner = CpuRunner(
        checkpoint,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        numerics=numerics,
        max_model_len=limits.max_model_len,
        num_threads=config.num_threads,
        on_progress=on_warm_up,
    )
    progress.log("model_load", "done", 1.0)
    step_points = runner.warm_up()
    progress.log("warm_up", "done", 1.0)
    structlog.get_logger().info(
        "numerics",
        weights=numerics.weights.value,
        kv_cache=numerics.kv.value,
        instructions=runner.instructions,
        num_threads=runner.num_threads,
    )
    description = Description(
        model=served_name(config, path),
        architecture=checkpoint.config.architecture,
        num_parameters=num_parameters(checkpoint.config),
        quantization=checkpoint.quantization,
        limits=limits,
        geometry=runner.kv_geometry,
        kv_dtype=numerics.kv.value,
        tokenizer=tokenizer,
        step_points=step_points,
        device="cpu",
        num_threads=runner.num_threads,
        has_dummy_weights=config.load_format is LoadFormat.DUMMY,
    )
    return Loaded(Engine(RowTable(limits), runner), description)


def _open(config: Config, path: Path) -> tuple[Checkpoint, TokenizerBundle]:
    """Weights and tokenizer, read or invented."""
    if config.load_format is LoadFormat.DUMMY:
        dummy, own = load_dummy(path)
        return dummy, own or simulated_tokenizer(dummy.config.vocab_size)
    checkpoint, tokenizer = load_model(path)
    return checkpoint, recommend(config.model, tokenizer)


def recommend(model: str, tokenizer: TokenizerBundle) -> TokenizerBundle:
    """The tokenizer with known sampling values where its own files have none."""
    if model not in KNOWN_MODELS or tokenizer.defaults != GenerationDefaults():
        return tokenizer
    return with_defaults(tokenizer, KNOWN_MODELS[model].defaults)


def served_name(config: Config, path: Path) -> str:
    """The configured name, else the known one or that on the hub, else that of the file or folder."""
    if config.served_model_name is not None:
        return config.served_model_name
    is_fetched = path != Path(config.model).expanduser()
    if config.model in KNOWN_MODELS or is_fetched:
        return config.model
    return readable(path.resolve().name if path.is_dir() else path.stem, MAX_NAME_BYTES)


def num_parameters(model: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in model.tensor_shapes().values())


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What a model takes of memory, and what it allows."""

    weight_bytes: int
    bytes_per_token: int  # of KV cache
    max_model_len: int
    vocab_size: int


def limits_for(config: Config, model: ModelConfig, numerics: Numerics, free_bytes: int) -> RowLimits:
    """The bounds of rows of a model in these numbers: see `limits_within`."""
    weight_bytes = int(num_parameters(model) * numerics.max_bytes_per_weight())
    needs = ModelNeeds(weight_bytes, numerics.bytes_per_token(model), model.max_model_len, model.vocab_size)
    return limits_within(config, needs, free_bytes)


def limits_within(config: Config, needs: ModelNeeds, free_bytes: int) -> RowLimits:
    """The bounds of rows: what is configured, what the model allows, what fits into `free_bytes`."""
    if config.max_model_len is not None and config.max_model_len > needs.max_model_len:
        sentence = f"--max-model-len {config.max_model_len} is more than the model was trained for"
        raise LimitError(f"{sentence}: {needs.max_model_len}")
    max_model_len = config.max_model_len or needs.max_model_len
    num_blocks = _num_blocks(config, needs, max_model_len, free_bytes)
    num_slots = num_blocks * config.block_size
    if config.max_model_len is not None and config.max_model_len > num_slots:
        sentence = f"--max-model-len {config.max_model_len} is more than the {num_slots} tokens that the KV cache holds"
        raise ShortMemoryError(f"{sentence}; raise --kv-cache-memory or free memory")
    return RowLimits(
        num_rows=config.max_num_seqs,
        max_model_len=min(max_model_len, num_slots),
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_blocks=num_blocks,
        block_size=config.block_size,
        vocab_size=needs.vocab_size,
        max_num_draft_tokens=MAX_NUM_DRAFT_TOKENS,
    )


def _num_blocks(config: Config, needs: ModelNeeds, max_model_len: int, free_bytes: int) -> int:
    left_bytes = free_bytes - needs.weight_bytes
    kv_bytes = config.kv_cache_memory or min(left_bytes // _DEFAULT_KV_SHARE, _MAX_DEFAULT_KV_BYTES)
    if kv_bytes > left_bytes:
        sentence = f"{_mib(needs.weight_bytes)} of weights and {_mib(kv_bytes)} of KV cache do not fit"
        raise ShortMemoryError(f"{sentence} into {_mib(free_bytes)} of free memory; lower --kv-cache-memory")
    num_blocks = kv_bytes // (needs.bytes_per_token * config.block_size)
    if num_blocks * config.block_size < min(max_model_len, _MIN_POOL_TOKENS):
        sentence = f"{_mib(kv_bytes)} of KV cache hold {num_blocks} blocks of {config.block_size} tokens, too few"
        raise ShortMemoryError(f"{sentence} for a request; raise --kv-cache-memory or free memory")
    # More than every row can fill would never be used, and there are more blocks than the protocol has numbers for.
    return min(num_blocks, MAX_BLOCKS, config.max_num_seqs * -(-max_model_len // config.block_size))


def _mib(num_bytes: int) -> str:
    return f"{max(0, num_bytes) / 2**20:,.0f} MiB"

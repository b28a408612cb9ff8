"""The sums before a model is loaded: how long a row may be, and how many KV blocks fit into a CPU's memory.

`runner.device.memory_plan` has a GPU's sums.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.plan.values import MAX_BLOCKS
from paceline_executor.config import Config
from paceline_executor.errors import LimitError, ShortMemoryError
from paceline_executor.limits import RowLimits
from paceline_executor.numerics import Numerics
from paceline_executor.runner.device.memory_plan import mib
from paceline_executor.runner.drafter import MAX_NUM_DRAFT_TOKENS
from paceline_executor.weights import ModelConfig
from paceline_executor.weights.stored_tensor import StoredType

MAX_DEFAULT_KV_BYTES = 2 * 2**30
_DEFAULT_KV_SHARE = 4  # a quarter of what is free
MIN_POOL_TOKENS = 128  # less would hold no conversation


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    weight_bytes: int
    bytes_per_token: int  # of KV cache
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    weight_bytes: int = 0
    bytes_per_token: int = 0  # of its own KV cache, under the same blocks


NO_DRAFTER = DrafterNeeds()
NOTHING_STORED: Mapping[str, StoredType] = {}


def limits_for(
    config: Config,
    model: ModelConfig,
    numerics: Numerics,
    free_bytes: int,
    drafter: DrafterNeeds = NO_DRAFTER,
    stored: Mapping[str, StoredType] = NOTHING_STORED,
) -> RowLimits:
    """See `limits_within`. model: one rank's part of it."""
    weight_bytes = numerics.weight_bytes(model, stored) + drafter.weight_bytes
    bytes_per_token = numerics.bytes_per_token(model) + drafter.bytes_per_token
    needs = ModelNeeds(weight_bytes, bytes_per_token, model.max_model_len, model.vocab_size)
    return limits_within(config, needs, free_bytes)


def limits_within(config: Config, needs: ModelNeeds, free_bytes: int) -> RowLimits:
    """What is configured, what the model allows, what fits into `free_bytes`, which ranks share; with drafts."""
    max_model_len = longest_row(config, needs.max_model_len)
    num_blocks = _num_blocks(config, needs, max_model_len, free_bytes)
    num_slots = num_blocks * config.block_size
    if config.max_model_len is not None and config.max_model_len > num_slots:
        sentence = f"--max-model-len {config.max_model_len} is more than the {num_slots} tokens that the KV cache holds"
        raise ShortMemoryError(f"{sentence}; raise --kv-cache-memory or free memory")
    limits = row_limits(config, needs.vocab_size, max_model_len, num_blocks)
    return replace(limits, max_num_draft_tokens=MAX_NUM_DRAFT_TOKENS)


def longest_row(config: Config, trained_len: int) -> int:
    """In tokens: what is asked for, else what the model was trained for. Raises LimitError."""
    if config.max_model_len is not None and config.max_model_len > trained_len:
        sentence = f"--max-model-len {config.max_model_len} is more than the model was trained for"
        raise LimitError(f"{sentence}: {trained_len}")
    return config.max_model_len or trained_len


def fillable_blocks(config: Config, max_model_len: int) -> int:
    """Counts all rows together."""
    return config.max_num_seqs * -(-max_model_len // config.block_size)


def row_limits(config: Config, vocab_size: int, max_model_len: int, num_blocks: int) -> RowLimits:
    """No row is longer than the pool of blocks."""
    return RowLimits(
        num_rows=config.max_num_seqs,
        max_model_len=min(max_model_len, num_blocks * config.block_size),
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_blocks=num_blocks,
        block_size=config.block_size,
        vocab_size=vocab_size,
    )


def _num_blocks(config: Config, needs: ModelNeeds, max_model_len: int, free_bytes: int) -> int:
    free_bytes //= len(config.share.ranks)
    left_bytes = free_bytes - needs.weight_bytes
    if left_bytes < 0:
        sentence = f"{mib(needs.weight_bytes)} of weights do not fit into {mib(free_bytes)} of free memory"
        raise ShortMemoryError(f"{sentence}; take a smaller model, or free memory")
    asked = (config.kv_cache_memory or MAX_DEFAULT_KV_BYTES) // config.tensor_parallel_size
    kv_bytes = asked if config.kv_cache_memory else min(left_bytes // _DEFAULT_KV_SHARE, asked)
    if kv_bytes > left_bytes:
        sentence = f"{mib(needs.weight_bytes)} of weights and {mib(kv_bytes)} of KV cache do not fit"
        raise ShortMemoryError(f"{sentence} into {mib(free_bytes)} of free memory; lower --kv-cache-memory")
    num_blocks = kv_bytes // (needs.bytes_per_token * config.block_size)
    if num_blocks * config.block_size < min(max_model_len, MIN_POOL_TOKENS):
        sentence = f"{mib(kv_bytes)} of KV cache hold {num_blocks} blocks of {config.block_size} tokens, too few"
        raise ShortMemoryError(f"{sentence} for a request; raise --kv-cache-memory or free memory")
    # More than every row can fill would never be used, and the protocol has no numbers for more.
    return min(num_blocks, MAX_BLOCKS, fillable_blocks(config, max_model_len))

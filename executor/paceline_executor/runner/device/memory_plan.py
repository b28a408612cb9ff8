"""Which part of a GPU's memory goes to what, and how many KV blocks the rest holds.

Knows which option makes which part smaller. Refuses to ask a device, and to allocate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from paceline.plan.values import MAX_BLOCKS
from paceline_executor.errors import ShortMemoryError
from paceline_executor.weights.checkpoint import ModelConfig

STEP_TOKEN_BYTES = 32
"""Of a captured step: ids, positions and slots."""

_PARTIAL_BYTES = 16 << 20  # of contexts that are divided among programs
_SLOT_NUMBERS = 8  # of 16 bits: an expert, a weight, places in tiles
_GRAPH_BYTES = 8 << 20  # of a captured step; 5.4 MiB were measured
_LIBRARY_BYTES = 256 << 20  # workspaces and code
_LINK_BYTES = 512 << 20  # of NCCL, where there are several ranks: estimated
_SLACK = 8  # an eighth is lost to rounding
_SMALLER = {
    "activations": "lower --max-num-batched-tokens or --max-num-seqs",
    "rows": "lower --max-model-len or --max-num-seqs",
    "rings": "lower --max-num-seqs",
    "graphs": "lower --max-num-batched-tokens or --max-num-seqs",
}


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """`free_bytes` no process has taken yet."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryUses:
    """The KV cache is not counted. In bytes."""

    weights: int
    activations: int  # of the largest step, at their peak
    rows: int  # kept on the device
    rings: int  # 0 where they are in the host's memory
    graphs: int  # the pool of captured steps, and what libraries take


@dataclass(frozen=True, slots=True)
class BlockNeeds:
    bytes_per_block: int
    min_blocks: int  # fewer hold no request
    max_blocks: int  # all rows together fill no more


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_blocks: int
    table: Mapping[str, int]  # what takes memory -> bytes


def plan_memory(
    memory: DeviceMemory,
    share: float,
    uses: MemoryUses,
    needs: BlockNeeds,
    kv_cache_bytes: int | None = None,
    what_fits: Callable[[], str] = str,
) -> MemoryPlan:
    """Everything stays within `share` of the device's memory, and within what is free of it.

    kv_cache_bytes: what the KV cache gets at most; None is all that is left. what_fits: says what to do about weights
    that do not fit. Raises ShortMemoryError.
    """
    budget = min(int(memory.total_bytes * share), memory.free_bytes)
    parts = asdict(uses)
    left = budget - sum(parts.values())
    if left < 0:
        largest = max(parts, key=lambda name: parts[name])
        sentence = f"{_named(parts)} do not fit into {_budget(memory, share)}"
        smaller = what_fits() if largest == "weights" else _SMALLER[largest]
        raise ShortMemoryError(f"{sentence}; {smaller}, or {_larger(memory, share)}")
    if kv_cache_bytes is not None and kv_cache_bytes > left:
        sentence = f"{mib(kv_cache_bytes)} of KV cache beside {_named(parts)} do not fit into {_budget(memory, share)}"
        raise ShortMemoryError(f"{sentence}; lower --kv-cache-memory, or {_larger(memory, share)}")
    kv_bytes = left if kv_cache_bytes is None else kv_cache_bytes
    num_blocks = min(kv_bytes // needs.bytes_per_block, MAX_BLOCKS, needs.max_blocks)
    if num_blocks < needs.min_blocks:
        sentence = f"{mib(kv_bytes)} of KV cache hold {num_blocks} blocks, and a request takes {needs.min_blocks}"
        larger = _larger(memory, share) if kv_cache_bytes is None else "raise --kv-cache-memory"
        raise ShortMemoryError(f"{sentence}; {larger}, lower --max-model-len or choose a smaller --kv-cache-dtype")
    return MemoryPlan(num_blocks, {**parts, "kv_cache": num_blocks * needs.bytes_per_block})


def activation_bytes(
    model: ModelConfig, num_tokens: int, num_draws: int, number_bytes: int, expert_slices: int = 1
) -> int:
    """At a step's peak, at most; numbers are of `number_bytes` each.

    Stream and norm are there all the time; beside them queries, keys, values and what is attended, or gates and what
    they gate, of a mixture what passes the gates of each of a token's experts and each slice of its product, logits of
    the router and the shared expert's. Inputs of 8-bit products are held once more.
    """
    queries, keys_values = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    widest = max(2 * queries + keys_values, 3 * model.intermediate_size)
    if model.experts is not None:
        experts, routing = model.experts, model.experts.routing
        of_slot = experts.intermediate_size + expert_slices * model.hidden_size + _SLOT_NUMBERS
        shared = 3 * experts.shared_intermediate_size + 2 * model.hidden_size
        widest = max(widest, routing.top_k * of_slot + 2 * routing.num_experts + shared)
    per_token = (3 * model.hidden_size + widest) * number_bytes + max(model.hidden_size, model.intermediate_size)
    per_draw = model.vocab_size * (number_bytes + 8)  # logits, in float32, and once more under rules
    total = num_tokens * per_token + num_draws * per_draw + _PARTIAL_BYTES
    return total + total // _SLACK


def graph_bytes(largest_activation_bytes: int, kept_bytes: Sequence[int], degree: int = 1) -> int:
    """The pool that the largest step needs, and what each keeps. degree: of ranks."""
    libraries = _LIBRARY_BYTES + (_LINK_BYTES if degree > 1 else 0)
    return largest_activation_bytes + sum(kept_bytes) + len(kept_bytes) * _GRAPH_BYTES + libraries


def mib(num_bytes: int) -> str:
    return f"{max(0, num_bytes) / 2**20:,.0f} MiB"


def _named(parts: Mapping[str, int]) -> str:
    return " + ".join(f"{mib(num_bytes)} of {name}" for name, num_bytes in parts.items() if num_bytes)


def _budget(memory: DeviceMemory, share: float) -> str:
    allowed = int(memory.total_bytes * share)
    if memory.free_bytes < allowed:
        return f"the {mib(memory.free_bytes)} that are free of the GPU's {mib(memory.total_bytes)}"
    return f"the {mib(allowed)} that --gpu-memory-utilization {share:g} allows of {mib(memory.total_bytes)}"


def _larger(memory: DeviceMemory, share: float) -> str:
    if memory.free_bytes < int(memory.total_bytes * share):
        return "end other processes on the GPU"
    return "raise --gpu-memory-utilization"

"""What the step loop asks of a device: run one flat batch, return the sampled tokens.

Knows arrays only. Requests, plans, rows' histories and gRPC stay on the other side of this seam, so that a CUDA runner
can take the place of the CPU runner without the rest of the executor noticing.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
UInt64Array = npt.NDArray[np.uint64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The shape of the paged KV cache: `num_blocks` blocks of `block_size` slots in each of `num_layers` layers."""

    num_blocks: int
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    bytes_per_block: int


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Sampling parameters, one element per sampled batch row, every value already resolved and in range.

    temperature: 0 means greedy. top_k: 0 means unlimited. seeds and offsets key the noise: offset is the index of the
    output token that is drawn. num_logprobs: -1 means none asked, 0 the chosen token only, n > 0 also the n best.
    """

    temperature: Float32Array  # [num_sampled]
    top_k: Int32Array  # [num_sampled]
    top_p: Float32Array  # [num_sampled]
    min_p: Float32Array  # [num_sampled]
    seeds: UInt64Array  # [num_sampled]
    offsets: Int32Array  # [num_sampled]
    num_logprobs: Int32Array  # [num_sampled]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One varlen batch: chunks and decodes mixed, batch row after batch row.

    Batch row i computes the tokens `cu_seqlens[i]:cu_seqlens[i + 1]`; its last token sits at position
    `context_lens[i] - 1`. KV slots of position p of row i: block `block_tables[i, p // block_size]`, slot
    `p % block_size`. `sampled` names the batch rows whose last token's logits are sampled, in ascending order.
    """

    token_ids: Int32Array  # [num_tokens]
    positions: Int32Array  # [num_tokens]
    cu_seqlens: Int32Array  # [num_rows + 1]
    context_lens: Int32Array  # [num_rows]
    block_tables: Int32Array  # [num_rows, max_blocks_per_row]
    sampled: Int32Array  # [num_sampled]
    sampling: SamplingColumns


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities (of the unmodified distribution, before temperature) at one sampled position."""

    chosen: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step produced. `faults` maps an index into `sampled` to the reason that row produced no token."""

    token_ids: Int32Array  # [num_sampled]
    logprobs: dict[int, TokenLogprobs]  # index into `sampled` -> values, where asked
    faults: dict[int, str]
    forward_ns: int
    sample_ns: int


class Runner(Protocol):
    """A device that holds weights and KV cache. All methods are called from one thread, the step thread."""

    @property
    def kv_geometry(self) -> KvGeometry:
        """The shape of the KV cache as allocated."""
        ...

    def warm_up(self) -> tuple[tuple[int, int], ...]:
        """Run every code path once so that nothing compiles later; returns measured (num_tokens, step ns) points."""
        ...

    def execute(self, batch: StepBatch) -> StepOutput:
        """Write the batch's KV, compute the logits of the sampled rows and sample them."""
        ...

    def copy_blocks(self, sources: Int32Array, destinations: Int32Array) -> None:
        """Copy whole KV blocks in all layers: block `sources[i]` to block `destinations[i]`."""
        ...

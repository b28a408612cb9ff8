"""What tests of kernels build on: paged batches, and memory that shows when it is read too early.

Knows how an engine lays out blocks. It asserts nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


def unwritten_value(dtype: torch.dtype) -> float:
    """NaN, or an absurd integer that the type can hold: what memory holds that nothing was written to."""
    if dtype.is_floating_point:
        return float("nan")
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max - 2


def poisoned(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A stand-in for `torch.empty` whose memory holds NaN, or an absurd integer, instead of what lay there before.

    It takes what torch itself passes on, too.
    """

    def allocate(
        *size: object,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        tensor = empty(*size, dtype=dtype, layout=layout, device=device, pin_memory=pin_memory)
        return tensor.fill_(unwritten_value(tensor.dtype))

    return allocate


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The arguments of `paged_attention` for one batch, and the contexts they were made of."""

    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    key_cache: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]; NaN where no row has a position
    value_cache: torch.Tensor  # as key_cache
    block_tables: torch.Tensor  # [num_rows, max_blocks_per_row] int32
    cu_seqlens: torch.Tensor  # [num_rows + 1] int32
    context_lens: torch.Tensor  # [num_rows] int32
    scale: float

    def arguments(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]:
        """In the order of `paged_attention`."""
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.cu_seqlens,
            self.context_lens,
            self.scale,
        )


@dataclass(frozen=True, slots=True)
class Context:
    """One row's queries, keys and values for positions 0 to `length`, of which a batch computes some."""

    queries: torch.Tensor  # [length, num_heads, head_dim]
    keys: torch.Tensor  # [length, num_kv_heads, head_dim]
    values: torch.Tensor  # as keys


def random_context(length: int, num_heads: int, num_kv_heads: int, head_dim: int, seed: int) -> Context:
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(length, heads, head_dim, generator=generator)

    return Context(normal(num_heads), normal(num_kv_heads), normal(num_kv_heads))


def paged_batch(rows: Sequence[tuple[Context, int, int]], block_size: int, seed: int = 0) -> PagedBatch:
    """A batch in which row i computes the positions start:stop of its context, its blocks scattered at random.

    rows: (context, start, stop), 0 <= start < stop <= length of the context.
    """
    num_kv_heads, head_dim = rows[0][0].keys.shape[1:]
    num_blocks = [-(-stop // block_size) for _, _, stop in rows]
    order = torch.randperm(sum(num_blocks) + 1, generator=torch.Generator().manual_seed(seed)).tolist()
    keys = torch.full((len(order), num_kv_heads, block_size, head_dim), float("nan"))
    values = keys.clone()
    tables = torch.full((len(rows), max(num_blocks)), -1, dtype=torch.int32)
    for row, (context, _, stop) in enumerate(rows):
        tables[row, : num_blocks[row]] = torch.tensor([order.pop() for _ in range(num_blocks[row])])
        positions = torch.arange(stop)
        blocks, slots = tables[row, positions // block_size].long(), positions % block_size
        keys[blocks, :, slots] = context.keys[:stop]
        values[blocks, :, slots] = context.values[:stop]
    lengths = torch.tensor([0] + [stop - start for _, start, stop in rows])
    return PagedBatch(
        query=torch.cat([context.queries[start:stop] for context, start, stop in rows]),
        key_cache=keys,
        value_cache=values,
        block_tables=tables,
        cu_seqlens=lengths.cumsum(0).int(),
        context_lens=torch.tensor([stop for _, _, stop in rows], dtype=torch.int32),
        scale=head_dim**-0.5,
    )

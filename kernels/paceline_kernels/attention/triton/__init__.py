"""attention for GPUs: short rows by `splits`, chunks by `chunks`, both in one batch.

No length is read on the host, so nothing waits for the device, and a captured graph serves any lengths that its tensors
have room for. Knows shapes and grids; not what the kernels do with them.
"""

from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline_kernels.attention.triton.chunks import attend_chunks
from paceline_kernels.attention.triton.launches import (
    CHUNKS,
    FOLD_PARTS,
    FOLD_WARPS,
    ROW_STEP,
    ChunkLaunch,
    SplitLaunch,
    splits_launch,
)
from paceline_kernels.attention.triton.splits import attend_splits, fold_partials
from paceline_kernels.errors import KernelArgumentError
from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.splits import Splits

# More than any context has, and so little that nothing added to it leaves 32 bits.
_NO_WINDOW = 2**30
_MIN_HEAD_DIM, _MAX_HEAD_DIM = 64, 256
_MAX_PACKED = 64
# Where no GPU is asked, because kernels are interpreted or only compiled.
_DEFAULT_MULTIPROCESSORS = 2


@dataclass(frozen=True, slots=True)
class _KernelInputs:
    """What both kernels need, checked."""

    out: torch.Tensor
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    block_tables: torch.Tensor
    cu_seqlens: torch.Tensor
    context_lens: torch.Tensor
    window: int
    scale: float
    softcap: float | None
    group: int  # query heads of a KV head
    padded: int  # dimensions of a head, as kernels hold it
    short_tokens: int  # of a row that counts as short
    max_query_len: int  # tokens of any row
    packed: int  # its query heads, times tokens, and a little room

    @property
    def inputs(self) -> tuple[object, ...]:
        """What both kernels are given first but for where they write, queries and caches, in their order."""
        num_rows, num_blocks = self.block_tables.shape
        rows = (self.block_tables, self.cu_seqlens, self.context_lens, num_rows, self.query.stride(0), num_blocks)
        return (self.key_scales, self.value_scales, *rows, self.window, self.scale, self.softcap or 1.0)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    splits: Splits,
    short_tokens: int,
    max_query_len: int,
) -> torch.Tensor:
    architecture.check_fp8("paged_attention", key_cache)
    num_tokens, num_heads, head_dim = query.shape
    group = num_heads // key_cache.shape[1]
    padded = max(_MIN_HEAD_DIM, triton.next_power_of_2(head_dim))
    if padded > _MAX_HEAD_DIM or head_dim % 8 or scale <= 0:
        problem = f"a head of {head_dim} dimensions is no multiple of 8 up to {_MAX_HEAD_DIM}, or the scale is {scale}"
        raise KernelArgumentError("paged_attention", problem)
    if splits is Splits.FIXED:  # whether a token comes alone or in a chunk, computed first or again: one kernel
        short_tokens = 0
    place = (architecture.current(), padded, min(key_cache.element_size(), 2))
    launch = splits_launch(*place[:2], key_cache, group * short_tokens, capped=softcap is not None)
    packed = max(launch.min_packed, triton.next_power_of_2(group * short_tokens))
    if packed > _MAX_PACKED:
        problem = f"{short_tokens} tokens of {group} heads per KV head are more than {_MAX_PACKED} together"
        raise KernelArgumentError("paged_attention", problem)
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    if not num_tokens:
        return out
    call = _KernelInputs(
        out=out,
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        key_scales=key_scales,
        value_scales=value_scales,
        block_tables=block_tables,
        cu_seqlens=cu_seqlens,
        context_lens=context_lens,
        window=_NO_WINDOW if window is None else min(window, _NO_WINDOW),
        scale=scale,
        softcap=softcap,
        group=group,
        padded=padded,
        short_tokens=short_tokens,
        max_query_len=max_query_len,
        packed=packed,
    )
    if short_tokens:
        _launch_splits(call, launch)
    if max_query_len > short_tokens:  # else no row is a chunk
        _launch_chunks(call, CHUNKS[place])
    return out


def _launch_splits(call: _KernelInputs, launch: SplitLaunch) -> None:
    """All rows of few tokens."""
    head_dim = call.query.shape[2]
    num_kv_heads, block_size = call.key_cache.shape[1:3]
    num_programs = launch.programs * _num_multiprocessors(call.query.device)
    num_partials = 2 * num_programs
    partials = torch.empty((num_partials, call.packed, head_dim), dtype=torch.float32, device=call.query.device)
    statistics = torch.empty((num_partials, 2, call.packed), dtype=torch.float32, device=call.query.device)
    caches: tuple[object, ...] = (call.key_cache, call.value_cache)
    if launch.bulk:
        caches = (_described(call.key_cache, launch.tile), _described(call.value_cache, launch.tile))
    attend_splits[(num_programs,)](
        call.out,
        partials,
        statistics,
        call.query,
        *caches,
        *call.inputs,
        KV_HEADS=num_kv_heads,
        GROUP=call.group,
        BLOCK_SIZE=block_size,
        DIM=head_dim,
        DIM_PADDED=call.padded,
        SHORT=call.short_tokens,
        PACKED=call.packed,
        TILE=launch.tile,
        CAPPED=call.softcap is not None,
        WINDOWED=call.window != _NO_WINDOW,
        TURNED=launch.turned,
        STEP=ROW_STEP,
        BULK=launch.bulk,
        EARLY=_folds_early(launch),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        maxnreg=launch.max_registers,
    )
    _launch_fold(call, launch, partials, statistics, num_programs)


def _described(cache: torch.Tensor, tile: int) -> TensorDescriptor:
    """A cache as slots of all blocks and KV heads, of which `tile` are copied at a time.

    A captured graph holds it by value, so that it lives as long as the cache.
    """
    head_dim = cache.shape[-1]
    return TensorDescriptor(cache, [cache.numel() // head_dim, head_dim], [head_dim, 1], [tile, head_dim])


def _folds_early(launch: SplitLaunch) -> bool:
    """Whether the fold is launched while programs still run, which GPUs that copy in bulk can do."""
    return launch.bulk and not triton.knobs.runtime.interpret


def _launch_fold(
    call: _KernelInputs, launch: SplitLaunch, partials: torch.Tensor, statistics: torch.Tensor, num_programs: int
) -> None:
    """What the programs of `attend_splits` left, one program per row and query head."""
    _, num_heads, head_dim = call.query.shape
    num_rows, tokens = call.context_lens.shape[0], min(call.short_tokens, call.max_query_len)
    fold_partials[(num_rows, num_heads * tokens)](
        call.out,
        partials,
        statistics,
        call.cu_seqlens,
        call.context_lens,
        num_rows,
        num_programs,
        call.window,
        KV_HEADS=call.key_cache.shape[1],
        GROUP=call.group,
        DIM=head_dim,
        DIM_PADDED=call.padded,
        SHORT=call.short_tokens,
        PACKED=call.packed,
        TILE=launch.tile,
        STEP=ROW_STEP,
        PARTS=FOLD_PARTS,
        EARLY=_folds_early(launch),
        num_warps=FOLD_WARPS,
        launch_pdl=_folds_early(launch),
    )


def _launch_chunks(call: _KernelInputs, launch: ChunkLaunch) -> None:
    """All rows of more tokens."""
    num_tokens, _, head_dim = call.query.shape
    num_kv_heads, block_size = call.key_cache.shape[1:3]
    num_rows = call.context_lens.shape[0]
    # Only the device knows how many tiles there are: never more than these.
    num_tiles = num_tokens // (launch.rows // call.group) + num_rows
    attend_chunks[(num_tiles * num_kv_heads,)](
        call.out,
        call.query,
        call.key_cache,
        call.value_cache,
        *call.inputs,
        KV_HEADS=num_kv_heads,
        GROUP=call.group,
        BLOCK_SIZE=block_size,
        DIM=head_dim,
        DIM_PADDED=call.padded,
        SHORT=call.short_tokens,
        ROWS=launch.rows,
        TILE=launch.tile,
        CAPPED=call.softcap is not None,
        WINDOWED=call.window != _NO_WINDOW,
        STEP=ROW_STEP,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _DEFAULT_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count

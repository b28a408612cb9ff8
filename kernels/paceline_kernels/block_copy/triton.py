"""block_copy for GPUs: all layers and copies in one launch, as plain words. Knows blocks; not who owns them."""

import torch
import triton
import triton.language as tl

from paceline_kernels.gpu import architecture
from paceline_kernels.gpu.architecture import Architecture

# Words per program of four warps: 4 kB of 4-byte words, two 16-byte loads per thread.
BLOCK = {Architecture.SM_80: 1024, Architecture.SM_90: 1024}
_NUM_WARPS = 4


def block_copy(cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    """See `paceline_kernels.block_copy.block_copy`; block ids are where kernels read them."""
    num_layers, num_blocks = cache.shape[:2]
    words = cache.view(num_layers, num_blocks, -1)
    words = words.view(torch.int32 if words.shape[2] * words.element_size() % 4 == 0 else torch.uint8)
    if not sources.shape[0] or not words.numel():
        return
    block = BLOCK[architecture.current()]
    grid = (sources.shape[0], num_layers, triton.cdiv(words.shape[2], block))
    block_copy_kernel[grid](words, sources, destinations, num_blocks, words.shape[2], block, num_warps=_NUM_WARPS)


# Block ids lie anywhere in what the host has sent, and free memory says how many blocks there are: neither must be
# another compilation.
@triton.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["sources", "destinations"])
def block_copy_kernel(
    cache,  # [layers, num_blocks, NUM_WORDS]
    sources,  # and the next: [copies] int32
    destinations,
    num_blocks,
    NUM_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program per copy, layer and BLOCK words; nothing is copied where an id is no block's."""
    copy = tl.program_id(0)
    source, destination = tl.load(sources + copy), tl.load(destinations + copy)
    exists = (source >= 0) & (source < num_blocks) & (destination >= 0) & (destination < num_blocks)
    first = tl.program_id(1).to(tl.int64) * num_blocks
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = exists & (columns < NUM_WORDS)
    words = tl.load(cache + (first + source) * NUM_WORDS + columns, mask=inside)
    tl.store(cache + (first + destination) * NUM_WORDS + columns, words, mask=inside)

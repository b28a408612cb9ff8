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
    num_layers, num_blocks = cache.shape[:2]
    words = cache.view(num_layers, num_blocks, -1)
    words = words.view(torch.int32 if words.shape[2] * words.element_size() % 4 == 0 else torch.uint8)
    if not sources.shape[0] or not words.numel():
        return
    pairs = torch.empty((2, sources.shape[0]), dtype=torch.int32, device=cache.device)
    pairs.copy_(torch.stack((sources, destinations)), non_blocking=True)
    block = BLOCK[architecture.current()]
    grid = (sources.shape[0], num_layers, triton.cdiv(words.shape[2], block))
    block_copy_kernel[grid](words, pairs, sources.shape[0], num_blocks, words.shape[2], block, num_warps=_NUM_WARPS)


@triton.jit(do_not_specialize=["num_copies"])
def block_copy_kernel(cache, pairs, num_copies, NUM_BLOCKS: tl.constexpr, NUM_WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """A program per copy, layer and BLOCK words. cache: [layers, NUM_BLOCKS, NUM_WORDS]; pairs: [2, num_copies]."""
    copy = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * NUM_BLOCKS
    source = (first + tl.load(pairs + copy)) * NUM_WORDS
    destination = (first + tl.load(pairs + num_copies + copy)) * NUM_WORDS
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < NUM_WORDS
    tl.store(cache + destination + columns, tl.load(cache + source + columns, mask=inside), mask=inside)

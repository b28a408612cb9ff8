"""block_copy for CPUs: plain memory copies by numpy, in the calling thread. Copies are few: it is not compiled."""

import torch


def block_copy(cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    blocks = cache.numpy()
    for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
        blocks[:, destination] = blocks[:, source]

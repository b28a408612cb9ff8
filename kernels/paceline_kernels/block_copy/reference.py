"""block_copy in plain torch, one block of one layer at a time."""

import torch


def block_copy(cache: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    for layer in range(cache.shape[0]):
        for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
            cache[layer, destination] = cache[layer, source].clone()

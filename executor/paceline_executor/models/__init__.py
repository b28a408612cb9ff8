"""Models: how each architecture computes its logits out of operations of `paceline_kernels`. See `registry`."""

"""The GPU kernels on a GPU: their tests, and their times beside those of torch and of other stacks."""

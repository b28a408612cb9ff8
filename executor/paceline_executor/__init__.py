"""The executor: owns the weights, the KV cache and the rows of one device, and runs what a scheduler plans."""

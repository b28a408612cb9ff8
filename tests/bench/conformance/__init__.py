"""The gateway before clients of others: each runs from an environment of its own, and judges by what it read."""

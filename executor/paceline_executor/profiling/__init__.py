"""Traces of steps: who records what the step thread does, and what kernels achieved. Knows no plans, rows or models."""

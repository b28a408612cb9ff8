"""Chaos: a load whose every token is checked, faults done to the processes and links under it, and what came of that.

The same engine for `paceline chaos`, for tests/faults and for the soak.
"""

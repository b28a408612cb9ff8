"""Where executors stand, as operators see it."""

from enum import IntEnum


class ExecutorState(IntEnum):
    """Where an executor stands for its scheduler; the numbers are those of paceline.v1.ExecutorState."""

    CONNECTING = 1
    SYNCING = 2
    READY = 3
    DRAINING = 4
    LOST = 5

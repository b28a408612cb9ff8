"""Steps of a simulated executor that fail as a whole, because of a request in them, and what it makes of that.

Apart from `executor`, because its service and tests of the core without one name them too.
"""

from paceline.plan.values import FailedStep, RecordId

MAX_BLAMED = 2


class SimulatedStepError(Exception):
    """A step failed: it advanced no row, and nothing that was to follow it in its epoch runs."""

    def __init__(self, failed: FailedStep) -> None:
        super().__init__(failed.message)
        self.failed = failed


class SimulatedDeviceError(SimulatedStepError):
    """A step failed, and the executor takes itself for the cause: its process ends."""


class Blame:
    """The requests that failed alone since a step last computed something. One too many clears them all."""

    def __init__(self) -> None:
        self._requests: set[tuple[str, str]] = set()

    def is_nobodys(self) -> None:
        """A step has computed something."""
        self._requests.clear()

    def is_executors(self, running: list[RecordId]) -> bool:
        """A step of these failed: tell whether that is the executor's doing."""
        if len(running) == 1:
            self._requests |= {(key.tenant, key.request_id) for key in running}
        return len(self._requests) > MAX_BLAMED

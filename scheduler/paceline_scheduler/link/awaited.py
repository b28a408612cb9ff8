"""Which executors are awaited, as `leadership` says. Refuses to know claims and streams."""

from collections.abc import Collection

from paceline.plan.values import Claim
from paceline_scheduler.link.executor_record import ExecutorRecord

SPLIT_AFTER_S = 1.5  # a dead scheduler would have lost all executors by then


class Awaited:
    """All are awaited from the start, and from each displacement."""

    def __init__(self, records: Collection[ExecutorRecord]) -> None:
        self._records = records
        self._is_looking = True
        self._driving_since_s: float | None = None  # any executor
        self._is_split_possible = False

    @property
    def is_empty(self) -> bool:
        return not self._is_looking and not any(record.is_awaited for record in self._records)

    @property
    def active(self) -> Claim | None:
        """Returns None if unknown. While this scheduler waits for executors, another one drives them."""
        if self.is_empty or (self._driving_since_s is not None and not self._is_split_possible):
            return None
        holders = [record.holder for record in self._records if record.is_awaited and record.holder is not None]
        return max(holders, default=None)

    @property
    def split_at_s(self) -> float | None:
        """A scheduler that still holds some executors then must be alive."""
        if self._driving_since_s is None or self._is_split_possible:
            return None
        return self._driving_since_s + SPLIT_AFTER_S

    def expect_all(self) -> None:
        self._is_looking, self._driving_since_s, self._is_split_possible = False, None, False
        for record in self._records:
            record.is_awaited = True

    def expect_held(self, record: ExecutorRecord) -> None:
        if record.holder is not None and self._driving_since_s is None:
            record.is_awaited = True

    def resolved_by_welcome(self, now_s: float) -> None:
        """Others follow soon, unless their holder lives."""
        if self._driving_since_s is None:
            self._driving_since_s = now_s

    def advance(self, now_s: float) -> None:
        if (split_at_s := self.split_at_s) is not None and now_s >= split_at_s:
            self._is_split_possible = True

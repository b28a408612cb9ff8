"""Which executors are awaited: until each was attached or is lost, a new request cannot be told from an old one.

Knows the records of executors and the time it is given. Refuses to know claims and streams.
"""

from collections.abc import Collection

from paceline_scheduler.holder import Holder
from paceline_scheduler.link.executor_record import ExecutorRecord

SPLIT_AFTER_S = 1.5  # whoever had died would have lost all executors by then


class Awaited:
    """All executors from the start, and again from each displacement."""

    def __init__(self, records: Collection[ExecutorRecord]) -> None:
        self._records = records  # those that are looked for, at any time
        self._is_looking = True
        self._driving_since_s: float | None = None  # an executor, since all were awaited last
        self._is_split_possible = False

    @property
    def is_empty(self) -> bool:
        return not self._is_looking and not any(record.is_awaited for record in self._records)

    @property
    def active(self) -> Holder | None:
        """Who drives executors while this scheduler has none, or must wait for some; None if unknown."""
        if self.is_empty or (self._driving_since_s is not None and not self._is_split_possible):
            return None
        holders = [record.holder for record in self._records if record.is_awaited and record.holder is not None]
        return max(holders, key=lambda holder: (holder.term, holder.scheduler_id), default=None)

    @property
    def split_at_s(self) -> float | None:
        """When another scheduler that still holds some executors must be alive, while this one has others."""
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
        """Expect other executors soon, unless their holder lives: this scheduler drives one."""
        if self._driving_since_s is None:
            self._driving_since_s = now_s

    def advance(self, now_s: float) -> None:
        if (split_at_s := self.split_at_s) is not None and now_s >= split_at_s:
            self._is_split_possible = True

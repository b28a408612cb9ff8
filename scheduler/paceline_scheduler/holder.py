"""Who drives executors. Apart, because core, edge and links all name it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """An acting scheduler. `address` is where its clients reach it, as `host:port`; empty when it did not say."""

    scheduler_id: str
    term: int
    address: str = ""

    def __str__(self) -> str:
        return f"{self.address or f'scheduler {self.scheduler_id}'} (term {self.term})"

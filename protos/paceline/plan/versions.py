"""The versions of the plan protocol. Apart from `values`, which all have in common."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProtocolRange:
    """The versions of the plan protocol that one side speaks, both ends included; made of what a peer says as it is."""

    lowest: int
    highest: int

    def __contains__(self, version: int) -> bool:
        return self.lowest <= version <= self.highest

    def __str__(self) -> str:
        return f"{self.lowest} to {self.highest}"

    def highest_in_common(self, other: "ProtocolRange") -> int | None:
        """Return the highest version that both speak, None if there is none."""
        version = min(self.highest, other.highest)
        return version if version >= max(self.lowest, other.lowest) else None


PROTOCOLS = ProtocolRange(1, 2)
GROUPING_PROTOCOL = 2
"""From this version on several plans, or results, may travel as one message."""

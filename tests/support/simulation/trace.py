"""What happened in a run, in order: a hash of all of it, and the last of it in words.

Apart from the world that tells it, because a run asks it afterwards.
"""

from collections import deque
from collections.abc import Callable
from hashlib import blake2b

_STORY_LENGTH = 40


class Trace:
    """Takes events. `is_kept_whole` keeps the whole story instead of its end."""

    def __init__(self, *, is_kept_whole: bool = False) -> None:
        self.num_events = 0
        self.is_kept_whole = is_kept_whole
        self._hash = blake2b(digest_size=16)
        self._lines: deque[tuple[float, str, str | Callable[[], str]]] = deque(
            maxlen=None if is_kept_whole else _STORY_LENGTH
        )

    def add(self, now_s: float, node: str, what: str) -> None:
        self.num_events += 1
        self._lines.append((now_s, node, what))
        self._hash.update(f"{now_s!r} {node} {what}\n".encode())

    def add_bytes(self, now_s: float, node: str, data: bytes, tell: Callable[[], str]) -> None:
        """The same of a message, which is told in words only if somebody reads the story."""
        self.num_events += 1
        self._lines.append((now_s, node, tell))
        self._hash.update(f"{now_s!r} {node} ".encode())
        self._hash.update(data)

    def remark(self, now_s: float, node: str, what: str) -> None:
        """Tell something in the story only: what the hash must not depend on, such as log lines."""
        self._lines.append((now_s, node, what))

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def story(self) -> str:
        lines = ((now_s, node, what if isinstance(what, str) else what()) for now_s, node, what in self._lines)
        return "\n".join(f"{now_s:9.4f} s  {node:<14} {what}" for now_s, node, what in lines)

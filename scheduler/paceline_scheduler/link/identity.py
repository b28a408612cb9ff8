"""Who this scheduler is for the executors: an id per boot, a term that only rises, and one stream to each of them."""

from collections.abc import Iterator
from contextlib import contextmanager

from paceline_scheduler.errors import StreamEndedError, TermSupersededError
from paceline_scheduler.link.messages import ExecutorInfo, Hello


class Identity:
    """The claim this scheduler makes. It is *acting* from its first welcome until another scheduler displaces it."""

    def __init__(self, scheduler_id: str) -> None:
        self.scheduler_id = scheduler_id
        self.term = 1
        self.is_acting = False
        self._addresses: dict[int, str] = {}  # of the executors that have a stream, by incarnation

    @contextmanager
    def only_stream_to(self, incarnation: int, address: str) -> Iterator[None]:
        """Be the only stream to an executor; raises StreamEndedError when it has one under another address.

        Two of them would end each other for ever, since a scheduler that attaches again replaces its own stream.
        """
        other = self._addresses.setdefault(incarnation, address)
        if other != address:
            raise StreamEndedError(f"the executor at {address} is the one at {other}")
        try:
            yield
        finally:
            del self._addresses[incarnation]

    def hello(self) -> Hello:
        """Return the claim as it opens a plan stream."""
        return Hello(self.scheduler_id, self.term)

    def consider(self, info: ExecutorInfo) -> None:
        """Rise above the highest term seen, unless a scheduler that is alive holds that executor."""
        is_free = info.holder_scheduler_id in ("", self.scheduler_id)
        if (is_free or not self.is_acting) and info.term >= self.term and info.holder_scheduler_id != self.scheduler_id:
            self.term = info.term + 1

    def step_down(self, refusal: TermSupersededError) -> bool:
        """Rise above a scheduler that refused us and wait behind it; True when we were acting until now."""
        was_acting, self.is_acting = self.is_acting, False
        self.term = max(self.term, refusal.holder_term) + 1
        return was_acting

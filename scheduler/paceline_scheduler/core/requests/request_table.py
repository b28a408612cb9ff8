"""All requests that are not over: by the handle of who listens and by key, with what is due when.

The one place that knows whether somebody listens. Refuses to know rows, blocks and the queue.

A request is *open* from its submission until its end was decided: tokens are delivered for it. It stays known by its
key until it has left its row. What a resumable request generated is *kept* after that, until its client has said that
it has everything, or `KEEP_S`.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from paceline.plan.values import FinishReason, RecordId
from paceline_scheduler.core.live import RESUME_WINDOW_S, LiveRequest
from paceline_scheduler.core.queue.deadlines import Deadlines
from paceline_scheduler.core.request import Request

KEEP_S = 60.0
MAX_KEPT = 4096
MAX_KEPT_BYTES = 64 * 1024 * 1024
_LOGPROB_BYTES = 128  # of one in memory, about
_KEPT_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED)


def heard_by(request: Request, again: Request) -> Request:
    """Return a request with the listener that it has when it is sent again.

    The prompt stays: rendered anew a chat may give other tokens, such as another date.
    """
    return replace(
        request,
        handle=again.handle,
        attachment=again.attachment,
        waited_s=again.waited_s,
        deadline_s=again.deadline_s,
    )


class RequestTable:
    """The requests of one scheduler."""

    def __init__(self) -> None:
        self._by_handle: dict[int, LiveRequest] = {}
        self._by_key: dict[RecordId, LiveRequest] = {}
        self._deadlines = Deadlines(lambda live, at_s: self.is_open(live) and live.request.deadline_s == at_s)
        self._windows = Deadlines(lambda live, at_s: self.is_open(live) and live.detached_until_s == at_s)
        self._kept: OrderedDict[RecordId, tuple[float, LiveRequest]] = OrderedDict()  # and until when, oldest first
        self._num_kept_bytes = 0
        self._num_unheard = 0

    def __len__(self) -> int:
        """Return how many requests are open."""
        return len(self._by_handle)

    def all(self) -> Iterable[LiveRequest]:
        """Return every request that is open or has a row."""
        return self._by_key.values()

    @property
    def has_deadlines(self) -> bool:
        """Whether any request has a deadline."""
        return not self._deadlines.is_empty

    def new_handle(self) -> int:
        """Return a handle for a request that nobody listens to yet."""
        self._num_unheard += 1
        return -self._num_unheard

    def add(self, live: LiveRequest) -> None:
        """Take in a request; one of the same key is not found by it any more."""
        self._by_handle[live.request.handle] = self._by_key[live.request.key] = live
        self._watch(live)

    def is_open(self, live: LiveRequest) -> bool:
        """Tell whether tokens of a request are still delivered."""
        return self._by_handle.get(live.request.handle) is live

    def by_handle(self, handle: int) -> LiveRequest | None:
        """Return the open request that a listener means."""
        return self._by_handle.get(handle)

    def by_key(self, key: RecordId) -> LiveRequest | None:
        """Return the request of a key that is open or has a row."""
        return self._by_key.get(key)

    def close(self, live: LiveRequest) -> None:
        """Its end is decided: nothing more is delivered for it."""
        self._by_handle.pop(live.request.handle, None)

    def remove(self, live: LiveRequest) -> None:
        """It has left its row as well."""
        if self._by_key.get(live.request.key) is live:
            del self._by_key[live.request.key]

    # Listeners

    def heard(self) -> Iterable[LiveRequest]:
        """Return the open requests that somebody listens to."""
        return (live for live in self._by_handle.values() if live.was_heard and live.detached_until_s is None)

    @property
    def may_be_unheard(self) -> bool:
        """Whether there may be open requests that nobody listens to; False is certain."""
        return not self._windows.is_empty

    def heard_handles(self) -> list[int]:
        """Return the handles of those that somebody listens to."""
        return [live.request.handle for live in self.heard()]

    def listen(self, live: LiveRequest, request: Request) -> None:
        """The client has come back with `request`, the same one: it is delivered to that handle from now on."""
        self.close(live)
        live.request, live.detached_until_s = heard_by(live.request, request), None
        self._by_handle[request.handle] = live
        self._watch(live)

    def detach(self, live: LiveRequest, now: float) -> None:
        """Nobody listens any more, for a while."""
        live.detached_until_s = now + RESUME_WINDOW_S
        self._windows.watch(live, live.detached_until_s, len(self))

    def _watch(self, live: LiveRequest) -> None:
        if live.request.deadline_s is not None:
            self._deadlines.watch(live, live.request.deadline_s, len(self))

    # What is due

    def pop_late(self, now: float) -> list[LiveRequest]:
        """Return the open requests whose deadline has passed."""
        return self._deadlines.pop_passed(now)

    def pop_abandoned(self, now: float) -> list[LiveRequest]:
        """Return the open requests to which nobody has come back in time."""
        return self._windows.pop_passed(now)

    def next_s(self) -> float | None:
        """Return when something is due next."""
        if self._deadlines.is_empty and self._windows.is_empty and not self._kept:
            return None
        times = [self._deadlines.next_s(), self._windows.next_s()]
        if self._kept:
            times.append(next(iter(self._kept.values()))[0])
        return min((at_s for at_s in times if at_s is not None), default=None)

    # Outputs that somebody may come back for

    def keep(self, live: LiveRequest, now: float) -> None:
        """Keep the output of a request that is over, if its client may ask for it again."""
        wanted = live.request.is_resumable and not live.record.is_acknowledged
        if not wanted or live.final is None or live.final.reason not in _KEPT_REASONS:
            return
        self.drop_old(now)
        before = self.kept(live.request.key)
        if self.by_key(live.request.key) is not None or (before is not None and before.attempt > live.attempt):
            return  # the id has been used again since
        self.drop_kept(live.request.key)
        self._kept[live.request.key] = (now + KEEP_S, live)
        self._num_kept_bytes += _num_bytes(live)
        while len(self._kept) > MAX_KEPT or self._num_kept_bytes > MAX_KEPT_BYTES:
            self.drop_kept(next(iter(self._kept)))

    def kept(self, key: RecordId) -> LiveRequest | None:
        """Return the request of a key that is over and whose output is kept."""
        found = self._kept.get(key)
        return None if found is None else found[1]

    def drop_kept(self, key: RecordId) -> None:
        """Keep a request's output no longer, if it was kept."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._num_kept_bytes -= _num_bytes(found[1])

    def drop_old(self, now: float) -> None:
        """Keep nothing past its time."""
        while self._kept and next(iter(self._kept.values()))[0] <= now:
            self.drop_kept(next(iter(self._kept)))


def _num_bytes(live: LiveRequest) -> int:
    """Return what keeping a request costs, about."""
    num_alternatives = 1 + (live.request.num_logprobs or 0)
    num_logprobs = 0 if live.output.logprobs is None else len(live.output.logprobs.tokens) * num_alternatives
    num_logprobs += len(live.output.prompt_logprobs or ()) * (1 + (live.request.num_prompt_logprobs or 0))
    return 4 * live.num_known_tokens + len(live.request.origin) + _LOGPROB_BYTES * num_logprobs

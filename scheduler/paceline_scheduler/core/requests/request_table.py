"""All requests that are not over: by the handle of who listens and by key, with what is due when.

Refuses to know rows, blocks and the queue.

A request is *open* from its submission until its end was decided. It stays known by its key until it has left its row.
The output of a resumable request is *retained* after that, until its client has everything, or for `RETAIN_S`.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from paceline.plan.values import FinishReason, RecordId
from paceline_scheduler.core.live import RESUME_WINDOW_S, LiveRequest
from paceline_scheduler.core.queue.deadlines import Deadlines
from paceline_scheduler.core.request import Request

RETAIN_S = 60.0
MAX_RETAINED = 4096
MAX_RETAINED_BYTES = 64 * 1024 * 1024
_LOGPROB_BYTES = 128  # of one in memory, about
_KEPT_REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED)


def with_listener_of(request: Request, again: Request) -> Request:
    """The prompt stays: a chat rendered again may give other tokens, such as another date."""
    return replace(
        request,
        handle=again.handle,
        attachment=again.attachment,
        waited_s=again.waited_s,
        deadline_s=again.deadline_s,
    )


class RequestTable:
    def __init__(self) -> None:
        self._by_handle: dict[int, LiveRequest] = {}
        self._by_key: dict[RecordId, LiveRequest] = {}
        self._deadlines, self._windows = Deadlines(), Deadlines()
        self.restored()
        self._retained: OrderedDict[RecordId, tuple[float, LiveRequest]] = OrderedDict()  # until when, oldest first
        self._num_retained_bytes = 0
        self._num_without_listener = 0

    def __len__(self) -> int:
        return len(self._by_handle)

    def restored(self) -> None:
        """Be asked by its own deadlines, after all its values were set from outside."""
        self._deadlines.is_due = lambda live, at_s: self.is_open(live) and at_s in _due_s(live)
        self._windows.is_due = lambda live, at_s: self.is_open(live) and live.detached_until_s == at_s

    def all(self) -> Iterable[LiveRequest]:
        return self._by_key.values()

    @property
    def has_deadlines(self) -> bool:
        return not self._deadlines.is_empty

    def new_handle(self) -> int:
        """The request has no listener."""
        self._num_without_listener += 1
        return -self._num_without_listener

    def add(self, live: LiveRequest) -> None:
        """Hides a former request of the same key."""
        self._by_handle[live.request.handle] = self._by_key[live.request.key] = live
        self.watch(live)

    def is_open(self, live: LiveRequest) -> bool:
        return self._by_handle.get(live.request.handle) is live

    def by_handle(self, handle: int) -> LiveRequest | None:
        return self._by_handle.get(handle)

    def by_key(self, key: RecordId) -> LiveRequest | None:
        return self._by_key.get(key)

    def close(self, live: LiveRequest) -> None:
        """Delivers nothing more for it."""
        self._by_handle.pop(live.request.handle, None)

    def remove(self, live: LiveRequest) -> None:
        if self._by_key.get(live.request.key) is live:
            del self._by_key[live.request.key]

    def with_listener(self) -> Iterable[LiveRequest]:
        return (live for live in self._by_handle.values() if live.had_listener and live.detached_until_s is None)

    @property
    def may_be_detached(self) -> bool:
        """False is certain."""
        return not self._windows.is_empty

    def listening_handles(self) -> list[int]:
        return [live.request.handle for live in self.with_listener()]

    def listen(self, live: LiveRequest, request: Request) -> None:
        """`request` is the same one with another handle."""
        self.close(live)
        live.request, live.detached_until_s = with_listener_of(live.request, request), None
        self._by_handle[request.handle] = live
        self.watch(live)

    def detach(self, live: LiveRequest, now: float) -> None:
        live.detached_until_s = now + RESUME_WINDOW_S
        self._windows.watch(live, live.detached_until_s, len(self))

    def watch(self, live: LiveRequest) -> None:
        """As it is due now."""
        for at_s in _due_s(live):
            if at_s is not None:
                self._deadlines.watch(live, at_s, len(self))

    def pop_late(self, now: float) -> list[LiveRequest]:
        """Past their deadline, or an outage that was too long."""
        return self._deadlines.pop_passed(now)

    def pop_abandoned(self, now: float) -> list[LiveRequest]:
        return self._windows.pop_passed(now)

    def next_s(self) -> float | None:
        if self._deadlines.is_empty and self._windows.is_empty and not self._retained:
            return None
        times = [self._deadlines.next_s(), self._windows.next_s()]
        if self._retained:
            times.append(next(iter(self._retained.values()))[0])
        return min((at_s for at_s in times if at_s is not None), default=None)

    def retain(self, live: LiveRequest, now: float) -> None:
        """Its client may ask for it again."""
        wanted = live.request.is_resumable and not live.record.is_acknowledged
        if not wanted or live.final is None or live.final.reason not in _KEPT_REASONS:
            return
        self.drop_expired(now)
        before = self.retained(live.request.key)
        if self.by_key(live.request.key) is not None or (before is not None and before.attempt > live.attempt):
            return
        self.drop_retained(live.request.key)
        self._retained[live.request.key] = (now + RETAIN_S, live)
        self._num_retained_bytes += _num_bytes(live)
        while len(self._retained) > MAX_RETAINED or self._num_retained_bytes > MAX_RETAINED_BYTES:
            self.drop_retained(next(iter(self._retained)))

    def retained(self, key: RecordId) -> LiveRequest | None:
        found = self._retained.get(key)
        return None if found is None else found[1]

    def drop_retained(self, key: RecordId) -> None:
        found = self._retained.pop(key, None)
        if found is not None:
            self._num_retained_bytes -= _num_bytes(found[1])

    def drop_expired(self, now: float) -> None:
        while self._retained and next(iter(self._retained.values()))[0] <= now:
            self.drop_retained(next(iter(self._retained)))


def _due_s(live: LiveRequest) -> tuple[float | None, float | None]:
    return live.request.deadline_s, live.phases.outage_until_s


def _num_bytes(live: LiveRequest) -> int:
    num_alternatives = 1 + (live.request.num_logprobs or 0)
    num_logprobs = 0 if live.output.logprobs is None else len(live.output.logprobs.tokens) * num_alternatives
    num_logprobs += len(live.output.prompt_logprobs or ()) * (1 + (live.request.num_prompt_logprobs or 0))
    return 4 * live.num_known_tokens + len(live.request.origin) + _LOGPROB_BYTES * num_logprobs

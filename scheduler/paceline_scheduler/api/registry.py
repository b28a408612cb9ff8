"""Which requests are open here: by key, by the handle of each completion, and by the call that wants their output.

Whoever closes something here has told the backend and the client.
"""

from paceline.plan.values import RecordId
from paceline_scheduler.api.outbox import Outbox
from paceline_scheduler.api.stream import RequestStream, StreamedCompletion, StreamState


class OpenRequests:
    def __init__(self) -> None:
        self.running: dict[int, StreamedCompletion] = {}
        """By handle. Every row of every step is looked up here; changed only here."""
        self._by_key: dict[RecordId, RequestStream] = {}  # by the key of completion 0
        self._by_call: dict[Outbox, dict[RequestStream, None]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def by_key(self, key: RecordId) -> RequestStream | None:
        return self._by_key.get(key)

    def calls(self) -> tuple[Outbox, ...]:
        return tuple(self._by_call)

    def of_call(self, outbox: Outbox) -> tuple[RequestStream, ...]:
        return tuple(self._by_call[outbox])

    def begin_call(self, outbox: Outbox) -> None:
        """`end_call` must follow."""
        self._by_call[outbox] = {}

    def end_call(self, outbox: Outbox) -> None:
        assert not self._by_call[outbox], "its streams end first"
        del self._by_call[outbox]

    def add(self, stream: RequestStream) -> None:
        """Only `before` may have its key."""
        assert self._by_key.get(stream.key) is stream.before, "one stream per request"
        self._by_key[stream.key] = stream
        self._by_call[stream.outbox][stream] = None
        stream.outbox.num_open += len(stream.handles)

    def run(self, stream: RequestStream, completions: list[StreamedCompletion]) -> None:
        """The client lacks the finish of these completions."""
        stream.state = StreamState.RUNNING
        stream.outbox.num_open -= len(stream.handles) - len(completions)
        stream.running = completions
        self.running.update((completion.handle, completion) for completion in completions)

    def end_completion(self, completion: StreamedCompletion) -> None:
        stream = completion.stream
        if len(stream.running) == 1:
            self.forget(stream)
            return
        stream.running.remove(completion)
        del self.running[completion.handle]
        stream.outbox.num_open -= 1

    def _give_back_key(self, stream: RequestStream) -> None:
        before = stream.before
        while before is not None and before.state is StreamState.ENDED:
            before = before.before
        if before is None:
            del self._by_key[stream.key]
        else:
            self._by_key[stream.key] = before

    def forget(self, stream: RequestStream) -> None:
        """Its outbox is still sent. The second time nothing happens."""
        if stream.state is StreamState.ENDED:
            return
        stream.outbox.num_open -= len(stream.running) or len(stream.handles)
        stream.state = StreamState.ENDED
        if stream.waiting is not None:
            stream.waiting.reschedule(0.0)
        for completion in stream.running:
            del self.running[completion.handle]
        stream.running.clear()
        if self._by_key[stream.key] is stream:
            self._give_back_key(stream)
        del self._by_call[stream.outbox][stream]

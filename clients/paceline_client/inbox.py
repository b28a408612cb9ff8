"""What has arrived for one request: checked when it comes, kept until it is read.

Knows one request's output so far and its bound. Refuses to know where messages come from.
"""

import asyncio
from collections import deque

from paceline_client.errors import PacelineError, SlowConsumerError, StreamCorruptedError, StreamError
from paceline_client.hashing import EMPTY_HASH, rolling_hash
from paceline_client.results import Delta, FinishReason, Result, TokenLogprobs
from paceline_client.wire import Finish, ReceivedDelta


class Transcript:
    """The output of one request so far. Refuses a delta that does not continue it."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._hash = EMPTY_HASH
        self._attempt = 0

    def accept(self, received: ReceivedDelta) -> None:
        """Append a delta; `StreamCorruptedError` when tokens are missing, doubled or changed."""
        delta = received.delta
        if received.completion != 0:
            self._refuse(f"it is of completion {received.completion}, and only one was asked for")
        if delta.offset != len(self._token_ids):
            self._refuse(f"it starts at offset {delta.offset}, and {len(self._token_ids)} tokens have arrived")
        value = rolling_hash(delta.token_ids, self._hash)
        if value != received.rolling_hash:
            self._refuse(f"its rolling hash is {received.rolling_hash:016x}, and its tokens give {value:016x}")
        self._hash = value
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._attempt = max(self._attempt, delta.attempt)
        if delta.text:
            self._texts.append(delta.text)

    def result(self, finish: Finish, reason: FinishReason) -> Result:
        """The whole output."""
        return Result(
            request_id=self._request_id,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            matched_stop=finish.matched_stop,
            usage=finish.usage,
            attempt=self._attempt,
            logprobs=tuple(self._logprobs),
        )

    def _refuse(self, what: str) -> None:
        raise StreamCorruptedError(f"request {self._request_id}: a delta does not continue the output: {what}")


class Inbox:
    """The deltas of one request that nobody has read yet, bounded in tokens, then its end.

    The end, a result or an error, is read after the deltas that came before it, so nothing that arrived is lost.
    """

    def __init__(self, request_id: str, *, max_buffered_tokens: int) -> None:
        self._request_id = request_id
        self._max_buffered_tokens = max_buffered_tokens
        self._transcript = Transcript(request_id)
        self._unread: deque[Delta] = deque()
        self._num_unread_tokens = 0
        self._end: Result | PacelineError | None = None
        self._reader: asyncio.Future[None] | None = None  # who waits; a bare future, since one is made per token

    @property
    def request_id(self) -> str:
        """Whose inbox this is."""
        return self._request_id

    @property
    def is_empty(self) -> bool:
        """Whether a reader would have to wait."""
        return not self._unread and self._end is None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can arrive."""
        return self._end is not None

    def accept(self, received: ReceivedDelta) -> None:
        """Take a delta in. One that does not fit the output or the buffer ends the inbox with a `StreamError`.

        A finish without a reason does not end it: the failure that explains it travels beside it.
        """
        try:
            self._transcript.accept(received)
            self._store(received.delta)
            if received.finish is not None and received.finish.reason is not None:
                self._end = self._transcript.result(received.finish, received.finish.reason)
        except StreamError as error:
            self.fail(error)
        self._wake()

    def fail(self, error: PacelineError) -> None:
        """End with an error, unless it has ended."""
        self._end = self._end or error
        self._wake()

    async def get(self) -> Delta | Result:
        """The next delta, or the result at the end; raises the error that ended the request. One reader at a time."""
        while True:
            if self._unread:
                delta = self._unread.popleft()
                self._num_unread_tokens -= _weight(delta)
                return delta
            match self._end:
                case Result() as result:
                    return result
                case PacelineError() as error:
                    raise error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _store(self, delta: Delta) -> None:
        # One delta is taken whatever its size: it is as large as the server made it, not as the reader is slow.
        weight = _weight(delta)
        if self._unread and self._num_unread_tokens + weight > self._max_buffered_tokens:
            raise SlowConsumerError(
                f"request {self._request_id}: {self._num_unread_tokens} tokens were left unread, "
                f"the buffer holds {self._max_buffered_tokens}: read faster or raise Limits.max_buffered_tokens"
            )
        self._unread.append(delta)
        self._num_unread_tokens += weight


def _weight(delta: Delta) -> int:
    # A delta of text alone takes room too.
    return len(delta.token_ids) or 1

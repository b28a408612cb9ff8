"""What has arrived for one request: checked when it comes, kept until it is read.

Knows one request's output so far and its bound. Refuses to know where messages come from.
"""

import asyncio
from collections import deque

from paceline_client.errors import PacelineError, SlowConsumerError, StreamCorruptedError, StreamError
from paceline_client.hashing import EMPTY_HASH, rolling_hash
from paceline_client.results import Completion, Delta, FinishReason, Result, TokenLogprobs
from paceline_client.wire import Finish, ReceivedDelta


class Transcript:
    """The output of one completion so far. Refuses a delta that does not continue it."""

    def __init__(self, request_id: str, index: int) -> None:
        self.completion: Completion | None = None  # once it has ended
        self._request_id = request_id
        self._index = index
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._hash = EMPTY_HASH
        self._attempt = 0

    def accept(self, received: ReceivedDelta) -> None:
        """Append a delta; `StreamCorruptedError` when tokens are missing, doubled or changed."""
        delta = received.delta
        if self.completion is not None:
            raise corrupted(self._request_id, f"completion {self._index} has ended")
        if delta.offset != len(self._token_ids):
            what = f"it starts at offset {delta.offset}, and {len(self._token_ids)} tokens have arrived"
            raise corrupted(self._request_id, what)
        value = rolling_hash(delta.token_ids, self._hash)
        if value != received.rolling_hash:
            what = f"its rolling hash is {received.rolling_hash:016x}, and its tokens give {value:016x}"
            raise corrupted(self._request_id, what)
        self._hash = value
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._attempt = max(self._attempt, delta.attempt)
        if delta.text:
            self._texts.append(delta.text)
        if received.finish is not None and received.finish.reason is not None:
            self._end(received.finish, received.finish.reason)

    def _end(self, finish: Finish, reason: FinishReason) -> None:
        self.completion = Completion(
            index=self._index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            matched_stop=finish.matched_stop,
            usage=finish.usage,
            attempt=self._attempt,
            logprobs=tuple(self._logprobs),
        )


def corrupted(request_id: str, what: str) -> StreamCorruptedError:
    """The error for a delta that cannot be true."""
    return StreamCorruptedError(f"request {request_id}: a delta does not continue the output: {what}")


class Inbox:
    """The deltas of one request that nobody has read yet, bounded in tokens for each completion, then its end.

    The end, a result or an error, is read after the deltas that came before it, so nothing that arrived is lost.
    """

    def __init__(self, request_id: str, *, max_buffered_tokens: int, num_completions: int = 1) -> None:
        self._request_id = request_id
        self._max_buffered_tokens = max_buffered_tokens
        self._num_completions = num_completions
        self._transcripts: dict[int, Transcript] = {}  # by the completions' index
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._num_finishes = 0
        self._unread: deque[Delta] = deque()
        self._num_unread_tokens = [0] * num_completions
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

    @property
    def num_missing_finishes(self) -> int:
        """How many completions' ends have not come, whatever became of them here."""
        return max(self._num_completions - self._num_finishes, 0)

    @property
    def is_over_on_the_server(self) -> bool:
        """Whether every completion's end has come, whatever became of it here."""
        return not self.num_missing_finishes

    def accept(self, received: ReceivedDelta) -> None:
        """Take a delta in. One that does not fit the output or the buffer ends the inbox with a `StreamError`.

        A finish without a reason does not end it: the failure that explains it travels beside it.
        """
        try:
            index = received.delta.index
            transcript = self._transcripts.get(index) or self._begin(index)
            transcript.accept(received)
            self._prompt_logprobs = self._prompt_logprobs or received.delta.prompt_logprobs
            self._store(received.delta)
        except StreamError as error:
            self.fail(error)
        if received.finish is not None:
            self._num_finishes += 1
            self._end = self._end or self._result()
        self._wake()

    def _begin(self, index: int) -> Transcript:
        if index >= self._num_completions:
            raise corrupted(
                self._request_id, f"it is of completion {index}, the number asked for is {self._num_completions}"
            )
        transcript = self._transcripts[index] = Transcript(self._request_id, index)
        return transcript

    def _result(self) -> Result | None:
        """All completions, when each has its end."""
        done = [self._transcripts[index].completion for index in sorted(self._transcripts)]
        completions = tuple(completion for completion in done if completion is not None)
        if len(completions) < self._num_completions:
            return None
        return Result(self._request_id, completions, self._prompt_logprobs)

    def fail(self, error: PacelineError) -> None:
        """End with an error, unless it has ended."""
        self._end = self._end or error
        self._wake()

    async def get(self) -> Delta | Result:
        """The next delta, or the result at the end; raises the error that ended the request. One reader at a time."""
        while True:
            if self._unread:
                delta = self._unread.popleft()
                self._num_unread_tokens[delta.index] -= _weight(delta)
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
        # One delta of each completion is taken whatever its size: a message has no more of them, and they are as large
        # as the server made them, not as the reader is slow.
        weight, num_unread = _weight(delta), self._num_unread_tokens[delta.index]
        if num_unread and num_unread + weight > self._max_buffered_tokens:
            raise SlowConsumerError(
                f"request {self._request_id}: {num_unread} tokens were left unread, "
                f"the buffer holds {self._max_buffered_tokens}: read faster or raise Limits.max_buffered_tokens"
            )
        self._unread.append(delta)
        self._num_unread_tokens[delta.index] += weight


def _weight(delta: Delta) -> int:
    # A delta of text alone takes room too.
    return len(delta.token_ids) or 1

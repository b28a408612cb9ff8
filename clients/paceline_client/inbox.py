"""What has arrived for one request: checked when it comes, kept until it is read.

Knows one request's output so far and its bound, over as many sessions as it takes. Refuses to know where messages come
from, and whether more will come after one of them broke off.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from paceline_client.errors import PacelineError, SlowConsumerError, StreamCorruptedError, StreamError
from paceline_client.hashing import EMPTY_HASH, rolling_hash
from paceline_client.results import (
    Completion,
    Delta,
    FinishReason,
    OutputPart,
    ReasoningPart,
    Result,
    TextPart,
    TokenLogprobs,
    ToolCallPart,
)
from paceline_client.tools import ToolCall
from paceline_client.wire import ReceivedDelta, ReceivedFinish
from paceline_client.wire_requests import Held


class Transcript:
    """One completion so far."""

    def __init__(self, request_id: str, index: int) -> None:
        self.completion: Completion | None = None  # once it has ended
        self._request_id = request_id
        self._index = index
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._parts: list[OutputPart] = []
        self._hash = EMPTY_HASH
        self._attempt = 0

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def held(self) -> Held:
        return Held(self._index, tuple(self._token_ids), self._hash, self._attempt, self.completion is not None)

    def accept(self, received: ReceivedDelta) -> None:
        """`StreamCorruptedError` when tokens are missing, doubled or changed."""
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
        self._parts += delta.parts
        self._attempt = max(self._attempt, delta.attempt)
        if delta.text:
            self._texts.append(delta.text)
        if received.finish is not None and received.finish.reason is not None:
            self._end(received.finish, received.finish.reason)

    def _end(self, finish: ReceivedFinish, reason: FinishReason) -> None:
        self.completion = Completion(
            index=self._index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            matched_stop=finish.matched_stop,
            usage=finish.usage,
            attempt=self._attempt,
            logprobs=tuple(self._logprobs),
            times=finish.times,
            content="".join(part.text for part in self._parts if isinstance(part, TextPart)),
            reasoning="".join(part.text for part in self._parts if isinstance(part, ReasoningPart)),
            tool_calls=_calls(self._parts),
        )


def _calls(parts: Iterable[OutputPart]) -> tuple[ToolCall, ...]:
    calls: dict[int, tuple[str, str, list[str]]] = {}
    for part in parts:
        if isinstance(part, ToolCallPart):
            call = calls.setdefault(part.index, (part.id or "", part.name or "", []))
            call[2].append(part.arguments)
    return tuple(ToolCall(id_, name, "".join(arguments)) for id_, name, arguments in calls.values())


def corrupted(request_id: str, what: str) -> StreamCorruptedError:
    return StreamCorruptedError(f"request {request_id}: a delta does not continue the output: {what}")


class Interrupted(Exception):  # noqa: N818  not an error of the request, or not yet
    """Everything that arrived was read, and what brought it broke off: `error` says how."""

    def __init__(self, error: PacelineError) -> None:
        super().__init__(str(error))
        self.error = error


class Inbox:
    """The deltas of one request that nobody has read yet, bounded in tokens for each completion, then its end.

    The end, a result or an error, is read after the deltas that came before it, so nothing that arrived is lost; and
    so is an interruption, after which the output may `go_on`.
    """

    def __init__(self, request_id: str, *, max_buffered_tokens: int, num_completions: int = 1) -> None:
        self._request_id = request_id
        self._max_buffered_tokens = max_buffered_tokens
        self._num_completions = num_completions
        self._transcripts: dict[int, Transcript] = {}  # by the completions' index
        self._closed: frozenset[int] = frozenset()  # completions that had ended before the latest interruption
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._interruption: PacelineError | None = None
        self._unread: deque[Delta] = deque()
        self._num_unread_tokens = [0] * num_completions
        self._end: Result | PacelineError | None = None
        self._reader: asyncio.Future[None] | None = None  # who waits; a bare future, since one is made per token

    @property
    def request_id(self) -> str:
        return self._request_id

    @property
    def is_empty(self) -> bool:
        return not self._unread and self._end is None and self._interruption is None

    @property
    def has_ended(self) -> bool:
        return self._end is not None

    @property
    def interruption(self) -> PacelineError | None:
        return self._interruption

    @property
    def num_tokens(self) -> int:
        return sum(transcript.num_tokens for transcript in self._transcripts.values())

    def held(self) -> tuple[Held, ...]:
        return tuple(self._transcripts[index].held for index in sorted(self._transcripts))

    def interrupt(self, error: PacelineError) -> None:
        """Does nothing to one that has ended."""
        if self._end is None:
            self._interruption = error
            self._wake()

    def go_on(self) -> None:
        """Completions that have ended may be told again, which is passed over."""
        self._interruption = None
        self._closed = frozenset(
            index for index, transcript in self._transcripts.items() if transcript.completion is not None
        )

    def accept(self, received: ReceivedDelta) -> None:
        """A delta that does not fit ends the inbox with a `StreamError`; a finish without a reason does not, because
        its failure follows.
        """
        delta = received.delta
        if delta.index in self._closed:
            return
        try:
            transcript = self._transcripts.get(delta.index) or self._begin(delta.index)
            transcript.accept(received)
            if delta.prompt_logprobs and self._prompt_logprobs:
                delta = replace(delta, prompt_logprobs=())  # told again
            self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
            self._store(delta)
        except StreamError as error:
            self.fail(error)
        if received.finish is not None:
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
        done = [self._transcripts[index].completion for index in sorted(self._transcripts)]
        completions = tuple(completion for completion in done if completion is not None)
        if len(completions) < self._num_completions:
            return None
        return Result(self._request_id, completions, self._prompt_logprobs)

    def fail(self, error: PacelineError) -> None:
        self._end = self._end or error
        self._wake()

    async def get(self) -> Delta | Result:
        """The next delta, or the result at the end; raises the error that ended the request. One reader at a time.

        Raises `Interrupted` while nothing brings more.
        """
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
            if self._interruption is not None:
                raise Interrupted(self._interruption)
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

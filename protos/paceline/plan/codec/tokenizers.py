"""A tokenizer and all that belongs to it, as one message and in parts."""

from collections.abc import Iterator

from paceline.plan.codec.bounds import MAX_PART_BYTES, check, check_size
from paceline.plan.codec.columns import parse
from paceline.plan.hashes import tokenizer_digest
from paceline.v1 import executor_pb2

_PART_ROOM = 64 * 1024  # for the frame of a part


def write_content(whole: executor_pb2.GetTokenizerResponse) -> bytes:
    """Return `whole` as bytes, without what belongs to a digest or a part. Fields of later releases stay in it."""
    whole.ClearField("digest")
    whole.ClearField("last")
    return whole.SerializeToString(deterministic=True)


def write_parts(content: bytes) -> Iterator[executor_pb2.GetTokenizerResponse]:
    """Yield parts of at most 1 MiB; the first has everything but the rest of the JSON."""
    first = executor_pb2.GetTokenizerResponse.FromString(content)
    json, first.tokenizer_json, first.digest = first.tokenizer_json, b"", tokenizer_digest(content)
    room = max(0, MAX_PART_BYTES // 2 - _PART_ROOM - first.ByteSize())
    first.tokenizer_json = json[:room]
    step = MAX_PART_BYTES // 2 - _PART_ROOM
    part = first
    for at in range(room, len(json), step):
        yield part
        part = executor_pb2.GetTokenizerResponse(tokenizer_json=json[at : at + step])
    part.last = True
    yield part


class TokenizerParts:
    """Joins parts in the order in which they come."""

    def __init__(self) -> None:
        self._first: executor_pb2.GetTokenizerResponse | None = None
        self._pieces: list[bytes] = []
        self.num_bytes = 0

    @property
    def num_parts(self) -> int:
        return len(self._pieces)

    def add(self, data: bytes) -> bool:
        """Return whether it is the last one. Raises MalformedError."""
        check_size(data, MAX_PART_BYTES)
        part = parse(executor_pb2.GetTokenizerResponse, data)
        check(part, "tokenizer.")
        self._first = self._first or part
        self._pieces.append(part.tokenizer_json)
        self.num_bytes += len(data)
        return part.last

    def content(self) -> bytes:
        """Return the whole, as `write_content` does; at least one part was added."""
        assert self._first is not None, "a part was added"
        self._first.tokenizer_json = b"".join(self._pieces)
        return write_content(self._first)

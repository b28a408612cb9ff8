"""The sizes that steps are captured in: which there are, and which one serves a step.

A captured graph serves every step that fits into it, and costs what its size costs. Refuses to know graphs.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# Products get slower by steps of 16 rows, and odd numbers meet slow ones.
_SMALLEST_ROWS = (1, 2, 4, 8)
_ROWS_APART = ((32, 8), (256, 16), (1024, 64), (4096, 256))  # up to so many rows, so many apart
# A graph takes its whole size's time.
_TOKENS_APART = 128
# Larger steps keep a GPU busy for longer than the host takes to launch them one by one.
_MAX_TOKENS = 2048
# The output matrix is multiplied for every row: steps of few rows and a chunk have sizes of their own.
_FEW_ROWS = 32


@dataclass(frozen=True, slots=True)
class Bucket:
    """All rows together have up to `num_tokens`."""

    num_rows: int
    num_tokens: int
    max_query_len: int | None  # no row has more tokens; None: any number

    @property
    def is_decode(self) -> bool:
        return self.max_query_len == 1


class Buckets:
    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._decode = sorted((one for one in buckets if one.is_decode), key=_cost)
        self._mixed = sorted((one for one in buckets if not one.is_decode), key=_cost)

    def __iter__(self) -> Iterator[Bucket]:
        """Largest first: what is captured later finds its memory in what those before have left."""
        return iter(sorted((*self._decode, *self._mixed), key=_cost, reverse=True))

    @property
    def token_sizes(self) -> tuple[int, ...]:
        """Ascending, of steps with a chunk: chunks that fill one waste nothing."""
        return tuple(sorted({one.num_tokens for one in self._mixed}))

    def smallest(self, num_rows: int, num_tokens: int, longest: int) -> Bucket | None:
        """The cheapest that fits. longest: the most tokens of a row."""
        sizes = self._decode if longest <= 1 else self._mixed
        fitting = (one for one in sizes if one.num_rows >= num_rows and one.num_tokens >= num_tokens)
        return next(fitting, None)


def buckets_of(max_num_rows: int, max_num_tokens: int) -> Buckets:
    decode = [Bucket(num_rows, num_rows, 1) for num_rows in _row_sizes(min(max_num_rows, max_num_tokens))]
    most = min(max_num_tokens, _MAX_TOKENS)
    tokens = sorted({*range(_TOKENS_APART, most, _TOKENS_APART), most})
    rows = sorted({min(_FEW_ROWS, max_num_rows), max_num_rows})
    mixed = [Bucket(min(num_rows, size), size, None) for size in tokens for num_rows in rows]
    return Buckets([*decode, *dict.fromkeys(mixed)])


def _row_sizes(max_num_rows: int) -> list[int]:
    sizes = [size for size in _SMALLEST_ROWS if size < max_num_rows]
    last = _SMALLEST_ROWS[-1]
    for up_to, apart in _ROWS_APART:
        sizes += [size for size in range(last + apart, up_to + 1, apart) if size < max_num_rows]
        last = up_to
    return [*sizes, max_num_rows]


def _cost(bucket: Bucket) -> tuple[int, int]:
    return bucket.num_tokens, bucket.num_rows

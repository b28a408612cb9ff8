"""The sizes that steps are captured in: which there are, and which one serves a step.

A captured graph serves every step that fits into it, and costs what its size costs. Refuses to know graphs.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline_executor.limits import MAX_VERIFIED_TOKENS, most_draws

# Products get slower by steps of 16 rows, and odd numbers meet slow ones.
_SMALLEST_ROWS = (1, 2, 4, 8)
_ROWS_APART = ((32, 8), (256, 16), (1024, 64), (4096, 256))  # up to so many rows, so many apart
# A graph takes its whole size's time.
_TOKENS_APART = 128
# Larger steps keep a GPU busy for longer than the host takes to launch them one by one.
_MAX_TOKENS = 2048
# Beside the most there may be. Up to the last of these attention takes no more columns than without drafts.
_DRAFTS = (1, 3)
# The output matrix is multiplied for every row: steps of few rows and a chunk have sizes of their own.
_FEW_ROWS = 32


@dataclass(frozen=True, slots=True)
class Bucket:
    """All rows together have up to `num_tokens`, and draw up to `num_draws`."""

    num_rows: int
    num_tokens: int
    max_query_len: int | None  # no row has more tokens; None: any number
    num_draws: int

    @property
    def is_decode(self) -> bool:
        return self.max_query_len == 1


class Buckets:
    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._decode = sorted((one for one in buckets if one.is_decode), key=_cost)
        self._others = sorted((one for one in buckets if not one.is_decode), key=_cost)

    def __iter__(self) -> Iterator[Bucket]:
        """Largest first: what is captured later finds its memory in what those before have left."""
        return iter(sorted((*self._decode, *self._others), key=_cost, reverse=True))

    @property
    def token_sizes(self) -> tuple[int, ...]:
        """Ascending, of steps with a chunk: chunks that fill one waste nothing."""
        return tuple(sorted({one.num_tokens for one in self._others if one.max_query_len is None}))

    def smallest(self, step: Bucket) -> Bucket | None:
        """The cheapest that the step fits into."""
        return next((one for one in (self._decode if step.is_decode else self._others) if _fits(step, one)), None)


def buckets_of(max_num_rows: int, max_num_tokens: int, max_num_drafts: int = 0) -> Buckets:
    row_sizes = _row_sizes(min(max_num_rows, max_num_tokens))
    decode = [Bucket(num_rows, num_rows, 1, num_rows) for num_rows in row_sizes]
    verifying = _verifying(row_sizes, max_num_tokens, max_num_drafts) if max_num_drafts else []
    most = min(max_num_tokens, _MAX_TOKENS)
    tokens = sorted({*range(_TOKENS_APART, most, _TOKENS_APART), most})
    few = min(_FEW_ROWS, max_num_rows)
    mixed = [
        Bucket(min(num_rows, size), size, None, min(num_draws, size))
        for size in tokens
        for num_rows, num_draws in ((few, few), (max_num_rows, most_draws(max_num_rows, max_num_drafts)))
    ]
    return Buckets([*decode, *verifying, *dict.fromkeys(mixed)])


def _verifying(row_sizes: list[int], max_num_tokens: int, max_num_drafts: int) -> list[Bucket]:
    depths = [depth for depth in _DRAFTS if depth < max_num_drafts]
    sizes = []
    for num_rows in row_sizes:
        for depth in (*depths, max_num_drafts):
            num_tokens = min(num_rows * (1 + depth), max_num_tokens)
            longest = 1 + (max_num_drafts if depth > _DRAFTS[-1] else min(_DRAFTS[-1], max_num_drafts))
            if num_rows < num_tokens <= MAX_VERIFIED_TOKENS:
                sizes.append(Bucket(num_rows, num_tokens, longest, num_tokens))
    return list(dict.fromkeys(sizes))


def _fits(step: Bucket, size: Bucket) -> bool:
    if step.num_rows > size.num_rows or step.num_tokens > size.num_tokens or step.num_draws > size.num_draws:
        return False
    return size.max_query_len is None or (step.max_query_len is not None and step.max_query_len <= size.max_query_len)


def _row_sizes(max_num_rows: int) -> list[int]:
    sizes = [size for size in _SMALLEST_ROWS if size < max_num_rows]
    last = _SMALLEST_ROWS[-1]
    for up_to, apart in _ROWS_APART:
        sizes += [size for size in range(last + apart, up_to + 1, apart) if size < max_num_rows]
        last = up_to
    return [*sizes, max_num_rows]


def _cost(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.num_tokens, bucket.num_draws, bucket.num_rows

"""Sizes that steps are captured in: every step that may be captured fits into one, and little is computed in vain."""

from hypothesis import given
from hypothesis import strategies as st

from paceline_executor.limits import MAX_VERIFIED_TOKENS
from paceline_executor.runner.device.buckets import Bucket, buckets_of

sizes = st.tuples(st.integers(1, 4096), st.integers(2, 65536)).map(lambda size: (size[0], max(size)))


@given(sizes, st.data())
def test_every_decode_fits_into_a_size_near_its_own(limits, data):
    """At most an eighth more rows, or 16, than it has, or the largest size there is."""
    max_rows, max_tokens = limits
    num_rows = data.draw(st.integers(1, max_rows))
    bucket = buckets_of(max_rows, max_tokens).smallest(Bucket(num_rows, num_rows, 1, num_rows))
    assert bucket.max_query_len == 1
    assert num_rows <= bucket.num_rows == bucket.num_tokens <= max_rows
    assert bucket.num_rows - num_rows < max(16, num_rows / 4)


@given(sizes, st.data())
def test_every_step_with_a_chunk_fits_unless_it_is_large(limits, data):
    """Sizes are at most 128 tokens apart up to 2,048; a larger step is launched one by one."""
    max_rows, max_tokens = limits
    num_tokens = data.draw(st.integers(2, max_tokens))
    num_rows = data.draw(st.integers(1, min(max_rows, num_tokens - 1)))
    bucket = buckets_of(max_rows, max_tokens).smallest(Bucket(num_rows, num_tokens, 2, num_rows))
    if num_tokens > 2048:
        assert bucket is None
        return
    assert bucket.max_query_len is None
    assert bucket.num_rows >= num_rows
    assert num_tokens <= bucket.num_tokens < num_tokens + 128
    assert bucket.num_tokens <= max_tokens


@given(sizes)
def test_the_largest_comes_first_and_few_are_captured(limits):
    """So that later captures find their memory in that of earlier ones; each takes 16 to 50 ms."""
    buckets = list(buckets_of(*limits))
    costs = [bucket.num_tokens for bucket in buckets]
    assert costs == sorted(costs, reverse=True)
    assert len(set(buckets)) == len(buckets) <= 90


def test_the_usual_limits_have_the_sizes_that_were_measured():
    """256 rows and 2,048 tokens."""
    buckets = buckets_of(256, 2048)
    decodes = sorted(bucket.num_rows for bucket in buckets if bucket.is_decode)
    assert decodes == [1, 2, 4, 8, 16, 24, 32, *range(48, 257, 16)]
    assert buckets.token_sizes == tuple(range(128, 2049, 128))


@given(sizes, st.integers(1, 8), st.data())
def test_every_step_with_drafts_fits_unless_it_is_large(limits, max_drafts, data):
    max_rows, max_tokens = limits
    num_rows = data.draw(st.integers(1, min(max_rows, max_tokens)))
    most = min(max(max_rows, MAX_VERIFIED_TOKENS), max_tokens, num_rows * (1 + max_drafts))
    num_draws = data.draw(st.integers(num_rows, max(num_rows, most)))
    num_tokens = data.draw(st.integers(num_draws, max(num_draws, min(max_tokens, 2048))))
    longest = min(num_tokens - num_rows + 1, data.draw(st.integers(2, 9)))
    step = Bucket(num_rows, num_tokens, longest, num_draws)
    bucket = buckets_of(max_rows, max_tokens, max_drafts).smallest(step)
    if bucket is None:
        assert num_tokens > 2048
        return
    assert bucket.num_rows >= num_rows
    assert bucket.num_tokens >= num_tokens
    assert bucket.num_draws >= num_draws
    assert bucket.num_tokens <= max_tokens
    assert bucket.max_query_len is None or bucket.max_query_len >= longest


@given(sizes, st.integers(1, 8))
def test_sizes_for_drafts_are_few_and_none_is_twice_there(limits, max_drafts):
    """They verify no more tokens than cost about as much as one of each row."""
    buckets = list(buckets_of(*limits, max_drafts))
    verifying = [bucket for bucket in buckets if bucket.max_query_len not in (1, None)]
    assert len(set(buckets)) == len(buckets) <= 90 + len(verifying)
    assert len(verifying) <= 45
    for bucket in verifying:
        assert bucket.num_rows < bucket.num_tokens == bucket.num_draws <= MAX_VERIFIED_TOKENS
        assert bucket.max_query_len in (min(4, 1 + max_drafts), 1 + max_drafts)


def test_a_row_and_its_drafts_have_a_size_of_their_own():
    """Of a few rows, too: what is captured for two rows with three drafts serves a row with one and a row with two."""
    buckets = buckets_of(256, 2048, 8)
    assert buckets.smallest(Bucket(1, 2, 2, 2)) == Bucket(1, 2, 4, 2)
    assert buckets.smallest(Bucket(1, 4, 4, 4)) == Bucket(1, 4, 4, 4)
    assert buckets.smallest(Bucket(1, 6, 6, 6)) == Bucket(1, 9, 9, 9)
    assert buckets.smallest(Bucket(2, 5, 3, 5)) == Bucket(2, 8, 4, 8)
    assert buckets.smallest(Bucket(2, 130, 129, 3)) == Bucket(32, 256, None, 32)
    assert buckets.smallest(Bucket(40, 300, 200, 80)) == Bucket(256, 384, None, 256)
    assert [size for size in buckets if size.is_decode] == [size for size in buckets_of(256, 2048) if size.is_decode]

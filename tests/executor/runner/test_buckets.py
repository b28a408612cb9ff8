"""Sizes that steps are captured in: every step that may be captured fits into one, and little is computed in vain."""

from hypothesis import given
from hypothesis import strategies as st

from paceline_executor.runner.buckets import buckets_of

sizes = st.tuples(st.integers(1, 4096), st.integers(2, 65536)).map(lambda size: (size[0], max(size)))


@given(sizes, st.data())
def test_every_decode_fits_into_a_size_near_its_own(limits, data):
    """At most an eighth more rows, or 16, than it has, or the largest size there is."""
    max_rows, max_tokens = limits
    num_rows = data.draw(st.integers(1, max_rows))
    bucket = buckets_of(max_rows, max_tokens).smallest(num_rows, num_rows, 1)
    assert bucket.max_query_len == 1
    assert num_rows <= bucket.num_rows == bucket.num_tokens <= max_rows
    assert bucket.num_rows - num_rows < max(16, num_rows / 4)


@given(sizes, st.data())
def test_every_step_with_a_chunk_fits_unless_it_is_large(limits, data):
    """Sizes are at most 128 tokens apart up to 2,048; a larger step is launched one by one."""
    max_rows, max_tokens = limits
    num_tokens = data.draw(st.integers(2, max_tokens))
    num_rows = data.draw(st.integers(1, min(max_rows, num_tokens - 1)))
    bucket = buckets_of(max_rows, max_tokens).smallest(num_rows, num_tokens, 2)
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

"""The hash of an output, which a resume is compared by: schedulers and clients compute the same."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.hashes import HASH_START, rolling_hashes
from paceline_client.hashing import rolling_hash

token_ids = st.integers(min_value=0, max_value=2**31 - 1)


def defined_hash(words):
    """Delta.rolling_hash as its comment says, over 64-bit words."""
    h = 0xCBF29CE484222325
    for word in words:
        h = ((h ^ word) * 0x100000001B3) % 2**64
        h = h ^ (h >> 32)
    return h


def scheduler_hash(output):
    """The scheduler's way: one token of many requests at a time."""
    hashes = np.array([HASH_START], dtype=np.uint64)
    for token_id in output:
        hashes = rolling_hashes(hashes, np.array([token_id], dtype=np.int32))
    return int(hashes[0])


def test_the_hash_of_three_tokens_is_a_number_anyone_can_check():
    """Fixed for ever: clients of other languages are tested against it."""
    assert defined_hash([]) == 0xCBF29CE484222325
    assert defined_hash([1, 0, 49151]) == 0xAB75D87E56097CF1


@given(st.lists(token_ids, max_size=20))
def test_scheduler_and_client_agree_on_the_output(output):
    """A resume is compared by this hash."""
    assert scheduler_hash(output) == rolling_hash(output) == defined_hash(output)


@given(st.lists(token_ids, max_size=20), st.integers(0, 20))
def test_the_client_can_go_on_from_any_token(output, cut):
    """A delta's hash continues the one before."""
    assert rolling_hash(output[cut:], start=rolling_hash(output[:cut])) == rolling_hash(output)

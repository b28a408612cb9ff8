"""The rolling hash of output tokens, against a second implementation that counts in machine words."""

import ctypes

from hypothesis import given
from hypothesis import strategies as st

from paceline_client.hashing import EMPTY_HASH, rolling_hash

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)


def hash_in_machine_words(ids):
    """The comment of Delta.rolling_hash, word for word, with overflow left to the machine."""
    h = ctypes.c_uint64(0xCBF29CE484222325)
    for token_id in ids:
        h.value ^= token_id
        h.value *= 0x100000001B3
        h.value ^= h.value >> 32
    return h.value


def test_no_tokens_hash_to_the_offset_basis():
    assert rolling_hash([]) == EMPTY_HASH == 0xCBF29CE484222325


@given(token_ids)
def test_equals_the_definition(ids):
    """Python's long integers must be cut to 64 bits at every step."""
    assert rolling_hash(ids) == hash_in_machine_words(ids)


@given(token_ids, token_ids)
def test_rolls(first, second):
    assert rolling_hash(second, rolling_hash(first)) == rolling_hash(first + second)


@given(token_ids, st.integers(0, 20))
def test_it_goes_on_from_any_token(ids, cut):
    assert rolling_hash(ids[cut:], start=rolling_hash(ids[:cut])) == rolling_hash(ids)

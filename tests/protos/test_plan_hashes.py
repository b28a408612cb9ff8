"""The hashes that travel and the derived seed are what the protos' comments say, and what others compute."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.hashes import HASH_START, grant_hash, rolling_hash, rolling_hashes, seed_of
from paceline.plan.values import NO_GRANTS, BlockGrants, RecordId
from paceline_client import hashing

token_ids = st.integers(0, 2**31 - 1)
grants = st.lists(st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1), token_ids), max_size=20)


def defined_hash(words):
    """Delta.rolling_hash and StepResult.grant_hash as their comments say, over 64-bit words."""
    h = 0xCBF29CE484222325
    for word in words:
        h = ((h ^ word) * 0x100000001B3) % 2**64
        h = h ^ (h >> 32)
    return h


def columns(cells):
    """Grants of (row, index, block) cells."""
    return BlockGrants(*np.array(cells, dtype=np.int32).reshape(-1, 3).T)


def test_the_hash_of_three_tokens_is_a_number_anyone_can_check():
    """Fixed for ever: clients of other languages are tested against it."""
    assert defined_hash([]) == HASH_START == 0xCBF29CE484222325
    assert defined_hash([1, 0, 49151]) == 0xAB75D87E56097CF1
    assert rolling_hash(HASH_START, np.array([1, 0, 49151], dtype=np.int32)) == 0xAB75D87E56097CF1


@given(st.lists(token_ids, max_size=20), st.integers(0, 20))
def test_an_output_is_hashed_as_its_client_does(output, cut):
    whole = np.array(output, dtype=np.int32)
    assert rolling_hash(HASH_START, whole) == hashing.rolling_hash(output) == defined_hash(output)
    assert rolling_hash(rolling_hash(HASH_START, whole[:cut]), whole[cut:]) == defined_hash(output)


@given(st.lists(st.lists(token_ids, min_size=4, max_size=4), max_size=5))
def test_many_outputs_are_hashed_at_once_as_one_by_one(outputs):
    """One more token of each, as the steps bring them."""
    rounds = np.array(outputs, dtype=np.int32).reshape(-1, 4).T
    values = np.full(len(outputs), HASH_START, dtype=np.uint64)
    for drawn in rounds:
        values = rolling_hashes(values, drawn)
    assert values.tolist() == [defined_hash(output) for output in outputs]


@given(grants, grants)
def test_grants_are_hashed_one_after_another(first, second):
    words = [(row * 2**48 + index * 2**32 + block) % 2**64 for row, index, block in first + second]
    assert grant_hash(grant_hash(HASH_START, columns(first)), columns(second)) == defined_hash(words)
    assert grant_hash(HASH_START, columns(first + second)) == defined_hash(words)


def test_no_grants_leave_the_hash_as_it_is():
    assert grant_hash(7, NO_GRANTS) == 7


@pytest.mark.parametrize(
    ("record_id", "digest"),
    [
        (RecordId("", "r"), "b78485620acba111"),  # printf '\0r' | b2sum -l 64
        (RecordId("acme", "r", 3), "51ceddcfc0e84078"),  # printf 'acme\0r\0003' | b2sum -l 64
    ],
)
def test_a_seed_is_the_digest_that_another_program_prints(record_id, digest):
    assert seed_of(record_id) == int.from_bytes(bytes.fromhex(digest), "little")

"""The values of the plan protocol: numbers of enums, columns of log-probabilities, claims, ranges of versions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan import sampling
from paceline.plan import values as plan
from paceline.plan.hashes import HASH_START, grant_hash, rolling_hash, rolling_hashes, seed_of
from paceline.plan.versions import ProtocolRange
from paceline.v1 import plan_pb2, sampling_pb2
from paceline_client import hashing
from scheduler_rig.requests import column

NO_TOKENS = np.zeros(0, dtype=np.int32)


def logprobs(offset, num_tokens):
    """Recognisable log-probabilities of tokens `offset` and following, with two alternatives each."""
    places = np.arange(offset, offset + num_tokens)
    tops = np.stack([2 * places, 2 * places + 1], axis=1)
    return plan.LogprobColumns(offset, -places.astype(np.float32), tops.astype(np.int32), -tops.astype(np.float32))


def row_state(num_output, of_output=None):
    """A row with an output of so many tokens and these log-probabilities."""
    tokens = np.zeros(num_output, dtype=np.int32)
    return plan.RowState(plan.RecordId("", "r"), 0, 1, NO_TOKENS, tokens, 0, NO_TOKENS, logprobs=of_output)


@pytest.mark.parametrize(
    ("ours", "protos"), [(plan.RowFinish, plan_pb2.RowFinish), (plan.FinishReason, sampling_pb2.FinishReason)]
)
def test_enums_have_the_numbers_of_the_protos(ours, protos):
    names = {value: name for name, value in protos.items()}
    assert [value.value for value in ours] == sorted(names)
    for value in ours:
        assert value.value == 0 or names[value.value].endswith(value.name)


def test_logprobs_of_some_tokens_are_found_by_their_place_in_the_output():
    assert logprobs(3, 4).of(4, column(70, 71)) == (
        plan.TokenLogprobs(70, -4.0, ((8, -8.0), (9, -9.0))),
        plan.TokenLogprobs(71, -5.0, ((10, -10.0), (11, -11.0))),
    )


def test_logprobs_that_are_split_can_be_joined_again():
    """A request longer than a part of a snapshot goes on in the next one."""
    head, rest = logprobs(3, 5).split(2)
    assert (head.offset, head.end, rest.offset, rest.end) == (3, 5, 5, 8)
    whole = plan.joined([head, rest])
    assert (whole.offset, whole.num_tokens, whole.num_top) == (3, 5, 2)
    assert whole.of(3, np.zeros(5, np.int32)) == logprobs(3, 5).of(3, np.zeros(5, np.int32))
    assert logprobs(3, 2).split(9)[1].num_tokens == 0


def test_logprobs_are_cut_with_the_output():
    cut = logprobs(3, 5).up_to(6)
    assert (cut.offset, cut.end) == (3, 6)
    assert (logprobs(3, 5).up_to(2).offset, logprobs(3, 5).up_to(2).num_tokens) == (2, 0)


def test_logprobs_say_what_they_take():
    assert (logprobs(0, 5).bytes_per_token, logprobs(0, 5).nbytes) == (20, 100)


def test_a_row_knows_from_where_on_it_has_logprobs():
    assert row_state(8, logprobs(3, 5)).has_logprobs_from(3)
    assert not row_state(8, logprobs(3, 5)).has_logprobs_from(2)
    assert not row_state(9, logprobs(3, 5)).has_logprobs_from(3)
    assert not row_state(8).has_logprobs_from(3)
    assert row_state(8).has_logprobs_from(8)


def test_copies_and_tags_are_made_of_pairs_and_give_them_back():
    copies, tags = plan.BlockCopies.of([(1, 2), (3, 4)]), plan.BlockTags.of([(7, b"a" * 16), (8, plan.NO_KEY)])
    assert (copies.sources.tolist(), copies.destinations.tolist()) == ([1, 3], [2, 4])
    assert (tags.block_ids.tolist(), tags.keys) == ([7, 8], b"a" * 16 + bytes(16))
    assert (list(copies), list(tags)) == ([(1, 2), (3, 4)], [(7, b"a" * 16), (8, plan.NO_KEY)])
    assert plan.BlockCopies.of([]) is plan.NO_COPIES
    assert plan.BlockTags.of([]) is plan.NO_TAGS


def test_claims_compare_by_term_then_by_who_asks():
    assert plan.Claim(2, "a") > plan.Claim(1, "b") > plan.Claim(1, "a")
    assert plan.Claim(1, "a", "host:1") == plan.Claim(1, "a", "host:2")


@pytest.mark.parametrize(
    ("ours", "theirs", "version"),
    [((1, 2), (2, 5), 2), ((1, 4), (2, 3), 3), ((3, 4), (1, 2), None), ((1, 2), (2, 1), None)],
)
def test_the_highest_version_that_both_speak_is_picked(ours, theirs, version):
    assert ProtocolRange(*ours).highest_in_common(ProtocolRange(*theirs)) == version
    assert ProtocolRange(*theirs).highest_in_common(ProtocolRange(*ours)) == version


@pytest.mark.parametrize(
    ("field", "least", "most", "beyond"),
    [
        ("temperature", 0, 100, (-0.1, 100.1, float("nan"))),
        ("top_p", 0.001, 1, (0, 1.1, float("nan"))),
        ("top_k", 0, 2**31 - 1, (-1, 2**31)),
        ("min_p", 0, 1, (-0.1, 1.1, float("nan"))),
        ("repetition_penalty", 0.001, 10, (0, 10.1, float("nan"))),
    ],
)
def test_generation_defaults_are_values_that_can_be_sampled_with(field, least, most, beyond):
    """One that cannot is refused by its name."""
    for value in (least, most):
        assert getattr(sampling.GenerationDefaults(**{field: value}), field) == value
    for value in beyond:
        with pytest.raises(ValueError, match=field):
            sampling.GenerationDefaults(**{field: value})


def test_an_open_record_is_one_that_waits_for_a_row():
    ended = plan.FinalRelease(1, plan.FinishReason.STOP)
    record = plan.RowState(plan.RecordId("", "r"), None, 1, NO_TOKENS, NO_TOKENS, 0, NO_TOKENS)
    done = plan.RowState(plan.RecordId("", "r"), None, 1, NO_TOKENS, NO_TOKENS, 0, NO_TOKENS, released=ended)
    assert (record.is_open_record, done.is_open_record, row_state(1).is_open_record) == (True, False, False)


# The hashes that travel and the derived seed are what the protos' comments say, and what others compute


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
    return plan.BlockGrants(*np.array(cells, dtype=np.int32).reshape(-1, 3).T)


def test_the_hash_of_three_tokens_is_a_number_anyone_can_check():
    """Fixed for ever: clients of other languages are tested against it."""
    assert defined_hash([]) == HASH_START == hashing.EMPTY_HASH == 0xCBF29CE484222325
    assert defined_hash([1, 0, 49151]) == 0xAB75D87E56097CF1
    assert rolling_hash(HASH_START, np.array([1, 0, 49151], dtype=np.int32)) == 0xAB75D87E56097CF1


@given(st.lists(token_ids, max_size=20), st.integers(0, 20))
def test_an_output_is_hashed_as_its_client_does(output, cut):
    whole = np.array(output, dtype=np.int32)
    assert rolling_hash(HASH_START, whole) == hashing.rolling_hash(output) == defined_hash(output)
    assert rolling_hash(rolling_hash(HASH_START, whole[:cut]), whole[cut:]) == defined_hash(output)
    assert hashing.rolling_hash(output[cut:], hashing.rolling_hash(output[:cut])) == defined_hash(output)


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
    assert grant_hash(7, plan.NO_GRANTS) == 7


@pytest.mark.parametrize(
    ("record_id", "digest"),
    [
        (plan.RecordId("", "r"), "b78485620acba111"),  # printf '\0r' | b2sum -l 64
        (plan.RecordId("acme", "r", 3), "51ceddcfc0e84078"),  # printf 'acme\0r\0003' | b2sum -l 64
    ],
)
def test_a_seed_is_the_digest_that_another_program_prints(record_id, digest):
    assert seed_of(record_id) == int.from_bytes(bytes.fromhex(digest), "little")

"""plan_ring: what the host writes reaches the device's words and plan, step after step, and nothing else does."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_rig.tensors import placed
from paceline_kernels.clock import CLOCK_SIZE, new_clock, stamp
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.plan_ring import PlanRing, PlanWriter, new_plan_ring, read_plan, reference, write_words

MAX_PLANNED, MAX_WORDS, NUM_WORDS = 20, 40, 50


@pytest.fixture(autouse=True)
def _small_programs(is_gpu, monkeypatch):
    """So that every loop goes round more than once."""
    if is_gpu:
        monkeypatch.setattr("paceline_kernels.plan_ring.triton._PROGRAMS", 2)
        monkeypatch.setattr("paceline_kernels.plan_ring.triton._BLOCK", 4)


def int32(values):
    """As the host has them."""
    return np.array(values, dtype=np.int32)


def number_of(step):
    """As the device counts."""
    return torch.tensor([step], dtype=torch.int64)


def ring_on(place, device, num_slots):
    """A ring that the host may write and an operation read, and what a test may read of it."""
    ring = new_plan_ring(num_slots, MAX_PLANNED, MAX_WORDS, pinned=device.type == "cuda")
    return ring if device.type == "cuda" else placed(place, ring)


PLACES = st.integers(-3, NUM_WORDS + 3)
CHANGES = st.lists(
    st.tuples(PLACES, st.integers(-(2**31), 2**31 - 1)), max_size=MAX_WORDS, unique_by=lambda word: word[0]
)
ROWS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=MAX_PLANNED)
STEPS = st.lists(st.tuples(ROWS, CHANGES, st.integers(1, MAX_PLANNED)), min_size=1, max_size=5)


@settings(max_examples=settings.default.max_examples // 4, deadline=None)  # on a GPU the first one compiles
@given(steps=STEPS, num_slots=st.integers(1, 3), first=st.sampled_from([0, 1, 2**31 - 2, 2**40]))
def test_every_step_is_planned_as_it_was_written(backend, steps, num_slots, first):
    with backend.memory() as place:
        ring = ring_on(place, backend.device, num_slots)
        writer = PlanWriter(ring)
        expected_words = torch.arange(NUM_WORDS, dtype=torch.int32)
        words, clock = place(expected_words), place(torch.full((CLOCK_SIZE,), -1))
        for step, (rows, changes, num_planned) in enumerate(steps, first):
            planned, changed = int32(rows).reshape(-1, 2), int32(changes).reshape(-1, 2)
            writer.write(step, *planned.T, *changed.T)
            expected = reference.read_plan(ring, number_of(step), expected_words, num_planned)
            ours = read_plan(ring, place(number_of(step)), words, num_planned, clock)
            assert ours.rows.tolist() == expected.rows.tolist()
            assert ours.num_tokens.tolist() == expected.num_tokens.tolist()
            assert words.tolist() == expected_words.tolist()
        assert clock[0] > 0
        assert (clock[1:] == -1).all()


@settings(max_examples=settings.default.max_examples // 4, deadline=None)
@given(changes=CHANGES)
def test_words_without_a_slot_are_written_alike(backend, changes):
    places, values = torch.from_numpy(int32(changes).reshape(-1, 2).T.copy())
    expected = torch.arange(NUM_WORDS, dtype=torch.int32)
    with backend.memory() as place:
        words = place(expected)
        write_words(words, place(places), place(values))
        reference.write_words(expected, places, values)
        assert words.tolist() == expected.tolist()


def test_a_step_says_what_is_planned_and_what_has_changed():
    """The reference, by hand: two of three rows, behind the padding none; a place outside changes nothing."""
    ring, words = new_plan_ring(2, 3, 3, pinned=False), torch.zeros(4, dtype=torch.int32)
    PlanWriter(ring).write(5, int32([7, 3]), int32([1, 9]), int32([2, 4, 0]), int32([11, 12, 13]))
    plan = reference.read_plan(ring, number_of(5), words, 3)
    assert (plan.rows.tolist(), plan.num_tokens.tolist()) == ([7, 3, -1], [1, 9, 0])
    assert words.tolist() == [13, 0, 11, 0]
    assert ring.counts.tolist() == [[0, 0], [3, 2]]


def test_time_goes_on_from_stamp_to_stamp(place):
    clock = place(new_clock(torch.device("cpu")))
    stamp(clock, 1)
    stamp(clock, 0)
    assert clock[0] >= clock[1] > 0


def test_what_does_not_fit_a_slot_is_refused():
    ring = new_plan_ring(1, 2, 3, pinned=False)
    writer, none = PlanWriter(ring), int32([])
    with pytest.raises(KernelArgumentError, match="room for 2 rows and 3 words, not for 3 and 0: plan less"):
        writer.write(0, int32([1, 2, 3]), int32([1, 1, 1]), none, none)
    with pytest.raises(KernelArgumentError, match="not for 0 and 4: plan less, and send other words by `write_words`"):
        writer.write(0, none, none, int32([1, 2, 3, 4]), int32([1, 1, 1, 1]))
    with pytest.raises(KernelArgumentError, match=r"values must be int32 of shape \[1\], not int32 of \[2\]"):
        writer.write(0, none, none, int32([1]), int32([1, 2]))
    with pytest.raises(KernelArgumentError, match=r"num_tokens must be int32 of shape \[1\], not int64 of \[1\]"):
        writer.write(0, int32([1]), np.array([1]), none, none)
    assert not any(getattr(ring, name).any() for name in PlanRing.__dataclass_fields__)


def test_what_cannot_be_read_is_refused():
    ring, words, clock = (
        new_plan_ring(1, 2, 3, pinned=False),
        torch.zeros(4, dtype=torch.int32),
        new_clock(torch.device("cpu")),
    )
    with pytest.raises(KernelArgumentError, match="a slot has room for 1 to 2 rows, not for 3"):
        read_plan(ring, number_of(0), words, 3, clock)
    with pytest.raises(KernelArgumentError, match=r"words must be torch\.int32"):
        read_plan(ring, number_of(0), words.float(), 1, clock)
    with pytest.raises(KernelArgumentError, match="a clock has the places 0 to 2, not 3"):
        stamp(clock, 3)
    with pytest.raises(UnsupportedDeviceError, match="read_plan has no implementation for device 'meta'"):
        read_plan(ring, number_of(0), words.to("meta"), 1, clock)
    with pytest.raises(UnsupportedDeviceError, match="write_words has no implementation for device 'meta'"):
        write_words(words.to("meta"), words, words)
    with pytest.raises(UnsupportedDeviceError, match="stamp has no implementation for device 'meta'"):
        stamp(clock.to("meta"), 0)

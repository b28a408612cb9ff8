"""plan_ring: what the host writes reaches the device's words and plan, step after step, and nothing else does."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_kernels.clock import new_clock, stamp
from paceline_kernels.clock import triton as clock_kernels
from paceline_kernels.devices import cpu_stands_for_gpu
from paceline_kernels.errors import KernelArgumentError, UnsupportedDeviceError
from paceline_kernels.plan_ring import PlanRing, PlanWriter, new_plan_ring, read_plan, reference, write_words
from paceline_kernels.plan_ring import triton as kernels
from paceline_kernels.testing.bounds import BoundedMemory

MAX_PLANNED, MAX_WORDS, NUM_WORDS = 20, 40, 50


@pytest.fixture(autouse=True)
def _small_programs(monkeypatch):
    """So that every loop goes round more than once."""
    monkeypatch.setattr(kernels, "_PROGRAMS", 2)
    monkeypatch.setattr(kernels, "_BLOCK", 4)


def int32(values):
    """As the host has them."""
    return np.array(values, dtype=np.int32)


def number_of(step):
    """As the device counts."""
    return torch.tensor([step], dtype=torch.int64)


def ring_on(memory, device, num_slots):
    """A ring that the host may write and a kernel read, and what a test may read of it."""
    ring = new_plan_ring(num_slots, MAX_PLANNED, MAX_WORDS, pinned=device.type == "cuda")
    if device.type == "cuda":
        return ring
    return PlanRing(*(memory.place(getattr(ring, name)) for name in PlanRing.__dataclass_fields__))


PLACES = st.integers(-3, NUM_WORDS + 3)
CHANGES = st.lists(
    st.tuples(PLACES, st.integers(-(2**31), 2**31 - 1)), max_size=MAX_WORDS, unique_by=lambda word: word[0]
)
ROWS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=MAX_PLANNED)
STEPS = st.lists(st.tuples(ROWS, CHANGES, st.integers(1, MAX_PLANNED)), min_size=1, max_size=5)


@settings(max_examples=settings.default.max_examples // 4, deadline=None)  # on a GPU the first one compiles
@given(steps=STEPS, num_slots=st.integers(1, 3), first=st.sampled_from([0, 1, 2**31 - 2, 2**40]))
def test_every_step_is_planned_as_it_was_written(device, steps, num_slots, first):
    memory = BoundedMemory(device)
    ring = ring_on(memory, device, num_slots)
    writer = PlanWriter(ring)
    expected_words = torch.arange(NUM_WORDS, dtype=torch.int32)
    words, cpu_words = memory.place(expected_words), expected_words.clone()
    clock, cpu_clock = memory.place(torch.tensor([-1, -1])), torch.tensor([-1, -1])
    for step, (rows, changes, num_planned) in enumerate(steps, first):
        planned, changed = int32(rows).reshape(-1, 2), int32(changes).reshape(-1, 2)
        writer.write(step, *planned.T, *changed.T)
        expected = reference.read_plan(ring, number_of(step), expected_words, num_planned)
        ours = kernels.read_plan(ring, memory.place(number_of(step)), words, num_planned, clock)
        cpus = read_plan(ring, number_of(step), cpu_words, num_planned, cpu_clock)
        assert ours.rows.tolist() == cpus.rows.tolist() == expected.rows.tolist()
        assert ours.num_tokens.tolist() == cpus.num_tokens.tolist() == expected.num_tokens.tolist()
        assert words.tolist() == cpu_words.tolist() == expected_words.tolist()
    for times in (clock.tolist(), cpu_clock.tolist()):
        assert times[0] > 0
        assert times[1] == -1
    assert memory.margins_are_untouched()


@settings(max_examples=settings.default.max_examples // 4, deadline=None)
@given(changes=CHANGES)
def test_words_without_a_slot_are_written_alike(device, changes):
    memory = BoundedMemory(device)
    places, values = torch.from_numpy(int32(changes).reshape(-1, 2).T.copy())
    expected = torch.arange(NUM_WORDS, dtype=torch.int32)
    words, cpu_words = memory.place(expected), expected.clone()
    kernels.write_words(words, memory.place(places), memory.place(values))
    write_words(cpu_words, places, values)
    reference.write_words(expected, places, values)
    assert words.tolist() == cpu_words.tolist() == expected.tolist()
    assert memory.margins_are_untouched()


def test_a_step_says_what_is_planned_and_what_has_changed():
    """The reference, by hand: two of three rows, behind the padding none; a place outside changes nothing."""
    ring, words = new_plan_ring(2, 3, 3, pinned=False), torch.zeros(4, dtype=torch.int32)
    PlanWriter(ring).write(5, int32([7, 3]), int32([1, 9]), int32([2, 4, 0]), int32([11, 12, 13]))
    plan = reference.read_plan(ring, number_of(5), words, 3)
    assert (plan.rows.tolist(), plan.num_tokens.tolist()) == ([7, 3, -1], [1, 9, 0])
    assert words.tolist() == [13, 0, 11, 0]
    assert ring.counts.tolist() == [[0, 0], [3, 2]]


def test_time_goes_on_from_stamp_to_stamp(device):
    memory = BoundedMemory(device)
    for clock, run in (
        (memory.place(new_clock(torch.device("cpu"))), clock_kernels.stamp),
        (new_clock(torch.device("cpu")), stamp),
    ):
        run(clock, 1)
        run(clock, 0)
        assert clock[0] >= clock[1] > 0
    assert memory.margins_are_untouched()


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
    ring, words, clock = new_plan_ring(1, 2, 3, pinned=False), torch.zeros(4, dtype=torch.int32), torch.zeros(2).long()
    with pytest.raises(KernelArgumentError, match="a slot has room for 1 to 2 rows, not for 3"):
        read_plan(ring, number_of(0), words, 3, clock)
    with pytest.raises(KernelArgumentError, match=r"words must be torch\.int32"):
        read_plan(ring, number_of(0), words.float(), 1, clock)
    with pytest.raises(KernelArgumentError, match="a clock has the places 0 to 1, not 2"):
        stamp(clock, 2)
    with pytest.raises(UnsupportedDeviceError, match="read_plan has no implementation for device 'meta'"):
        read_plan(ring, number_of(0), words.to("meta"), 1, clock)
    with pytest.raises(UnsupportedDeviceError, match="write_words has no implementation for device 'meta'"):
        write_words(words.to("meta"), words, words)
    with pytest.raises(UnsupportedDeviceError, match="stamp has no implementation for device 'meta'"):
        stamp(clock.to("meta"), 0)


def test_a_cpu_that_stands_for_a_gpu_takes_its_kernels(device):
    """The whole way, as a runner goes it."""
    if device.type != "cpu":
        pytest.skip("kernels are compiled here")
    ring, words, clock = new_plan_ring(1, 2, 3, pinned=False), torch.zeros(4, dtype=torch.int32), torch.zeros(2).long()
    PlanWriter(ring).write(0, int32([1]), int32([5]), int32([3]), int32([8]))
    with cpu_stands_for_gpu():
        plan = read_plan(ring, number_of(0), words, 2, clock)
        write_words(words, *torch.tensor([[0], [9]]).int())
        stamp(clock, 1)
    assert (plan.rows.tolist(), plan.num_tokens.tolist(), words.tolist()) == ([1, -1], [5, 0], [9, 0, 0, 8])
    assert 0 < clock[0] <= clock[1]

"""What ranks share: the ring of messages, sums of parts, and the comparison of what they drew."""

import threading
from contextlib import closing

import numpy as np
import pytest
import torch

from paceline_executor.errors import RankError
from paceline_executor.ranks.guard import DrawGuard, Posts
from paceline_executor.ranks.memory import NUM_POSTS, PART_BYTES, RING_BYTES, Descriptors, GroupMemory
from paceline_executor.ranks.ring import BatchRingReader, BatchRingWriter
from paceline_executor.ranks.shared_collectives import SharedMemoryCollectives
from paceline_executor.runner.interface import StepOutput
from paceline_executor.share import Share
from paceline_kernels.linear import sum_of_slices


@pytest.fixture
def memories():
    """Of three ranks, as each maps it."""
    with closing(Descriptors.new(3)) as descriptors:
        told = Descriptors.from_json(descriptors.json())
        yield [GroupMemory(told, rank, Share(3)) for rank in range(3)]


def in_threads(*works):
    """What each returns."""
    found = [None] * len(works)

    def run(index):
        found[index] = works[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_all_followers_read_every_message_in_order(memories):
    """Also those that are longer than the ring, and that go round its end."""
    random = np.random.default_rng(0)
    sizes = [0, 1, 7, 1000, RING_BYTES // 2, RING_BYTES - 8, RING_BYTES, 3 * RING_BYTES + 5, *range(100)]
    messages = [random.bytes(size) for size in sizes]
    writer, readers = BatchRingWriter(memories[0]), [BatchRingReader(memory) for memory in memories[1:]]

    def reading(reader):
        return lambda: [bytes(reader.read()) for _ in messages]

    _, *read = in_threads(lambda: [writer.write(message) for message in messages], *map(reading, readers))
    assert read == [messages, messages]


def test_who_waits_for_a_message_goes_on_without(memories):
    reader = BatchRingReader(memories[1])
    assert reader.read(0.01) is None
    BatchRingWriter(memories[0]).write(b"late")
    assert reader.read(0.01) == b"late"


def test_a_node_that_has_not_rank_0_has_a_ring_for_its_ranks_alone():
    """Whose head, which is none, writes."""
    share = Share(9, 1, 3)
    with closing(Descriptors.new(9)) as descriptors:
        writer = BatchRingWriter(GroupMemory(descriptors, 3, share))
        readers = [BatchRingReader(GroupMemory(descriptors, rank, share)) for rank in share.followers]
        messages = [bytes(RING_BYTES), b"a", bytes(2 * RING_BYTES)]

        def reading(reader):
            return lambda: [bytes(reader.read()) for _ in messages]

        _, *read = in_threads(lambda: [writer.write(message) for message in messages], *map(reading, readers))
    assert read == [messages] * 3


def test_all_ranks_have_the_same_sums(memories):
    """Of parts that are longer than what is laid out at a time, too, however many follow each other."""
    shapes = [(1, 3), (0, 8), (5, PART_BYTES // 8), (2, 64), (2, 64), (2, 64)]
    parts = [[torch.rand(shape) - 0.5 for shape in shapes] for _ in memories]

    def summing(memory):
        sums = SharedMemoryCollectives(memory)
        return lambda: [sums.sum(part) for part in parts[memory.rank]]

    found = in_threads(*map(summing, memories))
    for of_shape in zip(*parts, *found, strict=True):
        expected = sum_of_slices(torch.stack(of_shape[:3]))
        assert all(torch.equal(total, expected) for total in of_shape[3:])


def test_all_ranks_have_the_parts_of_all(memories):
    """By rank, also those that are longer than what is laid out at a time, and between sums."""
    shapes = [(3,), (0, 8), (2, PART_BYTES // 8 - 1), (4, 2)]
    parts = [[torch.randint(-(2**62), 2**62, shape) for shape in shapes] for _ in memories]
    for of_rank in parts:
        of_rank.append(torch.from_numpy(np.empty(0, np.int64)))  # of a step that draws nothing; it has a stride of 0

    def gathering(memory):
        collectives = SharedMemoryCollectives(memory)

        def gather(part):
            collectives.sum(torch.ones(1, 2))
            return collectives.gather(part)

        return lambda: [gather(part) for part in parts[memory.rank]]

    for gathered in in_threads(*map(gathering, memories)):
        assert all(map(torch.equal, gathered, map(torch.stack, zip(*parts, strict=True))))


def output(*tokens, num_accepted=None):
    counts = np.array([len(tokens)] if num_accepted is None else num_accepted, np.int32)
    return StepOutput(counts, np.array(tokens, np.int32), None, {}, 0, 0)


def post(memories, step, drawn):
    for memory in memories[1:]:
        Posts(memory).landed(step, drawn)


def test_steps_are_compared_when_all_have_posted(memories):
    guard = DrawGuard(memories[0])
    for step in range(3 * NUM_POSTS):
        post(memories[:2], step, output(step))
        guard.landed(step, output(step)) if step < 2 else None
        post([None, memories[2]], step, output(step))
        guard.landed(step, output(step)) if step >= 2 else None


DIFFERENCES = {"token": output(1, 3), "number of tokens": output(1), "row": output(1, 2, num_accepted=[1, 1])}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_the_first_step_that_differs_is_named(memories, difference):
    guard = DrawGuard(memories[0])
    for step in range(2):
        post(memories, step, output(1, 2))
        guard.landed(step, output(1, 2))
    Posts(memories[1]).landed(2, output(1, 2))
    guard.landed(2, output(1, 2))  # rank 2 has not posted yet
    Posts(memories[2]).landed(2, DIFFERENCES[difference])
    post(memories, 3, output(1, 2))
    with pytest.raises(RankError, match="rank 2 drew other tokens than rank 0 in step 2"):
        guard.landed(3, output(1, 2))

"""A phase pool: every piece is done by one worker, phases follow each other, and nobody waits for a worker."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_kernels.compiler import jit
from paceline_kernels.decoder import phase_pool

MAX_PIECES = 30
MAX_WAIT_S = 60


@jit.compiled_for_python
def claim(counters, index, worker, num_workers, num_pieces):
    """The next piece, for Python."""
    return phase_pool.claim(counters, index, worker, num_workers, num_pieces)


@jit.compiled_for_python
def finish(counters, index, num_done):
    """Say that pieces are done, from Python."""
    return phase_pool.finish(counters, index, num_done)


@jit.compiled_for_python
def reset(counters, index):
    """Begin anew, from Python."""
    phase_pool.reset(counters, index)


@jit.compiled
def do_piece(phase, piece, num_pieces, doers, too_early):
    """Count who does the piece; note it where a piece of the phase before is not done yet."""
    for before in range(num_pieces[phase - 1] if phase else 0):
        if doers[phase - 1, before] == 0:
            too_early[phase, piece] = 1
    doers[phase, piece] += 1


@jit.compiled_for_python
def walk(counters, num_pieces, doers, too_early, worker, num_workers):
    """One worker's way through all phases, as the decoder's."""
    for phase in range(num_pieces.shape[0]):
        num_done, piece = 0, phase_pool.claim(counters, phase, worker, num_workers, num_pieces[phase])
        while piece < num_pieces[phase]:
            do_piece(phase, piece, num_pieces, doers, too_early)
            num_done += 1
            piece = phase_pool.claim(counters, phase, worker, num_workers, num_pieces[phase])
        phase_pool.meet(counters, phase, num_done, num_pieces[phase])


class Work:
    """Some phases of some pieces, and what was seen of them."""

    def __init__(self, num_pieces):
        self.counters = phase_pool.new_counters(len(num_pieces))
        self.num_pieces = np.array(num_pieces, dtype=np.int64)
        self.doers = np.zeros((len(num_pieces), MAX_PIECES), dtype=np.int64)
        self.too_early = np.zeros_like(self.doers)

    def walk(self, worker=0, num_workers=4):
        """Be one of the workers."""
        walk(self.counters, self.num_pieces, self.doers, self.too_early, worker, num_workers)

    def assert_done(self):
        """Each piece by exactly one worker, after all of the phase before."""
        expected = np.arange(MAX_PIECES) < self.num_pieces[:, None]
        assert np.array_equal(self.doers, expected)
        assert not self.too_early.any()


def started(function, num_threads=1):
    """Threads that run the function; compiled code lets go of the GIL."""
    threads = [threading.Thread(target=function, daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    return threads


def joined(threads):
    """All of them have ended."""
    for thread in threads:
        thread.join(MAX_WAIT_S)
    return not any(thread.is_alive() for thread in threads)


@settings(max_examples=settings.default.max_examples // 2)
@given(
    num_pieces=st.lists(st.integers(0, MAX_PIECES), min_size=1, max_size=12),
    num_workers=st.integers(1, 4),
    num_expected=st.integers(1, 20),
)
def test_every_piece_is_done_once_and_after_those_of_the_phase_before(num_pieces, num_workers, num_expected):
    work = Work(num_pieces)
    together = threading.Barrier(num_workers)

    def walk_as(worker):
        together.wait(MAX_WAIT_S)
        work.walk(worker % num_expected, num_expected)

    threads = [thread for worker in range(num_workers) for thread in started(lambda worker=worker: walk_as(worker))]
    assert joined(threads)
    work.assert_done()


@given(num_pieces=st.integers(0, MAX_PIECES), num_workers=st.integers(1, 20), worker=st.integers(0, 19))
def test_a_worker_reads_its_range_in_order_and_then_the_following_ones(num_pieces, num_workers, worker):
    """Alone it does everything: from the beginning of its range to the end, then from the beginning on."""
    counters = phase_pool.new_counters(1)
    claimed = [claim(counters, 0, worker % num_workers, num_workers, num_pieces) for _ in range(num_pieces)]
    begun = claimed.index(0) if claimed else 0
    assert claimed[begun:] + claimed[:begun] == list(range(num_pieces))
    assert claim(counters, 0, worker % num_workers, num_workers, num_pieces) == num_pieces


def test_workers_begin_in_ranges_of_their_own():
    """Each reads a part of its own for as long as nobody is done with his."""
    counters = phase_pool.new_counters(1)
    turns = [[claim(counters, 0, worker, 3, 12) for worker in range(3)] for _ in range(4)]
    assert turns == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


def test_claims_are_unique():
    """Four workers, a thousand claims each: the numbers from 0 to 3999."""
    counters = phase_pool.new_counters(1)
    claimed = np.zeros((4, 1000), dtype=np.int64)
    threads = [
        thread
        for worker, row in enumerate(claimed)
        for thread in started(lambda worker=worker, row=row: claim_many(counters, worker, row))
    ]
    assert joined(threads)
    assert np.array_equal(np.sort(claimed.ravel()), np.arange(4000))


@jit.compiled_for_python
def claim_many(counters, worker, claimed):
    """Fill the array with claims, of two ranges that four workers share."""
    for i in range(claimed.shape[0]):
        claimed[i] = phase_pool.claim(counters, 0, worker // 2, 2, 4000)


def test_a_worker_that_never_comes_stops_nobody():
    """One walks alone through what four could share; who comes when all is done finds nothing to do."""
    work = Work([4, 0, 7, 1])
    work.walk()
    work.assert_done()
    work.walk(worker=1)
    work.assert_done()


def test_the_next_phase_waits_for_the_piece_that_somebody_holds():
    """It was claimed but is not done: the others do all the rest of its phase, and nothing beyond."""
    work = Work([5, 3])
    held = claim(work.counters, 0, 0, 4, 5)
    threads = started(work.walk, 2)
    while work.doers[0].sum() < 4:
        time.sleep(0.001)
    assert not work.doers[1].any()
    assert all(thread.is_alive() for thread in threads)
    work.doers[0, held] += 1
    finish(work.counters, 0, 1)
    assert joined(threads)
    work.assert_done()


def test_finish_says_how_many_were_done_before():
    """So that the last one knows that it is."""
    counters = phase_pool.new_counters(2)
    assert [finish(counters, 1, count) for count in (2, 0, 3, 1)] == [0, 2, 2, 5]
    assert finish(counters, 0, 1) == 0


@pytest.mark.parametrize("index", [0, 2])
def test_a_reset_counter_begins_at_zero_and_its_neighbours_go_on(index):
    counters = phase_pool.new_counters(3)
    for each in range(3):
        claim(counters, each, 0, 1, 9)
        finish(counters, each, 1)
    reset(counters, index)
    assert [claim(counters, each, 0, 1, 9) for each in range(3)] == [int(each != index) for each in range(3)]
    assert [finish(counters, each, 1) for each in range(3)] == [int(each != index) for each in range(3)]

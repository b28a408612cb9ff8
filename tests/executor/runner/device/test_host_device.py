"""A CPU as a device: its thread computes in order what is launched, nothing behind what fails, and no padding."""

import gc
import threading
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from drafting.targets import HOSTS, LIMITS, Place
from executor_rig.plans import GREEDY, placement, plan
from paceline.plan.values import RowFinish
from paceline_executor.errors import DeviceFaultError, StepFailedError
from paceline_executor.link.engine import Engine
from paceline_executor.rows.table import RowTable
from paceline_executor.runner.device import runner as runners
from paceline_executor.runner.device.host_device import HostDevice
from paceline_executor.runner.interface import StepLostError


@pytest.fixture
def device():
    return HostDevice(1)


def raising(error):
    """Work that fails."""

    def work():
        raise error

    return work


def test_a_thread_of_its_own_computes_in_order(device):
    computed = []
    for number in range(100):
        device.launch(lambda number=number: computed.append((number, threading.current_thread().name)))
    device.wait_until(lambda: len(computed) == 100)
    assert computed == [(number, "compute") for number in range(100)]


def test_what_fails_takes_along_what_is_behind_it_until_it_recovers(device):
    computed, error = [], MemoryError("of the test")
    first, later = lambda: computed.append(1), lambda: computed.append(2)
    for work in (first, raising(error), later, raising(OSError("a later one"))):
        device.launch(work)
    for ask in (lambda: device.wait_until(lambda: len(computed) == 2), device.synchronize, device.poll):
        with pytest.raises(StepLostError) as lost:
            ask()
        assert lost.value.__cause__ is error
    device.recover()
    device.launch(lambda: computed.append(3))
    device.synchronize()
    assert computed == [1, 3]


def test_what_was_there_before_the_failure_is_there(device):
    computed = []
    device.launch(lambda: computed.append(1))
    device.launch(raising(MemoryError("of the test")))
    device.wait_until(lambda: computed == [1])


def test_a_device_that_has_failed_says_so_itself(device):
    device.launch(raising(DeviceFaultError("of the test")))
    with pytest.raises(DeviceFaultError, match="of the test"):
        device.synchronize()


def test_work_that_is_waited_for_raises_what_it_raises(device):
    """And nothing is lost behind it."""
    computed = []
    device.launch(lambda: computed.append(1))
    assert device.run(lambda: [*computed]) == [1]
    with pytest.raises(OSError, match="of the test"):
        device.run(raising(OSError("of the test")))
    device.launch(lambda: computed.append(2))
    device.synchronize()
    assert computed == [1, 2]


def test_a_guess_that_fails_is_logged_and_costs_nothing_behind_it(device, failing_drafters):
    failing_drafters.allowed()
    computed = []
    with capture_logs() as lines:
        with device.guessing():
            device.launch(raising(MemoryError("of the test")))
        device.launch(lambda: computed.append(1))
        device.synchronize()
    assert computed == [1]
    assert [line["event"] for line in lines] == ["draft_failed"]


def test_the_thread_of_a_device_that_is_dropped_ends():
    device = HostDevice(1)
    thread = device.run(threading.current_thread)
    del device
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


# Steps on it


@pytest.fixture(scope="module")
def place():
    return Place(HOSTS["float32"])


@pytest.fixture(scope="module")
def runner(place):
    """Whoever asks it has rows of its own."""
    return place.runner(None)


CELLS = [(row, cell, 4 * row + cell) for row in range(2) for cell in range(4)]
STEP = plan([(0, 1), (1, 1)])


def placed(runner, ends=((), ())):
    """An engine with two rows, whose prompts are computed, and what they drew; ends: tokens that end each."""
    engine = Engine(RowTable(LIMITS), runner)
    sampling = replace(GREEDY, temperature=1.0)
    place = [placement(row, [5, 6, 7 + row], end_token_ids=ends[row], sampling=sampling) for row in range(2)]
    return engine, drawn(engine, plan([(0, 3), (1, 3)], place=place, grants=CELLS))


def drawn(engine, planned=STEP):
    return engine.collect(engine.launch(planned)).token_ids.tolist()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_step_that_fails_while_it_is_computed_is_taken_back_with_the_one_behind_it(place, runner, failing):
    """Rows are as before, and draw what they would have drawn."""
    undisturbed, _ = placed(runner)
    expected = [drawn(undisturbed) for _ in range(5)]
    engine, _ = placed(runner)
    place.device.fail_next = None if failing else MemoryError("of the test")
    tickets = [engine.launch(STEP)]
    place.device.fail_next = MemoryError("of the test") if failing else None
    tickets.append(engine.launch(STEP))
    got = [engine.collect(ticket).token_ids.tolist() for ticket in tickets[:failing]]
    before = repr(engine.table.states())
    with pytest.raises(StepLostError):
        place.device.synchronize()
    assert engine.is_done(tickets[failing])
    with pytest.raises(StepFailedError, match="memory ran out"):
        engine.collect(tickets[failing])
    assert repr(engine.table.states()) == before
    assert engine.can_launch(STEP)
    assert got + [drawn(engine) for _ in range(5 - failing)] == expected


def test_a_copy_that_fails_ends_the_executor(place, monkeypatch):
    """No step has to come behind it that could be taken back instead."""
    engine, _ = placed(place.runner(None))
    monkeypatch.setattr(runners, "block_copy", lambda *_: raising(MemoryError("of the test"))())
    copying = plan([(0, 1)], copies=[(0, 13)], grants=[(0, 4, 13)])
    with pytest.raises(DeviceFaultError, match="this executor ends"):
        engine.collect(engine.launch(copying))
    place.device.recover()


def test_nothing_but_tokens_that_go_on_is_computed(place, runner, monkeypatch):
    """Rows that ended in the step in flight have none, whatever their plan says: where all have, nothing runs."""
    undisturbed, first = placed(runner)
    second, third = drawn(undisturbed), drawn(undisturbed)
    ends = second[:1], third[1:]
    assert first[0] not in ends[0]
    assert not {first[1], second[1]} & set(ends[1])
    sizes, model = [], runner._model._model
    forward = model.forward

    def forward_and_note(inputs, *caches, **options):
        sizes.append((inputs.token_ids.shape[0], inputs.logit_tokens.shape[0]))
        assert (inputs.slot_mapping >= 0).all()
        return forward(inputs, *caches, **options)

    monkeypatch.setattr(model, "forward", forward_and_note)
    engine, again = placed(runner, ends)
    assert again == first
    tickets = [engine.launch(STEP), engine.launch(STEP)]
    results = [engine.collect(tickets[0])]
    tickets.append(engine.launch(STEP))
    results += [engine.collect(ticket) for ticket in tickets[1:]]
    assert sizes == [(6, 2), (2, 2), (1, 1)]
    assert [result.num_accepted.tolist() for result in results] == [[1, 1], [0, 1], [0, 0]]
    assert results[1].finishes.tolist()[1] == RowFinish.END_TOKEN

"""Where requests with a form of their output run: on executors that mask with the library that it was checked with."""

from dataclasses import replace

import pytest

from both_sides.audited import make_executor
from both_sides.harness import CoreHarness
from paceline.forms.library import LIBRARY
from paceline_scheduler.core.events import ExecutorRemoved
from paceline_scheduler.errors import NoExecutorError, NoLongerServedError, UnsupportedError
from scheduler_rig.requests import make_request

PLAIN, MASKING = "executor-0", "executor-1"
FORM = b"\x12\x01a"


def with_form(request):
    return replace(request, structured=FORM)


def harness_of(*libraries, **sizes):
    """A system of executors, of which each masks with this."""
    executors = [make_executor(**sizes) for _ in libraries]
    for executor, library in zip(executors, libraries, strict=True):
        _tell(executor, library)
    return CoreHarness(*executors)


def _tell(executor, library):
    welcome = executor.welcome

    def named():
        said = welcome()
        return replace(said, model=replace(said.model, structured_output=library))

    executor.welcome = named


@pytest.mark.parametrize("library", ["", "llguidance 1.0.0"])
def test_a_request_with_a_form_goes_only_to_executors_that_mask_with_the_same_library(library):
    harness = harness_of(library, LIBRARY)
    requests = [with_form(make_request()) for _ in range(4)]
    harness.submit(*requests)
    assert harness.plan(PLAIN) is None
    placed = harness.plan(MASKING).new_requests
    assert [(new.record_id, new.structured) for new in placed] == [(each.key, FORM) for each in requests]


def test_it_waits_for_the_executor_that_masks_while_others_have_room_and_others_go_before_it():
    harness = harness_of("", LIBRARY, max_num_rows=1)
    first, second, plain = with_form(make_request()), with_form(make_request()), make_request()
    harness.submit(first)
    harness.plan(MASKING)
    harness.submit(second, plain)
    assert [new.record_id for new in harness.plan(PLAIN).new_requests] == [plain.key]
    assert harness.explain(second).queue_position == 0


@pytest.mark.parametrize("library", ["", "llguidance 1.0.0"])
def test_where_no_executor_masks_it_is_refused_with_what_to_do(library):
    harness = harness_of(library)
    with pytest.raises(UnsupportedError, match=f"holds outputs to a form with {LIBRARY}; upgrade them") as caught:
        harness.submit(with_form(make_request()))
    assert caught.value.feature == "structured"
    harness.submit(make_request())


def test_one_that_another_scheduler_took_is_asked_to_come_again_while_that_executor_is_awaited():
    harness = harness_of("")
    with pytest.raises(NoExecutorError, match="try again"):
        harness.resume(replace(with_form(make_request()), attachment=2))


def test_it_fails_when_the_executors_that_mask_are_gone_and_others_are_not():
    harness = harness_of("", LIBRARY, max_num_rows=1)
    running, waiting = with_form(make_request(handle=1)), with_form(make_request(handle=2))
    harness.submit(running, waiting)
    harness.plan(MASKING)
    harness.feed(ExecutorRemoved(MASKING))
    assert {handle: type(error) for handle, error in harness.client.failures.items()} == {
        1: NoLongerServedError,
        2: NoLongerServedError,
    }
    assert "hold outputs to a form are gone" in str(harness.client.failures[2])


def test_it_is_placed_again_with_its_form_when_its_executor_dies():
    harness = harness_of(LIBRARY, LIBRARY)
    request = with_form(make_request())
    harness.submit(request)
    first = next(address for address in (PLAIN, MASKING) if harness.plan(address) is not None)
    harness.lose(first)
    (placed,) = harness.plan(MASKING if first == PLAIN else PLAIN).new_requests
    assert (placed.attempt, placed.structured) == (2, FORM)

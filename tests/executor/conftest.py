"""What tests of an executor run on: every one that asks for `seen_or_hidden` runs twice."""

import contextlib

import pytest

from paceline_executor.testing.stepping import hidden_runners


@pytest.fixture(scope="module", params=["seen", "hidden"])
def seen_or_hidden(request):
    """Engines see their runner as it is, or one that hides what it computes and has several steps in flight."""
    with hidden_runners() if request.param == "hidden" else contextlib.nullcontext():
        yield request.param

"""What tests of an executor share: runners that are seen or hide, and fifty prompts of the default model."""

import contextlib
import os
import sys
from types import SimpleNamespace

import pytest
from numba.core.registry import CPUDispatcher

import real_model
from executor_rig.stepping import hidden, runners_seen_as
from hash_twin import TwinHashRunner
from paceline_executor.runner.device import host_device
from paceline_kernels.compiler.jit import _Inner
from random_models import default_model_path


@pytest.fixture(scope="module", params=["seen", "hidden", "twin"])
def seen_or_hidden(request):
    """Engines see their runner as it is, or one that hides what it computes and has several steps in flight, or that of
    a GPU on its twin, which draws the same tokens.

    Not on the twin: what has runners of its own (speculation, runner, profiling), `test_launch_and_land` and
    `test_step_loop`, which have a hiding runner to look into, what comes to no runner (`test_attach_fence`,
    `test_attach_bounds`, `test_executor_access`, `test_executor_metrics`), and what skips it with its reason.
    """
    view = {"seen": None, "hidden": hidden, "twin": TwinHashRunner}[request.param]
    with runners_seen_as(view) if view else contextlib.nullcontext():
        yield request.param


@pytest.fixture(autouse=True)
def failing_drafters(monkeypatch):
    """A drafter that raises fails its test, though no step; with `allowed()` it may."""
    tolerate = host_device._guess
    monkeypatch.setattr(host_device, "_guess", lambda work: work())
    return SimpleNamespace(allowed=lambda: monkeypatch.setattr(host_device, "_guess", tolerate))


class CompiledCode:
    """Of the kernels' functions that Python calls, as far as they are imported: kept by the types of arguments."""

    _overloads = []  # noqa: RUF012  # other code may be linked to what is forgotten

    def forget(self):
        """As if none had been called yet."""
        modules = [module for name, module in sys.modules.items() if name.startswith("paceline_kernels.")]
        values = (value for module in modules for value in vars(module).values())
        self._functions = {each for each in values if isinstance(each, CPUDispatcher) and not isinstance(each, _Inner)}
        for function in self._functions:
            self._overloads.append(dict(function.overloads))
            function._reset_overloads()

    @property
    def signatures(self):
        """Of what was called since, by name."""
        return {function.__name__: list(function.signatures) for function in self._functions if function.signatures}


@pytest.fixture
def compiled_code():
    return CompiledCode()


@pytest.fixture(scope="session")
def default_model():
    """The default model's file, fetched once into the user's cache."""
    return default_model_path(os.environ)


@pytest.fixture(scope="session")
def fifty_prompts(default_model):
    """Token ids."""
    return real_model.fifty_prompts(default_model)

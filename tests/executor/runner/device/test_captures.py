"""A capture on a GPU, as far as a machine without one can show it: what torch is asked, and what is left behind."""

import gc
from contextlib import contextmanager

import pytest
import torch

from paceline_executor.runner.device.device import CudaDevice


class Cuda:
    """What there is of torch.cuda: a stream that a capture which fails does not put back, as torch's does not."""

    def __init__(self, monkeypatch):
        self.stream, self.graphs = "the steps'", []
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "stream", stream))
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    @contextmanager
    def graph(self, graph, pool):
        self.stream = "a capture's"
        yield
        self.graphs.append((graph, pool))
        self.stream = "the steps'"


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


@pytest.fixture
def device():
    """A GPU's device without one."""
    device = CudaDevice.__new__(CudaDevice)
    device._pool = "pool"
    return device


def test_nothing_is_collected_while_a_step_is_captured(cuda, device):
    """An older runner's graphs would be destroyed in the middle of it. The run before may collect."""
    seen = []
    captured = device.capture(lambda: seen.append(gc.isenabled()) or len(seen))
    assert seen == [True, False]
    assert captured.outputs == 2
    assert [pool for _, pool in cuda.graphs] == ["pool"]
    assert gc.isenabled()


def test_a_capture_that_fails_leaves_the_stream_and_the_collector_as_they_were(cuda, device):
    runs = iter([None, RuntimeError("of the test")])

    def work():
        if error := next(runs):
            raise error

    with pytest.raises(RuntimeError, match="of the test"):
        device.capture(work)
    assert (cuda.stream, cuda.graphs) == ("the steps'", [])
    assert gc.isenabled()

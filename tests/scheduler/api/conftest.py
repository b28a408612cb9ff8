"""Edge and server of each test over a scripted backend, with the MODEL and the LIMITS of its module, and clients."""

import grpc
import pytest

from edge_rig import tiny
from edge_rig.edge_client import EdgeClient, scripted_edge
from edge_rig.edge_server import serve_edge
from edge_rig.scripted_backend import ScriptedBackend
from paceline.v1.inference_pb2_grpc import InferenceServiceStub
from paceline_scheduler.api.limits import EdgeLimits


@pytest.fixture
def model(request):
    """What is served."""
    return getattr(request.module, "MODEL", tiny.MODEL)


@pytest.fixture
def limits(request):
    """Those of the edge."""
    return getattr(request.module, "LIMITS", EdgeLimits())


@pytest.fixture
async def edge(model, limits):
    """Without gRPC."""
    async with scripted_edge(model, limits) as edge:
        yield edge


@pytest.fixture
async def client(edge):
    """A client's call at that edge."""
    return EdgeClient(edge)


@pytest.fixture
async def server(model, limits):
    """With gRPC."""
    async with serve_edge(ScriptedBackend(model), limits) as server:
        yield server


@pytest.fixture
def backend(request):
    """What the test runs requests with, behind whichever of the two it uses."""
    return request.getfixturevalue("edge" if "edge" in request.fixturenames else "server").backend


@pytest.fixture
async def channel(server):
    """A client's connection."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    """That client."""
    return InferenceServiceStub(channel)
